from __future__ import annotations

import itertools
import json
from urllib.parse import urlencode

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from yoyo import get_backend, read_migrations

import release
from lenso_jobs import Configuration, SchemaNotReady, prepare
from lenso_jobs._assets import asset_dir
from lenso_jobs.operator import (
    OperatorError,
    Report,
    _parts,
    _setup,
    check,
    setup,
    upgrade,
)

ALL = release.NAMES


@pytest.fixture
def first(new_instance, later):
    """An Instance of this release, while a later one is installed."""
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    later()
    return configuration, conninfo


@pytest.fixture
def session(first):
    """Open a session in that Instance, as a role."""
    opened = []

    def rows(connection, ask, values):
        cursor = connection.execute(ask, values or None)
        return cursor.fetchall() if cursor.description else []

    def session(role=None):
        connection = psycopg.connect(
            first[1], autocommit=True, options="-c search_path=jobs_email"
        )
        opened.append(connection)
        if role:
            connection.execute("select set_config('role', %s, false)", (role,))
        return lambda ask, *values: rows(connection, ask, values)

    yield session
    for connection in opened:
        connection.close()


class States:
    """Jobs in every state there is, each made as callers would."""

    def __init__(self, producer, worker, owner):
        self.producer, self.worker, self.owner = producer, worker, owner
        self.jobs, self.leases = {}, {}
        for name, due in (
            ("succeeded", None),
            ("failed", None),
            ("redriven", None),
            ("retrying", None),
            ("running", None),
            ("lapsed", None),
            ("scheduled", "2999-01-01Z"),
            ("queued", None),
        ):
            self.enqueue(name, due)
            if name not in ("scheduled", "queued"):
                ((_, token),) = worker("select job_id, lease_token from claim('email')")
                self.leases[name] = (self.jobs[name], token)
        assert self.complete("succeeded") == [(True,)]
        self.fail("failed", "broken", again=False)
        self.fail("redriven", "broken", again=False)
        self.fail("retrying", "busy", again=True)
        owner("select redrive(%s, 2)", self.jobs["redriven"])
        owner(
            "update live_job set lease_expires_at = clock_timestamp() - interval '1 s'"
            " where job_id = %s",
            self.jobs["lapsed"],
        )

    def enqueue(self, name, due=None):
        ((self.jobs[name], created),) = self.producer(
            "select job_id, created from enqueue('email', 'send', %s, %s, %s::timestamptz)",
            json.dumps({"name": name}),
            name,
            due,
        )
        return created

    def complete(self, name):
        return self.worker("select complete(%s, %s)", *self.leases[name])

    def fail(self, name, code, *, again):
        return self.worker(
            "select * from fail(%s, %s, %s, %s)", *self.leases[name], code, again
        )

    def inspected(self):
        return {
            name: self.producer(
                "select status, attempts, last_failure_code, available_at,"
                " created_at from inspect(%s)",
                job_id,
            )
            for name, job_id in self.jobs.items()
        }

    def statuses(self):
        return {name: rows[0][0] for name, rows in self.inspected().items()}

    def tables(self):
        return [
            self.owner(f"select t::text from {table} as t order by 1")
            for table in ("job", "live_job", "attempt")
        ]


