"""Instances damaged in several ways at once, and mended by what check prints alone."""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass, field

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from damages import SEEN, UNSEEN
from lenso_jobs.operator import setup

pytestmark = pytest.mark.slow

# Others can be tried, as FIRST:NUMBER.
FIRST, NUMBER = map(int, os.environ.get("LENSO_JOBS_TEST_DAMAGES", "1:10").split(":"))
ROUNDS = 6

TABLES = {
    "job": "job_id",
    "live_job": "job_id",
    "attempt": "job_id, attempt",
    "operator_act": "operator_act_id",
}
# What of the rows goes with a damage, and no remedy could bring back.
TAKEN = {
    "alter table live_job drop column last_failure_code": (
        "live_job",
        "last_failure_code",
    ),
    "alter table job drop column available_at": ("job", "available_at"),
    "drop table operator_act": ("operator_act", None),
}
DRIFT = re.compile(
    "object|index|constraint|grant|role|membership|migration|not_configured|locked"
)
# What check prints, and a refusal that goes on.
HELPFUL = re.compile("mend: |by hand, |run: lenso-jobs |lenso-jobs check says")
SQL = re.compile("(alter|begin|create|drop|grant|revoke|select|update) ")
REMEDY = re.compile(
    r"^    (?:mend|by hand, and it deletes data \([^)]*\)): (.*)$", re.MULTILINE
)


@dataclass
class Damaged:
    """An Instance, and what it held before it was damaged."""

    configuration: object
    conninfo: str
    names: dict[str, str]
    held: dict = field(default_factory=dict)
    running: tuple = ()
    failed: object = None
    done: list = field(default_factory=list)

    def session(self, role=None):
        connection = psycopg.connect(
            self.conninfo, autocommit=True, options="-c search_path=jobs_email"
        )
        connection.execute("set default_transaction_read_only = off")
        connection.execute("set bytea_output = 'hex'")
        if role:
            connection.execute("select set_config('role', %s, false)", (role,))
        return connection

    def as_role(self, role, ask, *values):
        with self.session(role) as connection:
            return connection.execute(ask, values or None).fetchall()

    def rows(self):
        with self.session() as connection:
            return {
                table: dict(
                    connection.execute(
                        f"select concat_ws(' ', {key}), to_jsonb(t) from {table} as t"
                    )
                )
                for table, key in TABLES.items()
            }

    def damage(self, statement):
        """Do that, unless an earlier damage left nothing to do it to."""
        with self.session() as connection:
            try:
                connection.execute(statement.format(**self.names))
            except psycopg.Error:
                return False
        self.done.append(statement)
        return True


@pytest.fixture
def instance(new_instance, role):
    """An Instance with callers of its own and jobs in every state."""
    callers = {kind: role("nologin") for kind in ("producer", "worker", "observer")}
    configuration, conninfo = new_instance(
        lease_seconds=3600,
        retry_base_seconds=300,
        **{f"{kind}_instances": [name] for kind, name in callers.items()},
    )
    setup(configuration, conninfo)
    names = {
        "p": configuration.prefix,
        "db": conninfo_to_dict(conninfo)["dbname"],
        **callers,
    }
    it = Damaged(configuration, conninfo, names)
    producer, worker = it.session(callers["producer"]), it.session(callers["worker"])

    def enqueue(key, more=""):
        return producer.execute(
            f"select job_id from enqueue('email', %s, '{{}}', %s{more})", (key, key)
        ).fetchone()[0]

    def claimed(key, more=""):
        enqueue(key, more)
        return worker.execute(
            "select job_id, lease_token from claim('email')"
        ).fetchone()

    worker.execute("select complete(%s, %s)", claimed("succeeded"))
    failed = claimed("failed")
    worker.execute("select fail(%s, %s, 'smtp.no', false)", failed)
    it.failed = failed[0]
    worker.execute("select fail(%s, %s, 'smtp.no', true)", claimed("retried"))
    expired = claimed("expired")
    it.running = claimed("running")
    enqueue("queued")
    enqueue("scheduled", ", clock_timestamp() + interval '1 day'")
    with it.session() as connection:
        connection.execute(
            "update live_job set available_at = clock_timestamp() - interval '1 s',"
            " lease_expires_at = clock_timestamp() - interval '1 s'"
            " where job_id = %s",
            expired[:1],
        )
        connection.execute("select purge(clock_timestamp() - interval '1 day')")
    producer.close()
    worker.close()
    it.held = it.rows()
    return it


@pytest.fixture
def run(instance, lenso_jobs):
    """Run a command with the document and the secret of the damaged Instance."""

    def run(*arguments):
        return lenso_jobs(
            *arguments, url=instance.conninfo, config=instance.configuration.document()
        )

    return run


