import psycopg
import pytest

from lenso_jobs import Jobs
from lenso_jobs.config import Configuration
from lenso_jobs.embedded import EmbeddedServer
from lenso_jobs.operator import setup

SECRET = "s3cr3t"
SETTINGS = {
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "all",
}
CALL = f"""enqueue('email', 'send', '{{"card": "{SECRET}"}}', '{SECRET}-2')"""


@pytest.fixture
def observed(owner, document):
    """A session as superuser on a server that keeps statistics of statements."""
    if not owner.rows(
        "select from pg_available_extensions where name = 'pg_stat_statements'"
    ):
        pytest.skip("these binaries have no pg_stat_statements")
    with EmbeddedServer(settings=SETTINGS) as server:
        setup(Configuration.from_json(document()), server.conninfo())
        with psycopg.connect(
            server.conninfo(options="-c search_path=jobs_email"), autocommit=True
        ) as connection:
            connection.execute("create extension pg_stat_statements schema public")
            yield connection


def kept(connection):
    rows = connection.execute("select query from public.pg_stat_statements").fetchall()
    return [query for (query,) in rows]


def test_statistics_of_statements_keep_no_payload_key_or_token_of_a_call(observed):
    jobs = Jobs(observed, "jobs_email", caller="accounts")
    jobs.enqueue("email", "send", {"card": SECRET}, idempotency_key=f"{SECRET}-1")
    observed.execute("set role accounts")
    observed.execute(f"select {CALL}".encode())
    observed.execute('set role "email-worker"')
    leases = observed.execute("select job_id, lease_token from claim('email', 2)")
    (first, token), (second, other) = leases.fetchall()
    observed.execute(f"select complete('{first}', '{token}')".encode())
    observed.execute(
        "select * from fail_many(%s, %s, %s, %s)",
        ([second], [other], ["smtp.down"], [False]),
    )
    observed.execute("reset role")

    queries = kept(observed)

    for call in ("enqueue(", "complete(", "fail_many(", "insert into attempt"):
        assert any(call in query for query in queries)
    secrets = (SECRET, token[10:], other[10:])
    assert not [q for q in queries if any(secret in q for secret in secrets)]


def test_statistics_of_statements_keep_the_constants_of_a_do_block(observed):
    observed.execute("set role accounts")
    observed.execute(f"do $$ begin perform {CALL}; end $$".encode())
    observed.execute("reset role")

    assert [query for query in kept(observed) if SECRET in query]