@pytest.mark.slow
def test_jobs_in_every_state_go_on_as_they_were_after_an_upgrade(first, session):
    states = States(session("accounts"), session("email-worker"), session())
    before, inspected = states.tables(), states.inspected()

    report = upgrade(*first)

    assert list(report.migrations) == ALL[1:]
    assert states.tables() == before
    assert states.inspected() == inspected
    assert states.statuses() == {
        "succeeded": "succeeded",
        "failed": "failed",
        "redriven": "queued",
        "retrying": "queued",
        "running": "running",
        "lapsed": "running",
        "scheduled": "queued",
        "queued": "queued",
    }
    # Keys, and what was answered before, are good.
    assert not any(
        states.enqueue(name, "2999-01-01Z" if name == "scheduled" else None)
        for name in list(states.jobs)
    )
    assert states.complete("succeeded") == [(True,)]
    assert states.fail("failed", "broken", again=False) == [("failed", None)]
    ((status, _),) = states.fail("retrying", "busy", again=True)
    assert status == "queued"
    # So are leases; one that lapsed is the next claim's.
    worker = states.worker
    ((renewed,),) = worker("select renew(%s, %s)", *states.leases["running"])
    assert renewed
    assert states.complete("running") == [(True,)]
    with pytest.raises(psycopg.Error) as lost:
        states.complete("lapsed")
    assert lost.value.sqlstate == "LJ004"
    claimed = worker(
        "select payload ->> 'name', attempt, job_id, lease_token from claim('email', 9)"
    )
    assert {(name, attempt) for name, attempt, *_ in claimed} == {
        ("lapsed", 2),
        ("redriven", 2),
        ("queued", 1),
    }
    for _, _, job_id, token in claimed:
        worker("select complete(%s, %s)", job_id, token)
    session()("update live_job set available_at = clock_timestamp() - interval '1 s'")
    assert len(worker("select * from claim('email', 9)")) == 2
    assert check(*first) == []


@pytest.mark.slow
def test_an_instance_that_is_up_to_date_has_nothing_to_be_done(new_instance):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)

    assert upgrade(configuration, conninfo) == Report(())
    assert upgrade(configuration, conninfo, repair_too=True) == Report(())


def test_an_upgrade_without_an_instance_is_refused(new_instance):
    configuration, conninfo = new_instance()

    with pytest.raises(OperatorError, match="lenso-jobs setup"):
        upgrade(configuration, conninfo)

    with psycopg.connect(conninfo) as connection:
        made = connection.execute("select to_regnamespace('jobs_email')").fetchone()
    assert made == (None,)


@pytest.mark.slow
@pytest.mark.parametrize("act", [setup, upgrade])
def test_a_newer_instance_is_refused(act, first):
    configuration, conninfo = first
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(
            "insert into jobs_email._yoyo_migration values ('x', '9999-later', now())"
        )

    with pytest.raises(OperatorError, match=r"newer.*9999-later.*install the release"):
        act(configuration, conninfo)

    with psycopg.connect(conninfo) as connection:
        version = connection.execute("select * from jobs_email.installed_version")
        assert version.fetchone() == (1, 1)


@pytest.mark.slow
def test_an_instance_newer_by_its_version_alone_is_refused(first, session):
    session()(
        "create or replace view installed_version as select 9999 as version, 9 as oldest_client"
    )

    with pytest.raises(OperatorError, match=r"newer.*version 9999"):
        upgrade(*first)


@pytest.mark.slow
def test_yoyo_and_the_command_take_turns(first, new_instance):
    configuration, conninfo = first
    parameters = conninfo_to_dict(conninfo) | {
        "schema": "jobs_email",
        "options": f"-c role={configuration.owner}",
    }
    backend = get_backend(f"postgresql+psycopg:///?{urlencode(parameters)}")
    with backend.lock():
        pending = backend.to_apply(read_migrations(str(asset_dir("migrations"))))
        names = [each.id for each in pending]
        backend.apply_migrations(pending[:1])
    backend.connection.close()

    report = upgrade(configuration, conninfo)

    assert names == ALL[1:]
    assert list(report.migrations) == ALL[2:]
    backend = get_backend(f"postgresql+psycopg:///?{urlencode(parameters)}")
    assert not backend.to_apply(read_migrations(str(asset_dir("migrations"))))
    backend.connection.close()
    assert check(configuration, conninfo) == []


