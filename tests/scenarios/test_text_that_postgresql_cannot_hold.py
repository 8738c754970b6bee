"""The fault: text that PostgreSQL cannot hold.

It is refused with its reason. A handler's exception always ends its attempt.

``fail`` takes a code and no message: what is no code is refused, and the lease goes on.
Bytes that are no UTF-8 the server itself refuses, before it calls any function.
"""

import psycopg
import pytest

from lenso_jobs.worker import Fail, Retry

CODES = ("smtp\x00", "smtp\udcff", "c" * 5_000_000, "sm tp", "")
LOOK_ALIKE = {"a": "\\u0000", "\\ud800": "\\\\u0000", "b": "\\x00"}


@pytest.fixture
def rejected(way):
    """Insist on a refusal with this code; of what SQL cannot even say, on any."""

    def rejected(sqlstate, call):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - judged below
            call()
        error = caught.value
        code = getattr(error, "sqlstate", None)
        assert code == sqlstate or (
            way == "sql"
            and (
                code in ("22P02", "22P05")
                or isinstance(error, psycopg.DataError | UnicodeEncodeError)
            )
        ), error
        return str(error)

    return rejected


@pytest.mark.parametrize(
    ("text", "reasons"),
    [("a\x00b", ("NUL", "\\u0000")), ("a\ud800b", ("surrogate",))],
    ids=["nul", "surrogate"],
)
def test_a_payload_that_cannot_be_stored_is_refused_with_its_reason(
    text, reasons, client, rejected, owner
):
    jobs = client("accounts")

    for payload in ({"a": text}, {text: 1}, {"a": [{"b": text}]}):
        said = rejected(
            "LJ001",
            lambda p=payload: jobs.enqueue("email", "send", p, idempotency_key="k"),
        )
        assert any(reason in said for reason in reasons), said

    assert owner.value("select count(*) from job") == 0


def test_a_payload_that_only_looks_like_it_is_stored_unchanged(client):
    client("accounts").enqueue("email", "send", LOOK_ALIKE, idempotency_key="k")

    (lease,) = client("email-worker").claim("email")

    assert lease.payload == LOOK_ALIKE


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800b"], ids=ascii)
def test_a_name_that_cannot_be_stored_is_refused(text, client, rejected, owner):
    jobs = client("accounts")

    for names in ((text, "send", "k"), ("email", text, "k"), ("email", "send", text)):
        rejected(
            "LJ001",
            lambda n=names: jobs.enqueue(n[0], n[1], {}, idempotency_key=n[2]),
        )

    assert owner.value("select count(*) from job") == 0


def test_a_malformed_code_is_refused_and_the_lease_goes_on(
    client, enqueue, rejected, owner
):
    job_id = enqueue()
    worker = client("email-worker")
    (lease,) = worker.claim("email")
    before = owner.rows("select * from live_job")

    for code in CODES:
        rejected("LJ005", lambda c=code: worker.fail(lease, c, retryable=True))

    assert owner.rows("select * from live_job") == before
    assert worker.fail(lease, "smtp", retryable=False).status == "failed"
    assert worker.inspect(job_id).last_failure_code == "smtp"


class Speechless(Exception):
    """Has no text: str() raises another exception."""

    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


RAISED = (
    *(Retry, Fail, ValueError, Speechless),
    lambda text: type(text, (Exception,), {})(),
)
TEXTS = ("\x00", "\udcff", "x" * 5_000_000, "\ud800\x00 é")


@pytest.mark.slow
def test_a_job_is_no_longer_leased_after_any_exception_of_its_handler(
    crews, hire, enqueue, attempts, owner
):
    raised = [(how, text) for how in RAISED for text in TEXTS]

    async def handler(_, lease):
        how, text = raised[int(lease.kind)]
        raise how(text)

    jobs = [
        enqueue(queue=crew.queue, kind=f"{n}", max_attempts=1)
        for crew in crews
        for n in range(len(raised))
    ]
    hired = [hire(crew, handler) for crew in crews]
    ended = attempts(*jobs, count=len(jobs))
    tallies = [each.stop() for each in hired]

    assert {(attempt, outcome) for attempt, outcome, _ in ended} == {(1, "failed")}
    assert owner.value("select count(*) from live_job") == 0
    assert [tally.failed for tally in tallies] == [len(raised)] * 2
    assert all(1 <= len(code) <= 128 for _, _, code in ended)
