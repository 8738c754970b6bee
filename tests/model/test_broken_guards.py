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
        "where a.outcome = 'succeeded'",
        "where a.outcome = 'lost'",
    ),
    "a failure is taken for a completion": (
        "complete",
        "where a.outcome = 'succeeded'",
        "where true",
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
        "_claim_due",
        "for update skip locked",
        "for update",
    ),
    "lapsed leases leave no evidence": (
        "_claim_reclaim",
        "e.attempt < e.max_attempts\n            or ",
        "",
    ),
    "an exhausted job has no code": (
        "_claim_reclaim",
        "case when e.attempt >= e.max_attempts then 'attempts_exhausted' end",
        "null",
    ),
    "renew shortens a lease": (
        "renew",
        "greatest(\n            l.lease_expires_at, clock_timestamp() + make_interval(secs => i.lease_seconds)\n        )",
        "clock_timestamp() + make_interval(secs => i.lease_seconds)",
    ),
    "renew_many shortens a lease": (
        "renew_many",
        "greatest(\n        l.lease_expires_at, clock_timestamp() + make_interval(secs => i.lease_seconds)\n    )",
        "clock_timestamp() + make_interval(secs => i.lease_seconds)",
    ),
    "renew_many revives an expired lease": (
        "renew_many",
        "where l.job_id = any (v_mine) and l.lease_expires_at > clock_timestamp()",
        "where l.job_id = any (v_mine)",
    ),
    "renew_many waits for locks": (
        "renew_many",
        "for update skip locked",
        "for update",
    ),
    "a retry is never capped": (
        "_lease_retry_at",
        "least(\n                p_base_seconds * 2.0::double precision ^ least(p_attempt - 1, 17),\n                p_max_seconds\n            )",
        "(p_base_seconds * 2.0::double precision ^ least(p_attempt - 1, 17))",
    ),
    "a wait that a worker names is never capped": (
        "_lease_retry_at",
        "least(p_after_seconds, p_max_seconds)",
        "p_after_seconds",
    ),
    "a failure goes on without attempts": (
        "_lease_give_back",
        "when i.retryable and t.attempt < t.max_attempts",
        "when i.retryable",
    ),
    "a failure is repeated with another code": (
        "_lease_give_back",
        'a.failure_code = p_failure_codes[i.item] collate "C"',
        "true",
    ),
    "a release uses up an attempt": (
        "_lease_give_back",
        "least(d.max_attempts, 2147483646) + 1",
        "d.max_attempts",
    ),
    "a release without a delay loses its place": (
        "_lease_give_back",
        "i.delay_seconds = 0 then t.available_at",
        "i.delay_seconds = 0 then t.ended_at",
    ),
    "a failure is taken for a release": (
        "_lease_give_back",
        "when p_failure_codes is null then a.outcome = 'released'",
        "when p_failure_codes is null then true",
    ),
    "a release forgets an earlier failure": (
        "_lease_give_back",
        "coalesce(d.failure_code, d.last_failure_code)",
        "d.failure_code",
    ),
    "of a failure given twice the last counts": (
        "_lease_give_back",
        "array_agg(l.ctid order by i.item), array_agg(i.item order by i.item)",
        "array_agg(l.ctid order by i.item desc), array_agg(i.item order by i.item desc)",
    ),
    "complete_many takes expired leases": (
        "complete_many",
        "and l.lease_expires_at > clock_timestamp()",
        "",
    ),
    "enqueue overlooks another intent": (
        "_enqueue_again",
        "if not v_known.is_same then",
        "if v_known.is_same is null then",
    ),
    "enqueue_many overlooks another time": (
        "_enqueue_known_job",
        "and j.available_at is not distinct from p_available_at",
        "",
    ),
    "keys are shared by producers": (
        "_enqueue_known_job",
        'i.producer = p_producer collate "C"\n            and ',
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
    "redrive takes what succeeded": (
        "_redrive_jobs",
        "_status(false, false, a.outcome, a.failure_code) = 'failed'",
        "true",
    ),
    "redrive counts attempts anew": (
        "_redrive_jobs",
        "a.attempt, a.attempt + p_extra_attempts",
        "0, p_extra_attempts",
    ),
    "redrive locks no job": (
        "_redrive_jobs",
        "update job as j set producer = j.producer where j.job_id = any (p_job_ids);",
        "",
    ),
    "redriven jobs have no code": (
        "_redrive_jobs",
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
        'e.queue = p_queue collate "C"',
        "true",
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
        "or l.lease_expires_at <= clock_timestamp()",
        "or l.lease_expires_at is not null",
    ),
    "a lapsed attempt is said to be over": (
        "inspect_attempts",
        "l.lease_owner is not null",
        "l.lease_expires_at > clock_timestamp()",
    ),
    "a lapsed lease is said to be live": (
        "_explain_row",
        "v_job.lease_expires_at > v_now",
        "v_job.lease_expires_at is not null",
    ),
    "a locked row is said to be free": (
        "_explain_lock",
        "l.transactionid = p_locker",
        "false",
    ),
    "a paused queue is claimed": ("claim", "if v_paused then", "if false then"),
    "erase takes a job that is live": (
        "erase",
        "where l.job_id = p_job_id)",
        "where false)",
    ),
    "inspect shows the jobs of all producers": (
        "inspect",
        "not _may_inspect(v_answer.producer)",
        "false",
    ),
    "leased jobs are said to be ahead": (
        "_explain_queue",
        "and (l.lease_expires_at is null or l.lease_expires_at <= v_now)",
        "",
    ),
}


# Found within a few hundred steps.
SOON = {
    "a paused queue is claimed",
    "claim counts no attempt",
    "enforce_retention keeps nothing",
    "enforce_retention knows no limit",
    "erase takes a job that is live",
    "inspect shows the jobs of all producers",
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
    owner.execute("select _catalogue_store_digest(true)")

    with pytest.raises(AssertionError):
        run(bench, examples=1000, number=1, phases=GENERATED)