@pytest.mark.slow
def test_the_tables_of_the_migration_tool_are_as_it_makes_them(
    new_instance, document, new_database, fresh_prefix
):
    ours, conninfo = new_instance()
    setup(ours, conninfo)
    prefix = f"{fresh_prefix}_b"
    new_database(prefix)  # so that its roles are dropped too
    theirs = Configuration.from_json(document(schema="jobs_b", role_prefix=prefix))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        _parts.run(connection, _parts.bootstrapping(theirs))
    parameters = conninfo_to_dict(conninfo) | {"schema": "jobs_b"}
    backend = get_backend(f"postgresql+psycopg:///?{urlencode(parameters)}")
    backend.to_apply(read_migrations(str(asset_dir("migrations"))))
    backend.connection.close()

    def described(schema):
        with psycopg.connect(conninfo) as connection:
            return connection.execute(
                "select table_name, column_name, data_type, character_maximum_length,"
                " column_default, is_nullable from information_schema.columns"
                " where table_schema = %s and table_name ~ '^_?yoyo'"
                " union all select relname, pg_get_constraintdef(k.oid), '', 0, '', ''"
                " from pg_constraint as k join pg_class as c on c.oid = k.conrelid"
                " where k.connamespace = %s::regnamespace and relname ~ '^_?yoyo'"
                " and contype = 'p' order by 1, 2",
                (schema, schema),
            ).fetchall()

    assert described("jobs_email") == described("jobs_b")


@pytest.mark.slow
def test_two_upgrades_at_once_do_the_work_once_and_neither_waits_in_the_other_s_way(
    first, session, background
):
    States(session("accounts"), session("email-worker"), session())
    said = []

    both = [background(upgrade, *first, say=said.append) for _ in range(2)]
    reports = sorted(list(each.result(60).migrations) for each in both)

    assert reports == [[], ALL[1:]]
    assert said == []


@pytest.fixture
def killed_at(monkeypatch):
    """Have the server end our session as the n-th statement from now has been sent."""
    send = _parts.send

    def killed_at(conninfo, number):
        count = itertools.count(1)

        def counted(connection, statement):
            if next(count) == number:
                with psycopg.connect(conninfo, autocommit=True) as killer:
                    killer.execute(
                        "select pg_terminate_backend(%s, 20000)",
                        (connection.info.backend_pid,),
                    )
            return send(connection, statement)

        monkeypatch.setattr(_parts, "send", counted)

    return killed_at


def finished_after_kills(first, killed_at, **options):
    """Kill each run at a later statement than the run before. Return the number of runs."""
    configuration, conninfo = first
    for number in itertools.count(1):
        killed_at(conninfo, number)
        try:
            upgrade(configuration, conninfo, **options)
        except psycopg.OperationalError:
            continue
        assert check(configuration, conninfo) == []
        return number - 1
    raise AssertionError


@pytest.mark.slow
def test_an_upgrade_killed_again_and_again_finishes(first, session, killed_at):
    states = States(session("accounts"), session("email-worker"), session())
    before = states.tables()

    kills = finished_after_kills(first, killed_at)

    assert kills > 5
    assert states.tables() == before


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 16))  # as many as it sends
def test_an_upgrade_killed_at_any_statement_is_finished_by_a_second_run(
    number, first, session, killed_at
):
    states = States(session("accounts"), session("email-worker"), session())
    before = states.tables()
    killed_at(first[1], number)
    with pytest.raises(psycopg.OperationalError):
        upgrade(*first)
    killed_at(first[1], 0)

    upgrade(*first)

    assert check(*first) == []
    assert states.tables() == before


@pytest.mark.slow
def test_a_repair_killed_again_and_again_finishes(first, session, killed_at):
    upgrade(*first)
    owner = session()
    for statement in (
        "drop index live_job_claimable_idx",
        "drop function renew_many(uuid[], text[])",
        "alter table queue disable trigger queue_is_published",
        "grant select on job to public",
        "drop view installed_version",
    ):
        owner(statement)

    kills = finished_after_kills(first, killed_at, repair_too=True)

    assert kills >= 3


