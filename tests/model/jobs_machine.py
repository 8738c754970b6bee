"""Random histories of calls, on real sessions and on the model at once."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from jobs_model import (
    LEASE,
    PRODUCERS,
    QUEUES,
    RETENTION,
    RETRY_BASE,
    RETRY_MOST,
    Model,
    Session,
    at,
    same,
)

POLICY = {
    "lease_seconds": int(LEASE.total_seconds()),
    "retry_base_seconds": int(RETRY_BASE.total_seconds()),
    "retry_max_seconds": int(RETRY_MOST.total_seconds()),
    "retention_seconds": int(RETENTION.total_seconds()),
    "queues": list(QUEUES),
}
ROLES = (
    ("accounts", 2),
    ("organization", 1),
    ("email-worker", 2),
    ("spare-worker", 1),
    ("operator", 2),
)
WORKERS = ("email-worker", "spare-worker")
READERS = {
    "inspect": (*PRODUCERS, *WORKERS, "operator"),
    "inspect_key": (*PRODUCERS, "operator"),
    "inspect_attempts": ("operator",),
    "explain_job": ("operator",),
    "next_available_at": WORKERS,
}
SWEEPS = ("purge", "enforce_retention", "retire_expired")

TABLES = {
    "job": "job_id",
    "live_job": "job_id",
    "attempt": "job_id, attempt",
    "operator_act": "operator_act_id",
}
# A session cannot read the tables; through this it sees them as its own calls do.
WATCH = """
drop schema if exists watch cascade;
create schema watch;
create function watch.tables() returns jsonb
language plpgsql volatile security definer set search_path = jobs_email, pg_temp
as $$ begin return jsonb_build_object({}); end $$;
grant usage on schema watch to public;
""".format(
    ", ".join(
        f"'{table}', (select coalesce(jsonb_agg(to_jsonb(t) order by {key}), '[]')"
        f" from {table} as t)"
        for table, key in TABLES.items()
    )
)
LOOK = "select watch.tables(), clock_timestamp()"
FLOORS = "select max(pg_sequence_last_value(floor[1])) from queue"

CALLS = {
    "enqueue": "select * from enqueue(%s, %s, %s, %s, %s, %s::integer)",
    "enqueue_many": "select * from enqueue_many(%s)",
    "claim": "select * from claim(%s, %s::integer)",
    "renew": "select renew(%s, %s)",
    "renew_many": "select * from renew_many(%s::uuid[], %s::text[])",
    "complete": "select complete(%s, %s)",
    "complete_many": "select * from complete_many(%s::uuid[], %s::text[])",
    "fail": "select * from fail(%s, %s, %s, %s, %s::integer)",
    "fail_many": "select * from fail_many("
    "%s::uuid[], %s::text[], %s::text[], %s::boolean[], %s::integer[])",
    "release": "select * from release(%s, %s, %s::integer)",
    "release_many": "select * from release_many(%s::uuid[], %s::text[], %s::integer[])",
    "inspect": "select * from inspect(%s)",
    "inspect_key": "select * from inspect_key(%s, %s)",
    "inspect_attempts": "select * from inspect_attempts(%s)",
    # Not its words, and not which session holds a row, nor since when.
    "explain_job": "select reason, case when pid is null then since end, until, who,"
    " ahead, queue, attempt, max_attempts, failure_code from explain_job(%s)",
    "next_available_at": "select next_available_at(%s)",
    "redrive": "select * from redrive(%s, %s::integer)",
    "redrive_failed": "select redrive_failed(%s, %s, %s, %s, %s::integer, %s::integer)",
    "pause": "select pause(%s)",
    "resume": "select resume(%s)",
    "erase": "select erase(%s)",
    "purge": "select purge(%s, %s::integer)",
    "enforce_retention": "select enforce_retention(%s::integer)",
    "retire_expired": "select retire_expired(%s::integer)",
}

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
FAR_AHEAD = datetime(2100, 1, 1, tzinfo=UTC)
SOME_DAYS = [LONG_AGO + timedelta(days=n) for n in range(3)]
AN_HOUR = timedelta(hours=1)
NO_JOB = UUID("01900000-0000-7000-8000-000000000000")
NO_TOKEN = "job_lease_" + 64 * "0"


def mostly(usual, *seldom, times=4):
    """Draw the usual values so many times as often as the seldom ones."""
    return st.sampled_from([*usual] * times + [*seldom])


QUEUE = mostly(["email", "email", "email", "slow"], "unknown")
KIND = mostly(["send"], "render")
PAYLOAD = mostly([{}], {"to": 1}, {"to": 1.0}, {"to": [{"a": "é"}, None]})
KEY = st.sampled_from([f"key-{n}" for n in range(20)])
ASKED_AT = mostly([None], LONG_AGO, FAR_AHEAD)
MAX_ATTEMPTS = mostly([3, 1, 2, 4], 0)
CODE = mostly(["smtp.down", "template/missing"], "no such", None)
RETRYABLE = mostly([True, True, False], None)
WAIT = mostly([None, None, 0, 900], 2000, -1)
DELAY = mostly([0, 0, 1800], -1, 86401, None)
REDRIVEN = mostly([None, None, "smtp.down"], "attempts_exhausted", "no such", times=2)
LIMIT = mostly([1, 2, 1000], 0)
NEW_JOB = {
    "queue": QUEUE,
    "kind": KIND,
    "payload": PAYLOAD,
    "idempotency_key": KEY,
    "available_at": ASKED_AT,
    "max_attempts": MAX_ATTEMPTS,
}


NAMED = {
    *("created", "existing", "conflict", "invalid_job"),
    *("renewed", "busy", "completed", "invalid_lease", "invalid_failure"),
    *("queued", "running", "succeeded", "failed", "retried", "released"),
    "invalid_argument",
    *("ready", "scheduled", "retry_waiting", "leased", "lease_expired"),
    *("attempts_exhausted", "row_locked", "purged_or_unknown"),
    *("queue_paused", "queue_silent"),
}
GENERATED = (Phase.generate,)
SHRUNK = (Phase.generate, Phase.shrink)


class Bench:
    """An Instance in a database, and the sessions that a history uses."""

    def __init__(self, conninfo, roles):
        self.roles = roles
        self._stack = contextlib.ExitStack()
        self.owner = self._connect(conninfo, wait="20s")
        self.owner.execute(WATCH)
        for table in TABLES:  # the model does not know its locks
            self.owner.execute(f"alter table {table} set (autovacuum_enabled = off)")
        self.connections = {
            f"{role}.{number}": self._connect(conninfo, user=self.role(role))
            for role, count in ROLES
            for number in range(1, count + 1)
        }
        self.steps = Counter()
        self.outcomes = Counter()

    def role(self, name):
        return self.roles[name]

    def _connect(self, conninfo, wait="30ms", **parameters):
        # Nobody can end a wait for a lock: everything is one thread.
        options = f"-c search_path=jobs_email -c lock_timeout={wait} -c timezone=UTC"
        connection = psycopg.connect(
            make_conninfo(conninfo, options=options, **parameters), autocommit=True
        )
        self._stack.callback(connection.close)
        return connection

    def close(self):
        self._stack.close()

    def empty(self):
        """Begin anew: no open transaction, no row, and no entry in an index."""
        for connection in self.connections.values():
            connection.rollback()
        self.owner.execute(
            "truncate job, live_job, attempt, operator_act;"
            " update queue set paused_at = null, paused_by = null"
            " where paused_at is not null"
        )

    def ask(self, name, statement, parameters=()):
        """The rows that a session is answered, or the SQLSTATE."""
        try:
            cursor = self.connections[name].execute(statement, parameters or None)
        except psycopg.Error as error:
            return error.sqlstate
        return cursor.fetchall() if cursor.description else []

    def look(self, connection):
        """The tables as a session sees them, and the server's clock."""
        tables, clock = connection.execute(LOOK).fetchone()
        return {name: list(map(typed, rows)) for name, rows in tables.items()}, clock


