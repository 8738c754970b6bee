"""What every verb of a worker asks of a lease before it does anything."""

from dataclasses import dataclass
from uuid import uuid4

import pytest

NO_TOKEN = "job_lease_" + 64 * "0"


@dataclass
class Verb:
    """One verb with sound arguments; they are given by name, in another order."""

    name: str
    outcome: str
    more: dict[str, str]

    @property
    def is_many(self):
        return self.name.endswith("_many")

    def call(self, session, job_id, token):
        """Call the verb for one lease; returns the outcome."""
        names = ("p_job_ids", "p_lease_tokens") if self.is_many else ()
        job, lease = names or ("p_job_id", "p_lease_token")
        cast = "array[{}]" if self.is_many else "{}"
        given = {
            **{name: cast.format(value) for name, value in self.more.items()},
            lease: cast.format("%s::text"),
            job: cast.format("%s::uuid"),
        }
        arguments = ", ".join(f"{name} => {value}" for name, value in given.items())
        if not self.is_many:
            session.rows(f"select {self.name}({arguments})", token, job_id)
            return self.outcome
        row = session.row(f"select * from {self.name}({arguments})", token, job_id)
        assert (row.pop("position"), row.pop("job_id")) == (1, job_id)
        outcome = row.pop("outcome")
        if outcome == "invalid_lease":
            assert set(row.values()) <= {None}
        return outcome

    def refuse(self, session, job_id, token, *secrets):
        """Insist that the lease is invalid, and that no message shows a token."""
        if self.is_many:
            assert self.call(session, job_id, token) == "invalid_lease"
            return
        with session.refusing("LJ004") as caught:
            self.call(session, job_id, token)
        assert "lease" in caught.value.diag.message_primary
        for secret in secrets:
            assert secret not in str(caught.value)
            assert secret not in (caught.value.diag.context or "")


RETRYABLE = {"p_retryable": "true", "p_failure_code": "'timeout'"}
FINAL = {"p_retryable": "false", "p_failure_code": "'timeout'"}
MANY_RETRYABLE = {"p_retryable": "true", "p_failure_codes": "'timeout'"}
MANY_FINAL = {"p_retryable": "false", "p_failure_codes": "'timeout'"}
VERBS = {
    "renew": Verb("renew", "renewed", {}),
    "complete": Verb("complete", "completed", {}),
    "fail to retry": Verb("fail", "queued", RETRYABLE),
    "fail": Verb("fail", "failed", FINAL),
    "release": Verb("release", "queued", {"p_delay_seconds": "7"}),
    "renew_many": Verb("renew_many", "renewed", {}),
    "complete_many": Verb("complete_many", "completed", {}),
    "fail_many to retry": Verb("fail_many", "queued", MANY_RETRYABLE),
    "fail_many": Verb("fail_many", "failed", MANY_FINAL),
    "release_many": Verb("release_many", "queued", {"p_delays_seconds": "7"}),
}
every_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)


@every_verb
def test_a_live_lease_of_the_callers_own_is_served(verb, worker, enqueue, claim):
    enqueue()

    assert verb.call(worker, *claim()) == verb.outcome


@every_verb
def test_an_expired_lease_is_refused_even_without_another_claim(
    verb, worker, connect, enqueue, claim, expire, state
):
    job_id = enqueue()
    held = claim()
    expire(job_id)
    before = state()

    verb.refuse(worker, *held, held[1])

    assert state() == before
    assert claim(session=connect("email-worker"))[0] == job_id


@every_verb
@pytest.mark.parametrize("successor", ["email-worker", "spare-worker"])
def test_a_superseded_lease_is_refused(
    verb, successor, worker, connect, enqueue, claim, expire, state
):
    job_id = enqueue()
    stale = claim()
    expire(job_id)
    fresh = connect(successor)
    held = claim(session=fresh)
    before = state()

    verb.refuse(worker, *stale)

    assert state() == before
    assert verb.call(fresh, *held) == verb.outcome


