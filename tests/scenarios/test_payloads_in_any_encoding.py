"""The fault: a connection in an encoding that lacks characters of a payload.

Every payload is stored and read as it is, in each encoding of the connection.
"""

import pytest
from psycopg.conninfo import make_conninfo

FOREIGN = {"to": "中", "from": "Zoë", "😀": "\\u4e2d"}


ENCODINGS = ["LATIN1", pytest.param("SQL_ASCII", marks=pytest.mark.slow)]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_worker_reads_every_payload_in_every_client_encoding(
    encoding, crew, hire, enqueue, attempts, conninfo, monkeypatch
):
    monkeypatch.setenv("PGCLIENTENCODING", encoding)
    job = enqueue(crew.queue, payload=FOREIGN)
    seen = []

    async def handler(crew, lease):
        seen.append(lease.payload)

    hire(crew, handler, make_conninfo(conninfo, user="email-worker"))

    assert attempts(job, count=1) == [(1, "succeeded", None)]
    assert seen == [FOREIGN]


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_payload_is_claimed_that_the_encoding_of_the_connection_lacks(
    encoding, client, enqueue
):
    job = enqueue(payload=FOREIGN)
    jobs = client("email-worker", client_encoding=encoding)

    (lease,) = jobs.claim("email")

    assert (lease.job_id, lease.payload) == (job, FOREIGN)
    assert jobs.complete(lease)
    assert jobs.inspect(job).status == "succeeded"


@pytest.mark.parametrize("way", ["sync", "async"])
def test_no_function_of_a_stranger_s_is_given_the_payload_that_is_claimed(
    client, enqueue, owner
):
    enqueue(payload=FOREIGN)
    owner.execute(
        "create function public.convert_to(text, text) returns bytea"
        " language sql as $$ select '{}'::bytea $$"
    )
    jobs = client("email-worker", options="-c search_path=public")

    (lease,) = jobs.claim("email")

    assert lease.payload == FOREIGN


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("verb", ["enqueue", "enqueue_many"])
def test_a_payload_is_stored_that_the_encoding_of_the_connection_lacks(
    verb, encoding, client, verbs, owner
):
    job, outcome = verbs[verb](
        client("accounts", client_encoding=encoding), "k", FOREIGN
    )

    assert outcome == "created"
    assert owner.value("select payload from job") == FOREIGN
    assert verbs[verb](client("accounts"), "k", FOREIGN) == (job, "existing")