def typed(row):
    """A row of a table, without the number that only orders acts, and their logins."""
    row.pop("operator_act_id", None)
    row.pop("login", None)
    for name, value in row.items():
        if value is not None and name.endswith("_at"):
            row[name] = datetime.fromisoformat(value)
    if "job_id" in row:
        row["job_id"] = UUID(row["job_id"])
    return row


def outcomes(answer):
    """What to count of an answer."""
    if isinstance(answer, str):
        return [answer]
    values = [value for row in answer for value in row]
    named = [value for value in values if isinstance(value, str) and value in NAMED]
    if named:
        return named
    if len(answer) != 1:
        return [f"{len(answer)} rows"]
    if type(values[0]) is int:
        return [f"{values[0]} jobs"]
    return ["true" if True in values else "nothing" if None in values else "a row"]


class History(RuleBasedStateMachine):
    """A history of one Instance; the bench is set by a subclass."""

    bench: Bench

    def __init__(self):
        super().__init__()
        self.sessions = [
            Session(name, self.bench.role(name.rpartition(".")[0]))
            for name in self.bench.connections
        ]
        self.model = Model(self.sessions)
        self.handed_out = []
        self.is_sound = True
        self.lines = []
        self.bench.empty()
        _, self.clock = self.bench.look(self.bench.owner)

    def teardown(self):
        if not self.is_sound:
            note(self.told())

    def told(self):
        """The history as text, with numbers for ids and tokens."""
        text = "\n".join(
            f"{who}: " + " ".join(map(str, what)) for who, *what in self.lines
        )
        for job_id in self.model.asked:
            text = text.replace(f"UUID('{job_id.value}')", repr(job_id))
        for _, job_id, attempt, token in self.handed_out:
            text = text.replace(token, f"token {attempt} of {self.known(job_id)}")
        return text

    # A step.

    def call(self, session, verb, *arguments, parameters=None):
        """Call a verb and compare its result and the tables with the model."""
        answer = self.bench.ask(session.name, CALLS[verb], parameters or arguments)
        self.lines.append((session, verb, arguments, answer))
        self.bench.steps[verb] += 1
        self.bench.outcomes.update(f"{verb}: {what}" for what in outcomes(answer))
        tables, clock = self.bench.look(self.bench.owner)
        arguments = [self.known(value) for value in arguments]
        expected = self.model.call(session, verb, arguments, self.clock, clock)
        self.clock = clock
        self.is_sound = same(expected, answer)
        assert self.is_sound, f"{self.lines[-1]}, but expected {expected}"
        self.compare(tables, None)
        if verb == "claim" and not isinstance(answer, str):
            self.handed_out += [
                (session.role, row[0], row[4], row[6]) for row in answer
            ]
            if not session.is_broken:
                (floor,) = self.bench.owner.execute(FLOORS).fetchone()
                assert floor is None, "the history was too long: a floor was set"
        if session.layers and not session.is_broken:
            connection = self.bench.connections[session.name]
            self.compare(self.bench.look(connection)[0], session)

    def control(self, session, statement):
        """Begin or end a transaction, or a part of one."""
        answer = self.bench.ask(session.name, statement)
        self.lines.append((session, statement))
        self.bench.steps[statement.rstrip(" 0123456789s")] += 1
        assert answer == []

    def compare_committed(self):
        tables, self.clock = self.bench.look(self.bench.owner)
        self.compare(tables, None)

    def compare(self, tables, session):
        """Every row of every table is as the model has it, for the owner or a session."""
        self.is_sound = False
        for table, actual in tables.items():
            expected = self.model.rows(table, session)
            if table != "operator_act":
                expected.sort(key=lambda row: row.job_id.value)
            assert len(expected) == len(actual), (table, session, expected, actual)
            for wanted, row in zip(expected, actual, strict=True):
                for name, value in vars(wanted).items():
                    assert same(value, row.pop(name)), (table, name, wanted, session)
                assert not row, f"{table} has columns that the model does not know"
        numbers = [row.job_id.number for row in self.model.rows("job", session)]
        assert numbers == sorted(numbers)
        self.is_sound = True

    def known(self, value):
        """The model's own id for each id in an argument."""
        if isinstance(value, UUID):
            return next((i for i in self.model.asked if i.value == value), value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.known, value))
        return value

    # What to draw from.

    def some(self, data, *roles):
        """A session of one of these roles; one whose transaction still stands."""
        sessions = [s for s in self.sessions if s.role_name in roles]
        standing = [s for s in sessions if not s.is_broken]
        return data.draw(st.sampled_from(standing or sessions))

    def some_job(self, data):
        ids = [job_id.value for job_id in self.model.asked if job_id.value]
        return data.draw(st.sampled_from([*reversed(ids), NO_JOB]))

    def some_lease(self, data, *by):
        """A session, and a lease: its own most of the time, else stale or forged."""
        workers = by or [s for s in self.sessions if s.role_name in WORKERS]
        own = [
            (session, row)
            for session in workers
            if not session.is_broken
            for row in self.model.rows("live_job", session)
            if row.lease_owner == session.role
        ]
        contested = [
            (session, row)
            for session, row in own
            if self.model.is_held(("live_job", row.job_id), session)
        ]
        tokens = [token for *_, token in self.handed_out]
        kind = data.draw(
            st.sampled_from(
                ["own"] * 6 + ["contested"] * 2 + ["any", "wrong", "foreign"]
            )
        )
        if kind == "any" or not own:
            session = data.draw(st.sampled_from(workers))
            job_id = self.some_job(data)
            return session, (job_id, data.draw(st.sampled_from([*tokens, None])))
        if kind == "contested" and contested:
            own = contested
        session, row = data.draw(st.sampled_from(own))
        lease = row.job_id.value, row.lease_token_hash.token.value
        if kind == "wrong":
            lease = lease[0], data.draw(st.sampled_from([NO_TOKEN, None, *tokens]))
        if kind == "foreign" and not by:
            session = data.draw(st.sampled_from(workers))
        return session, lease

    def some_leases(self, data):
        session, first = self.some_lease(data)
        count = data.draw(mostly([1, 2, 0], 3))
        return session, [
            first,
            *(self.some_lease(data, session)[1] for _ in range(count)),
        ]

    def movable(self, column):
        """The live jobs of which the owner can move a time, once, without waiting."""
        is_of_lease = column == "lease_expires_at"
        return [
            live
            for live in self.model.rows("live_job")
            if (live.lease_owner is not None) == is_of_lease
            and not isinstance(getattr(live, column), datetime)
            and not self.model.is_held(("live_job", live.job_id))
        ]

    def move(self, data, column, moment):
        live = data.draw(st.sampled_from(self.movable(column)))
        self.bench.owner.execute(
            f"update live_job set {column} = %s where job_id = %s",
            (moment, live.job_id.value),
        )
        self.lines.append(("owner", f"{column} =", live.job_id.value, moment))
        self.bench.steps[f"move {column}"] += 1
        self.model.move(("live_job", live.job_id), **{column: moment})

    # The rules.

    @initialize(has_begun=st.booleans())
    def some_jobs_are_there(self, has_begun):
        """Four queued jobs, or three that have failed and one that is leased."""
        producer, _, other, worker, *_ = self.sessions
        for number, session in enumerate([producer, producer, other, producer]):
            self.call_enqueue(
                session, "email", "send", {}, f"key-{number}", None, number + 1
            )
        if has_begun:
            self.call(worker, "claim", "email", 4)
            codes = ("smtp.down", "template/missing", "smtp.down")
            failures = [
                (job_id, token, code, False, None)
                for (_, job_id, _, token), code in zip(
                    self.handed_out, codes, strict=False
                )
            ]
            self.report_all(worker, "fail", failures)

    def call_enqueue(self, session, queue, kind, payload, *rest):
        arguments = (queue, kind, payload, *rest)
        parameters = (queue, kind, Jsonb(payload), *rest)
        self.call(session, "enqueue", *arguments, parameters=parameters)

    @rule(data=st.data(), job=st.fixed_dictionaries(NEW_JOB))
    def enqueue(self, data, job):
        self.call_enqueue(self.some(data, *PRODUCERS), *(job[name] for name in NEW_JOB))

    @rule(
        data=st.data(),
        items=st.lists(st.fixed_dictionaries(NEW_JOB), min_size=1, max_size=5),
    )
    def enqueue_many(self, data, items):
        document = json.dumps(items, default=datetime.isoformat)
        self.call(
            self.some(data, *PRODUCERS), "enqueue_many", items, parameters=(document,)
        )

    @rule(data=st.data())
    def claim_one(self, data):
        self.call(self.some(data, *WORKERS), "claim", "email", 1)

    @rule(data=st.data(), queue=QUEUE, limit=mostly([1, 2, 3], 10, 0))
    def claim(self, data, queue, limit):
        self.call(self.some(data, *WORKERS), "claim", queue, limit)

    @precondition(lambda self: self.is_anything_leased())
    @rule(data=st.data())
    def renew(self, data):
        self.report(data, "renew")

    @precondition(lambda self: self.is_anything_leased())
    @rule(data=st.data())
    def complete(self, data):
        self.report(data, "complete")

    @precondition(lambda self: self.is_anything_leased())
    @rule(data=st.data())
    def fail(self, data):
        self.report(data, "fail")

    @precondition(lambda self: self.is_anything_leased())
    @rule(data=st.data())
    def renew_many(self, data):
        self.report_many(data, "renew")

    @precondition(lambda self: self.is_anything_leased())
    @rule(data=st.data())
    def complete_many(self, data):
        self.report_many(data, "complete")

    @precondition(lambda self: self.is_anything_leased())
    @rule(data=st.data())
    def fail_many(self, data):
        self.report_many(data, "fail")

    @precondition(lambda self: self.is_anything_leased())
    @rule(data=st.data())
    def release(self, data):
        self.report(data, "release")

    @precondition(lambda self: self.is_anything_leased())
    @rule(data=st.data())
    def release_many(self, data):
        self.report_many(data, "release")

    def is_anything_leased(self):
        return any(
            row.lease_owner is not None
            for rows in (self.model.committed, *self.open_layers())
            for (table, *_), row in rows.items()
            if table == "live_job" and row is not None
        )

    def open_layers(self):
        return (layer for session in self.sessions for layer in session.layers)

    def report(self, data, verb):
        session, lease = self.some_lease(data)
        self.call(session, verb, *lease, *self.some_words(data, verb))

    def some_words(self, data, verb):
        """What a report says beside its lease."""
        drawn = {"fail": (CODE, RETRYABLE, WAIT), "release": (DELAY,)}.get(verb, ())
        return tuple(map(data.draw, drawn))

    def report_many(self, data, verb):
        session, leases = self.some_leases(data)
        leases = [(*lease, *self.some_words(data, verb)) for lease in leases]
        self.report_all(session, verb, leases)

    def report_all(self, session, verb, leases):
        columns = [list(column) for column in zip(*leases, strict=True)]
        self.call(session, f"{verb}_many", leases, parameters=columns)

    @precondition(lambda self: self.lost_answers())
    @rule(data=st.data())
    def report_again(self, data):
        """Repeat a report whose reply may have been lost, or contradict it."""
        ended = data.draw(st.sampled_from(self.lost_answers()))
        session = self.some(data, *WORKERS)
        lease = ended.job_id.value, ended.lease_token_hash.token.value
        is_likely = ended.outcome == "succeeded"
        is_released = ended.outcome == "released"
        if data.draw(mostly([is_likely], not is_likely, times=3)):
            self.call(session, "complete", *lease)
        elif data.draw(mostly([is_released], not is_released, times=3)):
            self.call(session, "release", *lease, data.draw(DELAY))
        else:
            codes = [ended.failure_code or "smtp.down"] * 3 + ["other"]
            marks = [bool(ended.retryable)] * 3 + [not ended.retryable]
            code, mark = (data.draw(st.sampled_from(all_)) for all_ in (codes, marks))
            self.call(session, "fail", *lease, code, mark, data.draw(WAIT))

    def lost_answers(self):
        return self.model.rows("attempt")

    @rule(data=st.data(), verb=st.sampled_from(list(READERS)))
    def read(self, data, verb):
        session = self.some(data, *READERS[verb])
        if verb == "next_available_at":
            self.call(session, verb, data.draw(QUEUE))
            return
        if verb == "inspect_key":
            asked = list(self.model.asked.values())
            job = data.draw(st.sampled_from(asked))
            producer = data.draw(mostly([job.producer], None, times=2))
            key = data.draw(mostly([job.idempotency_key], "unknown"))
            self.call(session, verb, key, producer)
            return
        taken = [
            live.job_id.value
            for live in self.model.rows("live_job")
            if live.lease_owner or self.model.is_held(("live_job", live.job_id))
        ]
        job_id = data.draw(st.sampled_from(taken * 2 + [self.some_job(data)]))
        self.call(session, verb, job_id)

    @rule(data=st.data(), extra=mostly([1, 2], 0), is_one=st.booleans())
    def redrive(self, data, extra, is_one):
        session = self.some(data, "operator")
        failed = [
            attempt
            for attempt in self.model.rows("attempt", session)
            if attempt.outcome == "failed"
            or attempt.failure_code == "attempts_exhausted"
        ]
        if is_one:
            ids = [attempt.job_id.value for attempt in failed]
            job_id = data.draw(st.sampled_from(ids * 3 + [self.some_job(data)]))
            self.call(session, "redrive", job_id, extra)
            return
        ends = [at(attempt.ended_at) for attempt in failed] or [self.clock]
        since = data.draw(mostly([LONG_AGO] * 2 * len(ends) + ends, None))
        before = data.draw(mostly([None] * 2 * len(ends) + ends, FAR_AHEAD))
        code, limit = data.draw(REDRIVEN), data.draw(LIMIT)
        queue = data.draw(mostly(["email"], "slow", "unknown"))
        self.call(session, "redrive_failed", queue, since, before, code, limit, extra)

    @rule(data=st.data(), queue=mostly(["slow", "slow", "email"], "unknown"))
    def pause_or_resume(self, data, queue):
        """Mostly resume, if anything is paused: else nothing would be claimed."""
        session = self.some(data, "operator")
        paused = [name for name in QUEUES if ("pause", name) in self.model.committed]
        if paused and data.draw(st.sampled_from([True] * 4 + [False])):
            self.call(session, "resume", data.draw(st.sampled_from(paused)))
        else:
            self.call(session, data.draw(mostly(["pause"], "resume")), queue)

    @rule(data=st.data())
    def erase(self, data):
        session = self.some(data, "operator")
        ended = [
            job.job_id.value
            for job in self.model.rows("job", session)
            if not any(
                live.job_id is job.job_id
                for live in self.model.rows("live_job", session)
            )
        ]
        job_id = data.draw(st.sampled_from(ended * 2 + [self.some_job(data)]))
        self.call(session, "erase", job_id)

    @rule(data=st.data(), verb=st.sampled_from(SWEEPS))
    def sweep(self, data, verb):
        session = self.some(data, "operator")
        # Whose leases end first is left to the server.
        limit = data.draw(mostly([1000], 0) if verb == "retire_expired" else LIMIT)
        if verb == "purge":
            rows = self.model.rows("attempt", session)
            ends = [at(attempt.ended_at) for attempt in rows]
            before = data.draw(mostly([self.clock, *ends], FAR_AHEAD, None))
            self.call(session, verb, before, limit)
        else:
            self.call(session, verb, limit)

    @precondition(lambda self: self.datable())
    @rule(data=st.data(), age=mostly([RETENTION + AN_HOUR], RETENTION - AN_HOUR))
    def date_evidence_back(self, data, age):
        job_id = data.draw(st.sampled_from(self.datable()))
        age += timedelta(microseconds=job_id.number)  # purge orders no equal ends
        self.bench.owner.execute(
            "update attempt set ended_at = ended_at - %s where job_id = %s",
            (age, job_id.value),
        )
        self.lines.append(("owner", "dates back", job_id.value, age))
        self.bench.steps["date evidence back"] += 1
        for attempt in self.model.rows("attempt"):
            if attempt.job_id is job_id:
                self.model.move(
                    ("attempt", job_id, attempt.attempt),
                    ended_at=at(attempt.ended_at) - age,
                )

    def datable(self):
        """The jobs whose evidence the owner can date back, once, without waiting."""
        lasts = {row.job_id: row for row in self.model.rows("attempt")}
        return [
            job_id
            for job_id, last in lasts.items()
            if not isinstance(last.ended_at, datetime)
            and not self.model.is_held(("attempt", job_id, last.attempt))
        ]

    @precondition(lambda self: self.movable("lease_expires_at"))
    @rule(data=st.data(), moment=mostly([LONG_AGO], FAR_AHEAD, times=2))
    def move_the_end_of_a_lease(self, data, moment):
        self.move(data, "lease_expires_at", moment)

    @precondition(lambda self: self.movable("available_at"))
    @rule(data=st.data(), moment=mostly(SOME_DAYS, FAR_AHEAD, times=2))
    def move_a_queued_job(self, data, moment):
        self.move(data, "available_at", moment)

    @precondition(lambda self: sum(bool(s.layers) for s in self.sessions) < 2)
    @rule(data=st.data())
    def begin(self, data):
        idle = [s for s in self.sessions if not s.layers]
        session = data.draw(st.sampled_from(idle))
        self.control(session, "begin")
        self.model.begin(session)

    @precondition(lambda self: any(s.layers for s in self.sessions))
    @rule(data=st.data(), is_kept=st.sampled_from([True, True, False]))
    def end(self, data, is_kept):
        session = data.draw(st.sampled_from([s for s in self.sessions if s.layers]))
        self.control(session, "commit" if is_kept else "rollback")
        if is_kept:
            self.model.commit(session)
        else:
            self.model.rollback(session)
        self.compare_committed()

    @precondition(lambda self: any(s.layers and not s.is_broken for s in self.sessions))
    @rule(data=st.data())
    def savepoint(self, data):
        standing = [s for s in self.sessions if s.layers and not s.is_broken]
        session = data.draw(st.sampled_from(standing))
        self.control(session, f"savepoint s{len(session.layers)}")
        self.model.savepoint(session)

    @precondition(lambda self: any(len(s.layers) > 1 for s in self.sessions))
    @rule(data=st.data(), release=st.booleans())
    def end_savepoint(self, data, release):
        nested = [s for s in self.sessions if len(s.layers) > 1]
        session = data.draw(st.sampled_from(nested))
        number = len(session.layers) - 1
        if release and not session.is_broken:
            self.control(session, f"release savepoint s{number}")
            self.model.release(session)
        else:
            self.control(session, f"rollback to savepoint s{number}")
            self.model.rollback_to(session, number)
        connection = self.bench.connections[session.name]
        self.compare(self.bench.look(connection)[0], session)


def run(bench, examples, number, length=50, phases=SHRUNK):
    """Run so many histories; raises what differs from the model, shrunk."""
    machine = type("Shown", (History,), {"bench": bench})
    run_state_machine_as_test(
        seed(number)(machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=length,
            phases=phases,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        ),
    )
