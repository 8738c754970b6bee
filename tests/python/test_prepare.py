from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs import (
    AsyncWorker,
    SchemaNotReady,
    SecretNotFound,
    Unauthorized,
    prepare,
    prepare_worker,
)
from lenso_jobs._prepare import SCHEMA_VERSION


@pytest.fixture
def ready(conninfo, configuration):
    """Prepare a client whose URL logs in as a role."""

    def ready(user="accounts", *, caller=None, **changes):
        def resolve(reference):
            assert reference == "jobs/database-url"
            return make_conninfo(conninfo, user=user)

        return prepare(configuration(**changes), resolve, caller=caller)

    return ready


@pytest.fixture
def refused(ready):
    """Prepare what is not ready, and return the error."""

    def refused(*arguments, **changes):
        with pytest.raises(SchemaNotReady) as caught:
            ready(*arguments, **changes)
        assert caught.value.sqlstate == "LJ008"
        return caught.value

    return refused


def test_the_client_is_ready_and_each_call_is_committed(ready, key, observing):
    with ready() as jobs:
        job = jobs.enqueue("email", "send", {}, idempotency_key=key)

    assert observing.inspect(job.job_id).producer == "accounts"


def test_the_client_acts_as_the_caller_that_was_named(ready, role, key, observing):
    login = role(member_of=("accounts",))

    with ready(login, caller="accounts") as jobs:
        job = jobs.enqueue("email", "send", {}, idempotency_key=key)

    assert observing.inspect(job.job_id).producer == "accounts"


@pytest.mark.parametrize("user", ["accounts", "email-worker", "operations"])
def test_every_declared_caller_finds_the_instance_ready(user, ready):
    ready(user).close()


def test_an_undeclared_role_is_refused_by_the_verbs(ready, operator, key):
    with (
        ready(operator.info.user) as jobs,
        pytest.raises(Unauthorized),
    ):
        jobs.enqueue("email", "send", {}, idempotency_key=key)


def test_leaving_the_client_s_context_closes_its_pool(ready):
    with ready() as jobs:
        source = jobs._source

    assert source.closed


def test_a_worker_of_the_document_works_its_queue_as_the_caller(
    conninfo, configuration, enqueue, observing
):
    job_id = enqueue()
    options = {"queue": "email", "caller": "email-worker"}
    seen = []

    worker = prepare_worker(configuration(), lambda _: conninfo, seen.append, **options)

    assert worker.run(until_idle=True).succeeded == len(seen) == 1
    assert observing.inspect(job_id).worker == "email-worker"


def test_a_worker_of_an_instance_that_is_not_ready_is_refused(conninfo, configuration):
    with pytest.raises(SchemaNotReady):
        prepare_worker(
            configuration(schema="nowhere"), lambda _: conninfo, print, queue="email"
        )


async def coroutine(lease):
    """Handle a job."""


def test_a_coroutine_function_is_given_a_worker_for_asyncio(conninfo, configuration):
    worker = prepare_worker(
        configuration(), lambda _: conninfo, coroutine, queues={"email": 2}
    )

    assert isinstance(worker, AsyncWorker)


def test_a_missing_schema_is_reported_with_setup_as_the_remedy(refused):
    error = refused(schema="jobs_missing")

    assert str(error) == "schema jobs_missing holds no Instance"
    assert "lenso-jobs setup" in error.hint


def test_a_schema_without_an_instance_is_reported_with_setup_as_the_remedy(
    refused, owner
):
    owner.execute("create schema jobs_other")
    owner.execute("grant usage on schema jobs_other to public")

    assert "lenso-jobs setup" in refused(schema="jobs_other").hint


def test_a_role_without_rights_is_reported_as_undeclared(refused):
    error = refused("stranger")

    assert str(error) == "the role has no rights in schema jobs_email"
    assert "lenso-jobs configure" in error.hint


def test_a_caller_that_the_login_may_not_become_is_refused_as_such(refused):
    error = refused("organization", caller="accounts")

    assert "cannot act as accounts" in str(error)
    assert "lenso-jobs configure" in error.hint


def test_a_caller_that_is_not_a_role_is_refused_as_such(refused):
    assert "cannot act as nobody-of-that-name" in str(
        refused(caller="nobody-of-that-name")
    )


