"""Bounds in bytes: on the document of one enqueue_many, and on what one claim returns."""

import json

import pytest

LARGEST = 262_000
MANY = "select count(*) from enqueue_many(%s::jsonb)"


def items(count, size, mark=""):
    return json.dumps(
        [
            {
                "queue": "email",
                "kind": "send",
                "payload": {"a": "x" * size},
                "idempotency_key": f"key-{mark}-{n}",
            }
            for n in range(count)
        ]
    )


@pytest.mark.slow
def test_enqueue_many_takes_a_document_below_16_mb(producer, owner):
    producer.execute(MANY, (items(60, LARGEST),))

    assert owner.value("select count(*) from job") == 60


@pytest.mark.slow
@pytest.mark.parametrize("is_stored", [False, True])
def test_enqueue_many_refuses_a_document_above_16_mb(producer, owner, state, is_stored):
    document = items(70, LARGEST)
    before = state()
    statement, parameters = MANY, (document,)
    if is_stored:
        owner.execute("create table public.documents (document jsonb)")
        owner.execute("insert into public.documents values (%s)", (document,))
        owner.execute("grant select on public.documents to public")
        statement, parameters = (
            "select count(*) from public.documents, enqueue_many(document)",
            None,
        )

    with producer.refusing("LJ007") as caught:
        producer.execute(statement, parameters)

    assert "16 MB" in caught.value.diag.message_primary
    assert state() == before


@pytest.mark.slow
@pytest.mark.parametrize("limit", [65, 100, 1000])
def test_a_claim_returns_at_most_16_mb_and_leaves_the_rest_claimable(
    producer, worker, rival, limit
):
    for mark in ("a", "b"):
        producer.execute(MANY, (items(50, LARGEST, mark),))

    first, second = (
        session.rows(
            "select job_id, octet_length(payload::text) from claim('email', %s)", limit
        )
        for session in (worker, rival)
    )

    assert 0 < len(first) <= 64
    assert sum(size for _, size in first) <= 16 * 1024 * 1024
    assert len({job_id for job_id, _ in first + second}) == 100


@pytest.mark.slow
def test_a_claim_of_small_payloads_is_not_bounded_by_their_bytes(producer, worker):
    producer.execute(MANY, (items(1000, 10),))

    assert len(worker.rows("select from claim('email', 1000)")) == 1000


@pytest.mark.slow
def test_a_redriven_job_counts_with_its_bytes(producer, worker, operator):
    for mark in ("a", "b"):
        producer.execute(MANY, (items(50, LARGEST, mark),))
    for _ in range(2):
        worker.execute(
            "select fail(job_id, lease_token, 'c', false) from claim('email', 100)"
        )
    operator.execute("select redrive_failed('email', 'epoch')")

    assert 0 < len(worker.rows("select from claim('email', 1000)")) <= 64