@pytest.fixture
def carry_out(instance, run, as_dropped):
    """Do what was printed as it stands; return what went wrong, in a list."""

    def carry_out(remedy):
        remedy = as_dropped(remedy)
        if remedy.startswith("lenso-jobs "):
            code, out, errors = run(*remedy.split()[1:])
            # A repair that leaves something for later prints it, as check does.
            return [f"{remedy}: {out}{errors}"] if code else []
        assert SQL.match(remedy), remedy
        with psycopg.connect(instance.conninfo, autocommit=True) as connection:
            try:
                connection.execute(remedy)
            except psycopg.Error as error:
                return [f"{remedy}: {error.diag.message_primary}"]
        return []

    return carry_out


@pytest.fixture
def mend(run, carry_out):
    """Do what check prints, until it prints nothing. Return all it printed."""

    def mend():
        said = []
        for _ in range(ROUNDS):
            code, out, errors = run("check")
            if code == 0:
                return said
            said.append(out + errors)
            for remedy in remedies(code, out, errors):
                said += carry_out(remedy)
        raise AssertionError("check never ends:\n" + "\n".join(said))

    return mend


def remedies(code, out, errors):
    """Read what is to be done from what check printed: SQL first, then commands."""
    if code == 1:
        found = dict.fromkeys(REMEDY.findall(out))
    else:
        assert (code, out) == (2, "")
        found = re.findall("run: (lenso-jobs [a-z -]+)", errors)
    assert found, errors
    return sorted(found, key=lambda remedy: remedy.startswith("lenso-jobs "))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUMBER))
def test_the_remedies_of_check_mend_several_damages_together(seed, instance, mend):
    chosen = random.Random(seed)
    for statement in chosen.sample(SEEN + UNSEEN, chosen.randint(1, 5)):
        instance.damage(statement)
    seen = [each for each in instance.done if each in SEEN]
    health = look(instance)

    said = mend()

    told = "\n".join([f"seed {seed}", *instance.done, str(health), *said])
    assert said or not seen, told
    assert all(HELPFUL.search(each) for each in said), told
    assert health or not seen, told
    is_whole(instance)


def look(instance):
    """Ask inspect_health as an observer and return its findings, or why it cannot."""
    try:
        return instance.as_role(
            instance.names["observer"], "select finding, subject from inspect_health()"
        )
    except psycopg.Error as error:
        return error.diag.message_primary


def is_whole(instance):
    """What was there is there, nothing is found, and every verb does its work."""
    lost = instance.rows()
    taken = {TAKEN[each] for each in instance.done if each in TAKEN}
    for table, rows in instance.held.items():
        if (table, None) in taken:
            continue
        for key, row in rows.items():
            now = lost[table].get(key)
            for column in row:
                if (table, column) not in taken:
                    assert now is not None, (table, key)
                    assert now[column] == row[column], (table, key, column)

    observer = instance.names["observer"]
    findings = instance.as_role(
        observer, "select finding, subject, detail from inspect_health()"
    )
    assert not [each for each in findings if DRIFT.search(each[0])], findings

    producer, worker = instance.names["producer"], instance.names["worker"]
    ((job, created),) = instance.as_role(
        producer, "select * from enqueue('slow', 'send', '{}', 'after')"
    )
    assert created
    ((reason,),) = instance.as_role(observer, "select reason from explain_job(%s)", job)
    assert reason in ("ready", "no_worker_connected")
    ((token,),) = instance.as_role(worker, "select lease_token from claim('slow')")
    assert instance.as_role(
        worker, "select status from fail(%s, %s, 'x', false)", job, token
    ) == [("failed",)]
    operator = f"{instance.names['p']}_operator"
    for each in (job, instance.failed):
        instance.as_role(operator, "select redrive(%s)", each)
    assert instance.as_role(worker, "select complete(%s, %s)", *instance.running) == [
        (True,)
    ]
    keys = instance.as_role(worker, "select kind from claim('email', 10)")
    assert sorted(keys) == [("expired",), ("failed",), ("queued",)]


@pytest.mark.parametrize(
    "statement",
    [
        (
            "alter table live_job rename to live_jobs;"
            " create table live_job (like live_jobs including all)"
        ),
        (
            "create table copy (like live_job including all);"
            " alter table live_job rename to live_jobs;"
            " alter index live_job_pkey rename to other_key"
        ),
        (
            "alter table live_job rename to live_jobs;"
            " alter index live_job_pkey rename to other_key;"
            " alter index live_job_claimable_idx rename to other_idx;"
            " delete from _yoyo_migration"
        ),
    ],
)
def test_nothing_that_is_printed_drops_a_table_that_may_hold_jobs(
    statement, instance, run, carry_out
):
    assert instance.damage(statement)

    for _ in range(3):
        code, out, errors = run("check")
        for remedy in remedies(code, out, errors) if code else ():
            if SQL.match(remedy) or remedy.startswith("lenso-jobs "):
                carry_out(remedy)

    kept = 0
    for table in ("live_job", "live_jobs", "copy"):
        if instance.as_role(None, "select where to_regclass(%s) is not null", table):
            ((rows,),) = instance.as_role(None, f"select count(*) from {table}")
            kept += rows
    assert kept == len(instance.held["live_job"])