@pytest.mark.parametrize(
    ("version", "state", "hint"),
    [(0, "older", "lenso-jobs upgrade"), (99, "newer", "release")],
)
def test_another_version_of_the_schema_is_reported(
    version, state, hint, refused, owner
):
    owner.execute(
        f"create or replace view installed_version (version, oldest_client)"
        f" as values ({version}, {version})"
    )

    error = refused()

    assert f"is at version {version}, {state} than this release" in str(error)
    assert hint in error.hint


def test_a_newer_schema_that_serves_this_release_is_accepted(ready, owner, key):
    owner.execute(
        "create or replace view installed_version (version, oldest_client)"
        f" as values (99, {SCHEMA_VERSION})"
    )
    owner.execute(
        "create or replace function wait_key(p_queue text) returns bigint"
        " language sql as 'select 1'"
    )

    with ready() as jobs:
        assert jobs.enqueue("email", "send", {}, idempotency_key=key).created


@pytest.mark.parametrize("function", ["claim", "_caller"])
def test_an_edited_function_is_named(function, refused, owner):
    (definition,) = owner.rows(
        "select pg_get_functiondef(oid) from pg_proc"
        " where proname = %s and pronamespace = 'jobs_email'::regnamespace",
        function,
    )
    edited, _, rest = definition[0].rpartition("\n$function$")
    owner.execute(f"{edited} -- edited\n$function${rest}".replace("%", "%%"))

    error = refused()

    assert str(error) == (f"function jobs_email.{function} differs from this release")
    assert "lenso-jobs check" in error.hint


def test_a_dropped_function_is_named(refused, owner):
    owner.execute("drop function complete_many(uuid[], text[])")

    assert "complete_many is missing" in str(refused())


@pytest.fixture
def router(owner):
    """Make the Instance look like the router of a fleet."""
    owner.execute(
        "create function _shards() returns integer[] language sql as 'select array[0]'"
    )
    owner.execute("drop function _caller() cascade")


def test_the_functions_of_a_router_are_not_compared_with_an_instance_s(router, ready):
    ready().close()


def test_a_worker_refuses_a_router_and_says_fleet(router, conninfo, configuration):
    with pytest.raises(SchemaNotReady, match="is the router of a fleet") as caught:
        prepare_worker(configuration(), lambda _: conninfo, print, queue="email")

    assert "lenso-jobs work --fleet FILE" in caught.value.hint


def test_a_router_of_an_older_version_is_reported_with_fleet_upgrade(
    router, refused, owner
):
    owner.execute(
        "create or replace view installed_version (version, oldest_client)"
        " as values (0, 0)"
    )

    assert "lenso-jobs fleet upgrade" in refused().hint


@pytest.mark.parametrize(
    ("user", "function", "kind"),
    [
        ("accounts", "enqueue", "producer"),
        ("accounts", "enqueue_many", "producer"),
        ("email-worker", "claim", "worker"),
        ("email-worker", "renew_many", "worker"),
        ("email-worker", "complete_many", "worker"),
        ("email-worker", "fail_many", "worker"),
        ("email-worker", "next_available_at", "worker"),
        ("operations", "inspect", "observer"),
        ("operations", "inspect_queues", "observer"),
        ("operations", "explain_job", "observer"),
    ],
)
def test_a_revoked_grant_is_named(user, function, kind, refused, owner, prefix):
    owner.execute(f"revoke execute on function {function} from {prefix}_{kind}")

    error = refused(user)

    assert f"role {user} may not call {function}" in str(error)
    assert "lenso-jobs configure" in error.hint


def test_a_grant_that_is_not_needed_is_not_missed(ready, owner, prefix):
    owner.execute(f"revoke execute on function claim from {prefix}_worker")

    ready("accounts").close()


def test_a_caller_of_the_document_without_its_membership_is_named(
    refused, role, prefix
):
    login = role(member_of=(f"{prefix}_observer",))

    error = refused(login, producer_instances=["accounts", login])

    assert f"role {login} may not call enqueue, enqueue_many" in str(error)


def test_a_missing_secret_is_reported_before_a_connection_is_opened(configuration):
    def resolve(reference):
        raise SecretNotFound(reference)

    with pytest.raises(SecretNotFound):
        prepare(configuration(), resolve)


def test_a_server_that_cannot_be_reached_is_psycopg_s_own_error(
    configuration, tmp_path
):
    with pytest.raises(psycopg.OperationalError):
        prepare(configuration(), lambda _: f"host={tmp_path} dbname=jobs")