@every_verb
def test_a_last_lease_that_ran_out_is_refused(
    verb, worker, rival, enqueue, claim, expire, state
):
    job_id = enqueue(max_attempts=1)
    held = claim()
    expire(job_id)
    rival.execute("select claim('email')")
    before = state()

    verb.refuse(worker, *held)

    assert state() == before


ENDS = {
    "complete": "complete(%s, %s)",
    "fail to retry": "fail(%s, %s, 'other', true)",
    "fail": "fail(%s, %s, 'other', false)",
    "release": "release(%s, %s, 9)",
}
# To repeat a call returns the first answer: each verb's own file tests it.
REPEATED = {("complete", "complete"), ("release", "release")}


@every_verb
@pytest.mark.parametrize("end", ENDS)
def test_a_lease_that_was_ended_otherwise_is_refused(
    verb, end, worker, enqueue, claim, state
):
    enqueue()
    held = claim()
    worker.execute(f"select {ENDS[end]}", held)
    before = state()

    if (verb.name.removesuffix("_many"), end) in REPEATED:
        verb.call(worker, *held)
    else:
        verb.refuse(worker, *held)

    assert state() == before


@every_verb
def test_any_other_owner_token_or_job_is_refused(
    verb, worker, rival, owner, enqueue, claim, state
):
    enqueue(), enqueue()
    (job_id, token), (other_id, other_token) = claim(), claim()
    stored = owner.value("select encode(lease_token_hash, 'hex') from live_job limit 1")
    before = state()

    for session, *held in (
        (rival, job_id, token),
        (owner, job_id, token),
        (worker, job_id, other_token),
        (worker, other_id, token),
        (worker, uuid4(), token),
        (worker, job_id, NO_TOKEN),
        (worker, job_id, ""),
        (worker, job_id, token.upper()),
        (worker, job_id, token + " "),
        (worker, job_id, token[:-1]),
        (worker, job_id, token.removeprefix("job_lease_")),
        (worker, job_id, stored),
        (worker, job_id, "\\x" + stored),
        (worker, job_id, "é\\000\\"),
        (worker, None, token),
        (worker, job_id, None),
        (worker, None, None),
    ):
        verb.refuse(session, *held, token, other_token)

    assert state() == before


@every_verb
def test_a_job_without_a_claim_is_refused(verb, worker, enqueue, state):
    job_id = enqueue()
    before = state()

    for token in (NO_TOKEN, "", None):
        verb.refuse(worker, job_id, token)

    assert state() == before


@every_verb
def test_the_owner_of_a_lease_is_the_role_in_force(verb, owner, enqueue, claim):
    enqueue()
    held = claim()

    with owner.transaction(force_rollback=True):
        owner.execute('set local role "email-worker"')
        assert verb.call(owner, *held) == verb.outcome
    with owner.transaction(force_rollback=True):
        owner.execute('set local role "spare-worker"')
        verb.refuse(owner, *held)


@every_verb
@pytest.mark.usefixtures("read_committed")
def test_a_lease_is_judged_by_the_clock_not_the_transactions_start(
    verb, connect, owner, enqueue, claim
):
    enqueue()
    held = claim()
    session = connect("email-worker")

    with session.transaction(force_rollback=True):
        session.execute("select 1")
        owner.execute("update live_job set lease_expires_at = clock_timestamp()")
        verb.refuse(session, *held)


@every_verb
def test_a_lease_that_was_renewed_beyond_its_first_end_is_served(
    verb, worker, owner, enqueue, claim
):
    enqueue()
    held = claim()
    owner.execute(
        "update live_job set lease_expires_at = clock_timestamp() + interval '2 s'"
    )
    worker.execute("select renew(%s, %s)", held)

    assert verb.call(worker, *held) == verb.outcome


@every_verb
def test_no_other_job_is_touched(verb, worker, enqueue, claim, state):
    enqueue(), enqueue(), enqueue(), enqueue(queue="slow")
    held, _ = claim(), claim()
    before = state()["live_job"]

    verb.call(worker, *held)

    changed = set(before) - set(state()["live_job"])
    assert [str(held[0]) in row for (row,) in changed] == [True]