# Beside others.


@pytest.fixture
def reader(first):
    """A transaction with a snapshot, which an index that is built waits for."""
    with psycopg.connect(first[1]) as connection:
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("create temporary table seen as select 1 as n")
        yield connection


@pytest.fixture
def built(session, until):
    """Wait until the command has waited for a snapshot for so many seconds."""
    ask = (
        "select clock_timestamp() - query_start > make_interval(secs => %s)"
        " from pg_stat_activity where datname = current_database()"
        " and application_name = 'lenso-jobs' and wait_event = 'virtualxid'"
    )

    def built(seconds):
        asking = session()
        until(lambda: asking(ask, seconds) == [(True,)])

    return built


@pytest.mark.slow
def test_a_long_report_holds_up_the_index_and_is_not_a_reason_to_give_up(
    first, session, reader, built, background
):
    session("accounts")("select enqueue('email', 'send', '{}', 'k')")
    worker = session("email-worker")
    ((job, token),) = worker("select job_id, lease_token from claim('email')")
    worker("select complete(%s, %s)", job, token)
    owner, said = session(), []
    ((dbname,),) = owner("select current_database()::text")
    owner(f"alter database {dbname} set statement_timeout = '3s'")

    running = background(upgrade, *first, say=said.append)
    built(7)
    session("accounts")("select enqueue('email', 'send', '{}', 'meanwhile')")
    ((job, token),) = worker("select job_id, lease_token from claim('email')")
    worker("select complete(%s, %s)", job, token)
    reader.rollback()

    assert list(running.result(60).migrations) == ALL[1:]
    (sentence,) = said
    assert (
        f"waits for session {reader.info.backend_pid} (role postgres, idle" in sentence
    )
    assert check(*first) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "alter index live_job_claimable_idx set (fillfactor = 50)",
        (
            "drop index live_job_claimable_idx;"
            " create index live_job_claimable_idx on live_job (queue, available_at, job_id)"
            " include (attempt)"
        ),
    ],
)
def test_an_index_that_is_repaired_is_there_all_the_time(
    statement, first, session, reader, built, background
):
    upgrade(*first)
    owner, worker = session(), session("email-worker")
    owner(statement)
    session("accounts")("select enqueue('email', 'send', '{}', 'k')")

    running = background(upgrade, *first, repair_too=True)
    built(0)
    ((job, token),) = worker("select job_id, lease_token from claim('email')")
    worker("select complete(%s, %s)", job, token)
    reader.rollback()

    assert [what.split(" is not ")[0] for what in running.result(60).repaired] == [
        "index live_job_claimable_idx"
    ]
    assert check(*first) == []


# Patience.


@pytest.fixture
def impatience(monkeypatch):
    monkeypatch.setattr(_setup, "PAUSE_SECONDS", 0.01)


@pytest.fixture
def contended():
    """Refuse a lock so many times, then answer."""

    def contended(times, kind=psycopg.errors.LockNotAvailable):
        left = iter(range(times))

        def act():
            if next(left, None) is not None:
                raise kind("canceling statement due to lock timeout")
            return "done"

        return act

    return contended


def test_a_lock_that_is_held_is_tried_again_and_reported(impatience, contended):
    said = []

    assert _setup.patiently(contended(2), "migration 7", said.append) == "done"

    assert [each[:11] for each in said] == ["migration 7"] * 2
    assert said[1].endswith("again in 0.01 s (2 of 10)")


def test_after_ten_times_it_says_where_to_look(impatience, contended):
    with pytest.raises(OperatorError, match=r"10 times.*pg_stat_activity"):
        _setup.patiently(contended(10), "migration 7", lambda _: None)


def test_an_error_that_is_not_a_lock_timeout_is_not_retried(impatience, contended):
    act = contended(1, psycopg.errors.DivisionByZero)

    with pytest.raises(psycopg.errors.DivisionByZero):
        _setup.patiently(act, "migration 7", lambda _: None)


