"""What the model is worth: each guard of the functions, broken, makes a history differ."""

import pytest

from jobs_machine import GENERATED, run

GUARDS = {
    "complete compares no token": (
        "complete",
        "and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))",
        "",
    ),
    "complete looks at no owner": ("complete", "and l.lease_owner = _caller()", ""),
    "complete takes an expired lease": (
        "complete",
        "where e.lease_expires_at > clock_timestamp()",
        "",
    ),
    "a completion cannot be repeated": (
        "complete",
        "and a.outcome = 'succeeded'",
        "and a.outcome = 'lost'",
    ),
    "a failure is taken for a completion": (
        "complete",
        "and a.outcome = 'succeeded'",
        "",
    ),
    "claim counts no attempt": (
        "claim",
        "attempt = l.attempt + 1",
        "attempt = l.attempt",
    ),
    "claim gives a leased job away": (
        "claim",
        "and (d.lease_expires_at is null or d.lease_expires_at <= v_now)",
        "",
    ),
    "claim of many waits for locks": (
        "_lease_due",
        "for update skip locked",
        "for update",
    ),
    "lapsed leases leave no evidence": (
        "_reclaim",
        "e.attempt < e.max_attempts\n            or ",
        "",
    ),
    "an exhausted job has no code": (
        "_reclaim",
        "case when e.attempt >= e.max_attempts then 'attempts_exhausted' end",
        "null",
    ),
    "renew shortens a lease": (
        "renew",
        "greatest(v_expires_at, v_now + v_lease)",
        "v_now + v_lease",
    ),
    "renew_many shortens a lease": (
        "renew_many",
        "greatest(\n        l.lease_expires_at, v_now + make_interval(secs => n.lease_seconds)\n    )",
        "v_now + make_interval(secs => n.lease_seconds)",
    ),
    "renew_many revives an expired lease": (
        "renew_many",
        "where l.job_id = any (v_mine) and l.lease_expires_at > v_now",
        "where l.job_id = any (v_mine)",
    ),
    "renew_many waits for locks": (
        "renew_many",
        "for update skip locked",
        "for update",
    ),
    "a retry is never capped": (
        "_retry_at",
        "least(\n            p_base_seconds * 2.0::double precision ^ least(p_attempt - 1, 17),\n            p_max_seconds\n        )",
        "(p_base_seconds * 2.0::double precision ^ least(p_attempt - 1, 17))",
    ),
    "fail goes on without attempts": (
        "fail",
        "if p_retryable and v_job.attempt < v_job.max_attempts then",
        "if p_retryable then",
    ),
    "fail_many goes on without attempts": (
        "fail_many",
        "case when i.retryable and t.attempt < t.max_attempts",
        "case when i.retryable",
    ),
    "fail repeats whatever code": (
        "fail",
        'and a.failure_code = p_failure_code collate "C"',
        "",
    ),
    "of a failure given twice the last counts": (
        "fail_many",
        "order by i.job_id, i.ordinality",
        "order by i.job_id, i.ordinality desc",
    ),
    "complete_many takes expired leases": (
        "complete_many",
        "and l.lease_expires_at > clock_timestamp()",
        "",
    ),
    "enqueue overlooks another intent": (
        "enqueue",
        "if not v_is_same then",
        "if v_is_same is null then",
    ),
    "enqueue_many overlooks another time": (
        "enqueue_many",
        "and j.available_at is not distinct from i.available_at",
        "",
    ),
    "keys are shared by producers": (
        "enqueue",
        "i.producer = v_caller\n                and ",
        "",
    ),
    "purge takes live jobs": (
        "purge",
        "(select l.job_id from live_job as l where l.job_id = a.job_id)\n                is null",
        "true",
        "(select l.job_id from live_job as l where l.job_id = j.job_id) is null",
        "true",
    ),
    "purge leaves evidence behind": (
        "purge",
        "delete from attempt as a where a.job_id = any (v_job_ids);",
        "",
    ),
    "redrive takes what succeeded": ("_requeue", "a.outcome <> 'succeeded'", "true"),
    "redrive counts attempts anew": (
        "_requeue",
        "a.attempt, a.attempt + p_extra_attempts",
        "0, p_extra_attempts",
    ),
    "redrive locks no job": (
        "_requeue",
        "update job as j set producer = j.producer where j.job_id = any (p_job_ids);",
        "",
    ),
    "redriven jobs have no code": (
        "_requeue",
        "j.queue, a.failure_code",
        "j.queue, null",
    ),
    "redrive_failed overlooks the code": (
        "redrive_failed",
        'or e.failure_code = p_failure_code collate "C"',
        "or true",
    ),
    "redrive_failed takes what failed before since": (
        "redrive_failed",
        "e.ended_at >= p_since",
        "true",
    ),
    "redrive_failed takes what failed at before": (
        "redrive_failed",
        "e.ended_at < coalesce",
        "e.ended_at <= coalesce",
    ),
    "redrive_failed takes what failed later": (
        "redrive_failed",
        "e.ended_at < coalesce(p_before, 'infinity')",
        "true",
    ),
    "redrive_failed takes one more than its limit": (
        "redrive_failed",
        "limit p_limit",
        "limit p_limit + 1",
    ),
    "redrive_failed takes the latest first": (
        "redrive_failed",
        "order by e.ended_at, e.job_id",
        "order by e.ended_at desc, e.job_id desc",
    ),
    "redrive_failed takes jobs of every queue": (
        "redrive_failed",
        'and i.queue = p_queue collate "C"',
        "",
    ),
    "enforce_retention keeps nothing": (
        "enforce_retention",
        "clock_timestamp() - make_interval(secs => i.retention_seconds)",
        "clock_timestamp()",
    ),
    "enforce_retention knows no limit": (
        "enforce_retention",
        "purge(v_before, p_limit)",
        "purge(v_before, 10000)",
    ),
    "purge goes by no time": (
        "purge",
        "e.ended_at < p_before",
        "true",
        "p_before > (",
        "'infinity' > (",
    ),
    "retire_expired ends leases that are live": (
        "retire_expired",
        "l.lease_expires_at <= clock_timestamp()",
        "l.lease_expires_at is not null",
    ),
    "a lapsed attempt is said to be over": (
        "inspect_attempts",
        "l.lease_owner is not null",
        "l.lease_expires_at > clock_timestamp()",
    ),
    "a lapsed lease is said to be live": (
        "explain_job",
        "v_job.lease_expires_at > v_now",
        "v_job.lease_expires_at is not null",
    ),
    "a locked row is said to be free": (
        "_explained_lock",
        "l.transactionid = p_locker",
        "false",
    ),
    "leased jobs are said to be ahead": (
        "_explained_queue",
        "and (l.lease_expires_at is null or l.lease_expires_at <= v_now)",
        "",
    ),
    "a purge is named that deleted nothing": (
        "_explained_absence",
        "and o.job_count > 0",
        "",
    ),
}