@every_verb
def test_a_call_rolls_back_with_the_callers_transaction(
    verb, worker, enqueue, claim, state
):
    enqueue()
    held = claim()
    before = state()

    with worker.transaction(force_rollback=True):
        assert verb.call(worker, *held) == verb.outcome

    assert state() == before


# Batches.

many = pytest.mark.parametrize(
    ("function", "more"),
    {
        "renew_many": [],
        "complete_many": [],
        "fail_many": ["'timeout'", "false"],
        "release_many": ["0"],
    }.items(),
)


@many
def test_a_batch_counts_positions_from_1_for_any_bounds_of_its_arrays(
    function, more, worker, lease_many
):
    job_ids, tokens = lease_many(2)
    items = [*zip(job_ids, tokens, strict=True)]

    for bounds, (job_id, token) in zip(("[0:0]", "[-3:-3]"), items, strict=True):
        rest = [f"'{bounds}={{{value}}}'" for value in map(_bare, more)]
        arguments = ["%s::uuid[]", "%s::text[]", *rest]
        row = worker.row(
            f"select position, job_id, outcome from {function}({', '.join(arguments)})",
            f"{bounds}={{{job_id}}}",
            f"[5:5]={{{token}}}",
        )
        assert (row["position"], row["job_id"]) == (1, job_id)
        assert row["outcome"] in {"renewed", "completed", "queued", "failed"}


def _bare(value):
    return value.strip("'")


@many
def test_a_batch_is_refused_unless_its_lists_are_parallel_and_of_1_to_1000_items(
    function, more, worker, lease_many, state
):
    lease_many(1)
    items = ["gen_random_uuid()", "'t'::text", *more]
    good = [f"array[{item}]" for item in items]
    before = state()

    bad = [
        [*good[:place], form.format(item), *good[place + 1 :]]
        for place, item in enumerate(items)
        for form in ("null", "'{{}}'", "array[{0}, {0}]", "array[array[{0}]]")
    ]
    bad += [["null"] * len(items), ["'{}'"] * len(items)]
    bad += [
        [f"array_fill({item}{_cast(item)}, array[{size}])" for item in items]
        for size in ("1001", "2, 500", "1, 1")
    ]
    for arguments in bad:
        with worker.refusing("LJ007") as caught:
            worker.rows(f"select * from {function}({', '.join(arguments)})")
        assert "job_ids" in caught.value.diag.message_primary, arguments
        assert "lease_tokens" in caught.value.diag.message_primary, arguments

    assert state() == before


def _cast(item):
    return "::text" if item == "'timeout'" else ""


@many
def test_a_refused_batch_shows_no_token(function, more, worker, lease_many):
    (job_id,), (token,) = lease_many(1)
    rest = "".join(f", array[{item}]" for item in more)

    with worker.refusing("LJ007") as caught:
        worker.rows(
            f"select * from {function}(array[%s]::uuid[], array[%s, %s]::text[]{rest})",
            job_id,
            token,
            token,
        )

    assert token not in str(caught.value)
    assert token not in (caught.value.diag.context or "")


SETTINGS = [
    "set standard_conforming_strings to off; set escape_string_warning to off",
    "set bytea_output to 'escape'; set timezone to 'Asia/Kathmandu'",
    "set default_transaction_isolation to 'serializable'",
    "set plan_cache_mode to force_custom_plan; set enable_nestloop to off",
    "set enable_hashjoin to off; set enable_sort to off; set enable_material to off",
    "set array_nulls to off; set search_path to pg_temp, jobs_email",
]


@many
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_batch_returns_the_same_under_any_setting_of_the_session(
    function, more, settings, worker, lease_many
):
    (first, second), (one, two) = lease_many(2)
    rest = "".join(f", array_fill({item}{_cast(item)}, array[3])" for item in more)
    worker.execute(settings)

    rows = worker.rows(
        f"select outcome from {function}(%s::uuid[], %s::text[]{rest})",
        [second, first, first],
        [two, one, two],
    )

    served = {"renewed", "completed", "queued", "failed"}
    assert [row[0] in served for row in rows] == [True, True, False]
    assert rows[2] == ("invalid_lease",)