# Who, and the command.


@pytest.mark.slow
def test_a_database_owner_without_superuser_upgrades_and_repairs(unprivileged, later):
    configuration, conninfo = unprivileged
    setup(configuration, conninfo)
    later()

    report = upgrade(configuration, conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("drop function jobs_email.inspect(uuid)")
    repaired = upgrade(configuration, conninfo, repair_too=True)

    assert list(report.migrations) == ALL[1:]
    assert repaired.repaired == ("function inspect(uuid) is missing",)
    assert check(configuration, conninfo) == []


@pytest.mark.slow
def test_a_client_of_this_release_starts_on_a_later_schema_that_serves_it(
    first, session, monkeypatch
):
    configuration, conninfo = first
    upgrade(configuration, conninfo)
    monkeypatch.undo()  # this release is installed again
    caller = configuration.producer_instances[0]

    with prepare(configuration, lambda _: conninfo, caller=caller) as jobs:
        job = jobs.enqueue("email", "send", {}, idempotency_key="key")
    session()(
        "create or replace view installed_version as"
        " select 3 as version, 2 as oldest_client"
    )
    with pytest.raises(SchemaNotReady, match="at version 3, newer than this release"):
        prepare(configuration, lambda _: conninfo, caller=caller)

    assert job.created


@pytest.mark.slow
def test_the_command_reports_its_acts(lenso_jobs, first):
    configuration, conninfo = first
    where = {"role_prefix": configuration.prefix, "url": conninfo}

    done = lenso_jobs("upgrade", **where)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("drop function jobs_email.inspect(uuid)")
        mended = lenso_jobs("upgrade", "--repair", **where)
        connection.execute("drop function jobs_email.complete(uuid, text)")
        ended = lenso_jobs("upgrade", "--repair", **where)
    nothing = lenso_jobs("upgrade", **where)
    machine = lenso_jobs("upgrade", "--json", **where)

    assert done == (0, "".join(f"applied {name}\n" for name in ALL[1:]), "")
    assert mended == (0, "repaired: function inspect(uuid) is missing\n", "")
    assert ended[:2] == (0, "repaired: function complete(uuid,text) is missing\n")
    assert "no session of a worker is connected: start the workers again" in ended[2]
    assert nothing == (0, "there is nothing to do\n", "")
    assert not any(json.loads(machine[1]).values())


@pytest.mark.slow
def test_an_upgrade_that_may_not_compare_says_so_and_exits_with_2(
    first, lenso_jobs, role
):
    configuration, conninfo = first
    member = make_conninfo(conninfo, user=role(member_of=[configuration.owner]))
    where = {"role_prefix": configuration.prefix, "url": member}

    code, out, errors = lenso_jobs("upgrade", **where)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("grant select on jobs_email.job to public")
    machine = lenso_jobs("upgrade", "--json", **where)

    assert (code, out) == (2, "".join(f"applied {name}\n" for name in ALL[1:]))
    assert (
        "objects and rights are not compared with this release: cannot tell" in errors
    )
    assert "run lenso-jobs check as a role that may create a schema" in errors
    assert machine[0] == 2
    assert "permission denied" in json.loads(machine[1])["uncompared"]
    assert lenso_jobs("upgrade", **{**where, "url": conninfo})[:2] == (
        0,
        "done: revoke select on table jobs_email.job from public cascade\n",
    )


@pytest.mark.slow
def test_an_older_instance_is_reported_with_upgrade_as_the_remedy(first, lenso_jobs):
    configuration, conninfo = first

    code, out, _ = lenso_jobs(
        "check", role_prefix=configuration.prefix, url=make_conninfo(conninfo)
    )

    assert code == 1
    assert out.splitlines() == [
        line
        for name in ALL[1:]
        for line in (f"migration {name} is pending", "    mend: lenso-jobs upgrade")
    ]