# Found within a few hundred steps.
SOON = {
    "claim counts no attempt",
    "enforce_retention keeps nothing",
    "enforce_retention knows no limit",
    "purge goes by no time",
    "redrive takes what succeeded",
    "retire_expired ends leases that are live",
}


def broken(owner, guard):
    name, *changes = GUARDS[guard]
    definition = owner.value(
        "select pg_get_functiondef(p.oid) from pg_proc as p"
        " where p.pronamespace = 'jobs_email'::regnamespace and p.proname = %s",
        name,
    )
    for sound, unsound in zip(changes[::2], changes[1::2], strict=True):
        assert sound in definition
        definition = definition.replace(sound, unsound)
    return definition


def test_every_guard_is_where_it_can_be_broken(owner):
    for guard in GUARDS:
        broken(owner, guard)


@pytest.mark.parametrize(
    "guard",
    [
        pytest.param(each, marks=pytest.mark.slow if each in SOON else pytest.mark.long)
        for each in GUARDS
    ],
)
def test_a_broken_guard_is_found(bench, owner, guard):
    owner.execute(broken(owner, guard))
    # Or explain_job would tell.
    owner.execute(
        "update installed_object as i set digest = o.digest from _objects() as o"
        " where (o.kind, o.name) = (i.kind, i.name)"
    )

    with pytest.raises(AssertionError):
        run(bench, examples=1000, number=1, phases=GENERATED)
