"""What every call must return and leave behind: a model of one Instance, without SQL.

A session sees what is committed and, above it, the layers of its own transaction: one
for the transaction and one for each savepoint in it. A row that a layer holds, changed
or only locked, is held against every other session until the layer is gone. A call that
would wait for such a row is refused with 55P03: the sessions have a lock_timeout.

What only the server can choose (ids, tokens, the clock) is an Unknown: the first value
that is seen and suits it binds it, and every later one must be the same.

The clock is never near a limit: leases and waits are hours, histories are seconds. And
no claim floor is ever set, since histories are too short to leave a hundred entries in
the index; the machine insists on it. Nothing is damaged, no table is locked, and workers
are always connected, so that explain_job has nothing of these to tell.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import ChainMap
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

LEASE = timedelta(hours=1)
RETRY_BASE = timedelta(seconds=1000)
RETRY_MOST = timedelta(seconds=1500)
RETENTION = timedelta(days=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
QUEUES = ("email", "slow")
PRODUCERS = ("accounts", "organization")
GONE = None
NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


class Refused(Exception):
    """The call is refused with this SQLSTATE and changes nothing."""

    def __init__(self, sqlstate):
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


class Unknown:
    """What the server chooses."""

    value: Any = None

    def accepts(self, actual):
        """Whether this may be the value; the first one binds."""
        if self.value is None and self.suits(actual):
            self.value = actual
        return self.value is not None and self.value == actual

    def __repr__(self):
        return f"<{type(self).__name__} {self.value or '?'}>"


class NewId(Unknown):
    """The id of a job; ids grow in the order of enqueueing."""

    def __init__(self, number):
        self.number = number

    def suits(self, actual):
        return isinstance(actual, UUID) and actual.version == 7

    def __repr__(self):
        return f"job {self.number}"


class NewToken(Unknown):
    """The token of a lease."""

    def suits(self, actual):
        return re.fullmatch("job_lease_[0-9a-f]{64}", actual)


class Instant(Unknown):
    """The server's clock, read between two moments."""

    def __init__(self, earliest, latest):
        self.earliest, self.latest = earliest, latest

    def suits(self, actual):
        return isinstance(actual, datetime) and self.earliest <= actual <= self.latest

    def __add__(self, wait):
        return Later(self, wait)


@dataclass(frozen=True)
class Later:
    """So long after an instant, to the microsecond."""

    instant: Instant
    wait: timedelta

    def accepts(self, actual):
        return isinstance(actual, datetime) and self.instant.accepts(actual - self.wait)

    @property
    def value(self):
        return self.instant.value + self.wait


class Anything:
    """What is not foretold."""

    def accepts(self, _):
        return True


@dataclass(frozen=True)
class Hash:
    """What the tables keep of a token."""

    token: NewToken

    def accepts(self, actual):
        digest = hashlib.sha256(self.token.value.encode()).hexdigest()
        return actual == rf"\x{digest}"

    def is_of(self, token):
        return token is not None and self.token.value == token


@dataclass(frozen=True)
class Written:
    """An instant as an act's arguments record it."""

    instant: Any

    def accepts(self, actual):
        return same(self.instant, datetime.fromisoformat(actual))


def at(instant):
    """The moment itself."""
    return (
        instant if instant is None or isinstance(instant, datetime) else instant.value
    )


def same(expected, actual):
    """Whether a reply or a row is as expected. Binds the unknown values."""
    if hasattr(expected, "accepts"):
        return expected.accepts(actual)
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and expected.keys() == actual.keys()
            and all(same(value, actual[name]) for name, value in expected.items())
        )
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(actual, (list, tuple))
            and len(expected) == len(actual)
            and all(map(same, expected, actual))
        )
    return expected == actual


@dataclass(frozen=True)
class Job:
    job_id: NewId
    created_at: Any
    available_at: datetime | None
    max_attempts: int
    producer: str
    queue: str
    kind: str
    idempotency_key: str
    payload: dict

    @property
    def intent(self):
        return (
            self.queue,
            self.kind,
            self.payload,
            self.available_at,
            self.max_attempts,
        )


@dataclass(frozen=True)
class LiveJob:
    job_id: NewId
    available_at: Any
    attempt: int
    max_attempts: int
    queue: str
    leased_at: Any = None
    lease_expires_at: Any = None
    lease_owner: str | None = None
    lease_token_hash: Hash | None = None
    last_failure_code: str | None = None
    payload_bytes: Any = Anything()  # noqa: RUF009 - it has no state
    holder: None = None

    @property
    def place(self):
        """Where it stands in its queue."""
        return at(self.available_at), self.job_id.number


@dataclass(frozen=True)
class Attempt:
    job_id: NewId
    leased_at: Any
    ended_at: Any
    retry_at: Any
    attempt: int
    max_attempts: int
    retryable: bool | None
    queue: str
    worker: str
    outcome: str
    failure_code: str | None
    lease_token_hash: Hash
    holder: None = None


@dataclass(frozen=True)
class OperatorAct:
    acted_at: Any
    operator: str
    act: str
    arguments: dict
    job_count: int


@dataclass(frozen=True)
class Pause:
    at: Any
    by: str


@dataclass(repr=False)
class Session:
    """A connection of one role, and the layers of its open transaction."""

    name: str
    role: str
    layers: list[dict] = field(default_factory=list)
    is_broken: bool = False
    has_savepoints: bool = False

    def __repr__(self):
        return self.name

    @property
    def role_name(self):
        return self.name.rpartition(".")[0]


class Model:
    """Everything that is committed, and everything that is not yet."""

    def __init__(self, sessions):
        self.sessions = sessions
        self.committed = {}
        self.asked = {}
        self.numbers = itertools.count(1)

    def begin(self, session):
        session.layers.append({})

    def savepoint(self, session):
        session.layers.append({})
        session.has_savepoints = True

    def rollback_to(self, session, number):
        """Undo what was done since the savepoint, which stays."""
        del session.layers[number:]
        session.layers.append({})
        session.is_broken = False

    def release(self, session):
        self._merge(session.layers[-2], session.layers.pop())

    def commit(self, session):
        if not session.is_broken:
            for layer in session.layers:
                self._merge(self.committed, layer)
        self.rollback(session)

    def rollback(self, session):
        session.layers.clear()
        session.is_broken = session.has_savepoints = False

    def _merge(self, below, layer):
        below.update(layer)
        if below is self.committed:
            for key in [key for key, row in layer.items() if row is GONE]:
                del below[key]

    def call(self, session, verb, arguments, earliest, latest):
        """What a verb answers, a list of rows, or the SQLSTATE it is refused with."""
        if session.is_broken:
            return "25P02"
        statement = Statement(self, session, earliest, latest)
        try:
            answer = getattr(statement, verb)(*arguments)
        except Refused as refused:
            # What the innermost layer held is free at once, before it is rolled back.
            if session.layers:
                session.layers[-1].clear()
                session.is_broken = True
            return refused.sqlstate
        below = session.layers[-1] if session.layers else self.committed
        self._merge(below, statement.layer)
        return answer

    def move(self, key, **times):
        """Move times of a committed row that nobody holds, as the owner."""
        self.committed[key] = replace(self.committed[key], **times)

    def is_held(self, key, but_by=None):
        """Whether the open transaction of any other session holds a row."""
        return self.holder(key, but_by) is not None

    def holder(self, key, but_by=None):
        """The other session whose open transaction holds a row."""
        for session in self.sessions:
            if session is not but_by and any(key in layer for layer in session.layers):
                return session
        return None

    def rows(self, table, session=None):
        """The rows of a table, as committed or as a session sees them, in order."""
        layers = reversed(session.layers) if session else ()
        view = ChainMap(*layers, self.committed)
        return [view[key] for key in _keys(view, table)]


def _keys(view, table):
    return sorted(
        (key for key in view if key[0] == table and view[key] is not GONE),
        key=lambda key: (getattr(key[1], "number", key[1]), *key[2:]),
    )


class Statement:
    """One call: what it sees, what it changes, what it answers."""

    def __init__(self, model, session, earliest, latest):
        self.model, self.session = model, session
        self.role = session.role
        self.earliest, self.latest = earliest, latest
        self.layer = {}
        self.view = ChainMap(self.layer, *reversed(session.layers), model.committed)

    # What it sees.

    def now(self):
        return Instant(self.earliest, self.latest)

    def is_past(self, instant):
        return at(instant) <= self.earliest

    def rows(self, table):
        return [self.view[key] for key in _keys(self.view, table)]

    def attempts(self, job_id):
        return [row for row in self.rows("attempt") if row.job_id is job_id]

    def is_held(self, *key):
        return self.model.is_held(key, but_by=self.session)

    def refuse_to_wait_for(self, *key):
        if self.is_held(*key):
            raise Refused("55P03")

    def hold(self, *key):
        """Lock a row without changing it."""
        self.layer[key] = self.view[key]

    def has_ended(self, job_id):
        return self.view.get(("live_job", job_id)) is GONE

    # Producers.

    def enqueue(self, queue, kind, payload, key, available_at, max_attempts):
        if queue not in QUEUES or not 1 <= max_attempts <= 100:
            raise Refused("LJ001")
        asked = (queue, kind, payload, available_at, max_attempts)
        self.refuse_to_wait_for_key(key)
        job = self.job_under(key)
        if job is None:
            return [(self.add(key, asked, self.now()), True)]
        if job.intent != asked:
            raise Refused("LJ002")
        return [(job.job_id, False)]

    def enqueue_many(self, items):
        if not 1 <= len(items) <= 1000:
            raise Refused("LJ007")
        now = self.now()
        fine = [
            item is not None
            and item["queue"] in QUEUES
            and 1 <= item["max_attempts"] <= 100
            for item in items
        ]
        for item in itertools.compress(items, fine):
            self.refuse_to_wait_for_key(item["idempotency_key"])
        answers = []
        for position, (item, is_fine) in enumerate(zip(items, fine, strict=True), 1):
            if not is_fine:
                answers.append((position, None, "invalid_job"))
                continue
            key = item["idempotency_key"]
            asked = tuple(
                item[name]
                for name in ("queue", "kind", "payload", "available_at", "max_attempts")
            )
            job = self.job_under(key)
            if job is None:
                created_at = now + timedelta(microseconds=position)
                answers.append((position, self.add(key, asked, created_at), "created"))
            elif job.intent == asked:
                answers.append((position, job.job_id, "existing"))
            else:
                answers.append((position, None, "conflict"))
        return answers

    def refuse_to_wait_for_key(self, key):
        """A key waits for the transaction that is writing or deleting the job that has it."""
        for job in self.model.asked.values():
            if (job.producer, job.idempotency_key) == (self.role, key):
                self.refuse_to_wait_for("job", job.job_id)

    def job_under(self, key):
        for job in self.rows("job"):
            if (job.producer, job.idempotency_key) == (self.role, key):
                return job
        return None

    def add(self, key, asked, created_at):
        queue, kind, payload, available_at, max_attempts = asked
        job = Job(
            NewId(next(self.model.numbers)),
            created_at,
            available_at,
            max_attempts,
            self.role,
            queue,
            kind,
            key,
            payload,
        )
        is_later = available_at is not None and available_at > self.latest
        self.model.asked[job.job_id] = job
        self.layer["job", job.job_id] = job
        self.layer["live_job", job.job_id] = LiveJob(
            job.job_id,
            available_at if is_later else created_at,
            0,
            max_attempts,
            queue,
        )
        return job.job_id

    # Workers.

    def claim(self, queue, limit):
        if queue not in QUEUES:
            raise Refused("LJ003")
        if not 1 <= limit <= 1000:
            raise Refused("LJ007")
        answers = []
        if self.pause_of(queue) is not None:
            return answers
        for live in sorted(self.rows("live_job"), key=lambda live: live.place):
            if len(answers) == limit:
                break
            if (
                live.queue != queue
                or not self.is_past(live.available_at)
                or self.is_held("live_job", live.job_id)
            ):
                continue
            if live.lease_owner is not None:
                if not self.is_past(live.lease_expires_at):
                    continue
                self.reclaim(live)
            if not self.has_ended(live.job_id):
                answers.append(self.lease(live))
        return answers

    def lease(self, live):
        now, token = self.now(), NewToken()
        leased = replace(
            live,
            attempt=live.attempt + 1,
            leased_at=now,
            lease_expires_at=now + LEASE,
            lease_owner=self.role,
            lease_token_hash=Hash(token),
        )
        self.layer["live_job", live.job_id] = leased
        job = self.view["job", live.job_id]
        return (
            job.job_id,
            job.queue,
            job.kind,
            job.payload,
            leased.attempt,
            leased.max_attempts,
            token,
            leased.lease_expires_at,
            job.created_at,
        )

    def reclaim(self, live):
        """Record a lapsed lease; the last one ends the job."""
        is_last = live.attempt >= live.max_attempts
        code = "attempts_exhausted" if is_last else None
        self.end(live, "lease_expired", code)
        if not is_last:
            self.layer["live_job", live.job_id] = live

    def end(self, live, outcome, code=None, retryable=None, wait=None):
        """Write the evidence of an attempt and take the live row away."""
        ended_at = self.now()
        retry_at = None if wait is None else ended_at + wait
        self.layer["live_job", live.job_id] = GONE
        self.layer["attempt", live.job_id, live.attempt] = Attempt(
            live.job_id,
            live.leased_at,
            ended_at,
            retry_at,
            live.attempt,
            live.max_attempts,
            retryable,
            self.view["job", live.job_id].queue,
            live.lease_owner,
            outcome,
            code,
            live.lease_token_hash,
        )
        return retry_at

    def leased(self, job_id, token):
        """The live row that this role has leased under this token."""
        live = self.view.get(("live_job", job_id))
        if (
            live is not GONE
            and live.lease_owner == self.role
            and live.lease_token_hash.is_of(token)
        ):
            return live
        return None

    def evidence(self, job_id, token):
        """The ended attempt that this role had leased under this token."""
        for attempt in self.attempts(job_id):
            if attempt.worker == self.role and attempt.lease_token_hash.is_of(token):
                return attempt
        return None

    def renew(self, job_id, token):
        live = self.leased(job_id, token)
        if live is None:
            raise Refused("LJ004")
        self.refuse_to_wait_for("live_job", job_id)
        if self.is_past(live.lease_expires_at):
            raise Refused("LJ004")
        return [(self.prolong(live),)]

    def prolong(self, live):
        expires_at = live.lease_expires_at
        if at(expires_at) < self.earliest + LEASE:
            expires_at = self.now() + LEASE
        self.layer["live_job", live.job_id] = replace(live, lease_expires_at=expires_at)
        return expires_at

    def renew_many(self, leases):
        if not leases:
            raise Refused("LJ007")
        judged = []
        for job_id, token in leases:
            live = self.leased(job_id, token)
            if live is None:
                judged.append("invalid_lease")
                continue
            # Who holds the row may be renewing a lease that seems to have expired.
            if self.is_held("live_job", job_id):
                judged.append("busy")
                continue
            self.hold("live_job", job_id)
            is_past = self.is_past(live.lease_expires_at)
            judged.append("invalid_lease" if is_past else "renewed")
        renewed = {
            job_id: self.prolong(self.view["live_job", job_id])
            for job_id in {
                job_id
                for (job_id, _), outcome in zip(leases, judged, strict=True)
                if outcome == "renewed"
            }
        }
        return [
            (
                position,
                job_id,
                renewed[job_id] if outcome == "renewed" else None,
                outcome,
            )
            for position, ((job_id, _), outcome) in enumerate(
                zip(leases, judged, strict=True), 1
            )
        ]

    def complete(self, job_id, token):
        live = self.leased(job_id, token)
        if live is not None:
            self.refuse_to_wait_for("live_job", job_id)
            if self.is_past(live.lease_expires_at):
                raise Refused("LJ004")
            self.end(live, "succeeded")
        elif not self.has_completed(job_id, token):
            raise Refused("LJ004")
        return [(True,)]

    def has_completed(self, job_id, token):
        evidence = self.evidence(job_id, token)
        return evidence is not None and evidence.outcome == "succeeded"

    def complete_many(self, leases):
        if not leases:
            raise Refused("LJ007")
        for live in self.lock(leases):
            self.end(live, "succeeded")
        return [
            (
                position,
                job_id,
                "completed" if self.has_completed(job_id, token) else "invalid_lease",
            )
            for position, (job_id, token) in enumerate(leases, 1)
        ]

    def lock(self, leases):
        """Lock every row leased under these tokens and return those not expired."""
        found = {}
        for job_id, token in leases:
            live = self.leased(job_id, token)
            if live is not None:
                self.refuse_to_wait_for("live_job", job_id)
                self.hold("live_job", job_id)
                found[job_id] = live
        return [
            live for live in found.values() if not self.is_past(live.lease_expires_at)
        ]

    def fail(self, job_id, token, code, retryable, after):
        if not is_sound(code, retryable, after):
            raise Refused("LJ005")
        live = self.leased(job_id, token)
        if live is None:
            answer = self.failed_before(job_id, token, code, retryable)
            if answer is None:
                raise Refused("LJ004")
            return [answer]
        self.refuse_to_wait_for("live_job", job_id)
        if self.is_past(live.lease_expires_at):
            raise Refused("LJ004")
        self.give_up(live, code, retryable, after)
        return [self.failed_before(job_id, token, code, retryable)]

    def give_up(self, live, code, retryable, after):
        """End an attempt as failed; the job is queued again if another is left."""
        if not retryable or live.attempt >= live.max_attempts:
            self.end(live, "failed", code, retryable)
            return
        wait = RETRY_BASE * 2 ** (live.attempt - 1)
        if after is not None:
            wait = timedelta(seconds=after)
        wait = min(wait, RETRY_MOST)
        retry_at = self.end(live, "retried", code, retryable, wait)
        self.layer["live_job", live.job_id] = LiveJob(
            live.job_id,
            retry_at,
            live.attempt,
            live.max_attempts,
            live.queue,
            last_failure_code=code,
        )

    def failed_before(self, job_id, token, code, retryable):
        """What the failure of an attempt answered, also when it is reported again."""
        evidence = self.evidence(job_id, token)
        if evidence is None or (evidence.failure_code, evidence.retryable) != (
            code,
            retryable,
        ):
            return None
        status = "queued" if evidence.outcome == "retried" else "failed"
        return status, evidence.retry_at

    def fail_many(self, failures):
        if not failures:
            raise Refused("LJ007")
        sound = [failure for failure in failures if is_sound(*failure[2:])]
        locked = self.lock([failure[:2] for failure in sound])
        for live in locked:
            _, _, *words = next(
                failure
                for failure in sound
                if failure[0] is live.job_id and live.lease_token_hash.is_of(failure[1])
            )
            self.give_up(live, *words)
        answers = []
        for position, (job_id, token, *words) in enumerate(failures, 1):
            if not is_sound(*words):
                answer = "invalid_failure", None
            else:
                answer = self.failed_before(job_id, token, *words[:2]) or (
                    "invalid_lease",
                    None,
                )
            answers.append((position, job_id, *answer))
        return answers

    def release(self, job_id, token, delay):
        if not is_delay(delay):
            raise Refused("LJ007")
        live = self.leased(job_id, token)
        if live is None:
            answer = self.released_before(job_id, token)
            if answer is None:
                raise Refused("LJ004")
            return [answer]
        self.refuse_to_wait_for("live_job", job_id)
        if self.is_past(live.lease_expires_at):
            raise Refused("LJ004")
        self.give_back(live, delay)
        return [self.released_before(job_id, token)]

    def give_back(self, live, delay):
        """Queue a job again, with one attempt more."""
        retry_at = self.end(live, "released", wait=timedelta(seconds=delay))
        if delay == 0:
            key = "attempt", live.job_id, live.attempt
            retry_at = live.available_at
            self.layer[key] = replace(self.layer[key], retry_at=retry_at)
        self.layer["live_job", live.job_id] = LiveJob(
            live.job_id,
            retry_at,
            live.attempt,
            live.max_attempts + 1,
            live.queue,
            last_failure_code=live.last_failure_code,
        )

    def released_before(self, job_id, token):
        """What the release of a lease returned, also when it is repeated."""
        evidence = self.evidence(job_id, token)
        if evidence is None or evidence.outcome != "released":
            return None
        return "queued", evidence.retry_at

    def release_many(self, releases):
        if not releases:
            raise Refused("LJ007")
        sound = [item for item in releases if is_delay(item[2])]
        for live in self.lock([item[:2] for item in sound]):
            delay = next(
                delay
                for job_id, token, delay in sound
                if job_id is live.job_id and live.lease_token_hash.is_of(token)
            )
            self.give_back(live, delay)
        answers = []
        for position, (job_id, token, delay) in enumerate(releases, 1):
            if not is_delay(delay):
                answer = "invalid_argument", None
            else:
                answer = self.released_before(job_id, token) or ("invalid_lease", None)
            answers.append((position, job_id, *answer))
        return answers

    # Observers.

    def inspect(self, job_id):
        job = self.view.get(("job", job_id))
        # A producer sees its own jobs alone.
        is_shown = job is not None and (
            self.session.role_name not in PRODUCERS or job.producer == self.role
        )
        if not is_shown:
            raise Refused("LJ006")
        live = self.view.get(("live_job", job_id))
        attempts = self.attempts(job_id)
        last = attempts[-1] if attempts else None
        codes = [a.failure_code for a in attempts if a.failure_code is not None]
        moments = [at(job.created_at)]
        if live is not None and live.leased_at is not None:
            moments.append(at(live.leased_at))
        if last is not None:
            moments.append(at(last.ended_at))
        if live is None:
            status = "succeeded" if last.outcome == "succeeded" else "failed"
        else:
            status = "queued" if live.lease_owner is None else "running"
        counted = live or last
        asked = job.available_at
        is_later = asked is not None and asked > at(job.created_at)
        return [
            (
                job_id,
                job.queue,
                job.kind,
                status,
                counted.attempt,
                counted.max_attempts,
                live.available_at if live else asked if is_later else job.created_at,
                live and live.lease_expires_at,
                (live and live.last_failure_code) or (codes[-1] if codes else None),
                job.created_at,
                max(moments),
                job.producer,
                (live and live.lease_owner) or (last and last.worker),
                last.ended_at if live is None else None,
                None,
            )
        ]

    def inspect_key(self, key, producer):
        for job in self.rows("job"):
            if (job.producer, job.idempotency_key) == (producer or self.role, key):
                return self.inspect(job.job_id)
        raise Refused("LJ006")

    def next_available_at(self, queue):
        if queue not in QUEUES:
            raise Refused("LJ003")
        if self.pause_of(queue) is not None:
            return [(None,)]
        live = [row for row in self.rows("live_job") if row.queue == queue]
        queued = [at(row.available_at) for row in live if row.lease_owner is None]
        lapsing = [at(row.lease_expires_at) for row in live if row.lease_owner]
        if queued and self.is_past(min(queued)):
            return [(min(queued),)]
        return [(min(queued + lapsing, default=None),)]

    def inspect_attempts(self, job_id):
        if self.view.get(("job", job_id)) is None:
            raise Refused("LJ006")
        answers = [
            (
                ended.attempt,
                ended.worker,
                ended.outcome,
                ended.leased_at,
                None,
                ended.ended_at,
                ended.failure_code,
                ended.retryable,
                ended.retry_at,
                ended.max_attempts,
                None,
            )
            for ended in self.attempts(job_id)
        ]
        live = self.view.get(("live_job", job_id))
        if live is not None and live.lease_owner is not None:
            lease = (live.leased_at, live.lease_expires_at, None, None, None, None)
            running = live.attempt, live.lease_owner, "running"
            answers.append((*running, *lease, live.max_attempts, None))
        return answers

    def explain_job(self, job_id):
        job = self.view.get(("job", job_id))
        if job is None:
            return [(*self.absence(job_id), *[None] * 4)]
        live = self.view.get(("live_job", job_id))
        last = next(reversed(self.attempts(job_id)), None)
        holder = live and self.model.holder(("live_job", job_id), but_by=self.session)
        if holder and holder.has_savepoints:
            # A row names the savepoint that locked it, which may have been released.
            return Anything()
        if holder:
            reason = "row_locked", None, None, holder.role, None
        elif live:
            reason = self.reason(live)
        else:
            word = "succeeded" if last.outcome == "succeeded" else "failed"
            reason = word, last.ended_at, None, last.worker, None
        counted = live or last
        return [
            (
                *reason,
                job.queue,
                counted.attempt,
                counted.max_attempts,
                (live and live.last_failure_code) or (last and last.failure_code),
            )
        ]

    def absence(self, job_id):
        """Why there is no such job: since when, and the last purge it may have met."""
        made_at = EPOCH + timedelta(
            milliseconds=getattr(job_id, "value", job_id).int >> 80
        )
        for act in reversed(self.rows("operator_act")):
            before = EPOCH
            if act.act == "purge":
                before = at(act.arguments["before"].instant)
            elif act.act == "erase" and act.arguments["job_id"] == str(
                getattr(job_id, "value", job_id)
            ):
                before = at(act.acted_at)
            if before > made_at:
                return "purged_or_unknown", made_at, before, act.operator, None
        return "purged_or_unknown", made_at, None, None, None

    def reason(self, live):
        """Why a job is not claimed: the reason, since, until, who, how many before it."""
        expires_at, worker = live.lease_expires_at, live.lease_owner
        if worker is not None and not self.is_past(expires_at):
            return "leased", live.leased_at, expires_at, worker, None
        if paused := self.pause_of(live.queue):
            return "queue_paused", paused.at, None, paused.by, None
        if worker is None and not self.is_past(live.available_at):
            last = next(reversed(self.attempts(live.job_id)), None)
            has_failed = last is not None and last.outcome != "released"
            reason = "retry_waiting" if has_failed else "scheduled"
            return reason, None, live.available_at, None, None
        ahead = sum(
            other.queue == live.queue
            and other.place < live.place
            and (other.lease_owner is None or self.is_past(other.lease_expires_at))
            for other in self.rows("live_job")
        )
        if worker is None:
            is_silent = self.is_silent(live.queue, live.available_at)
            reason = "queue_silent" if is_silent else "ready"
            return reason, live.available_at, None, None, ahead
        if live.attempt >= live.max_attempts:
            return "attempts_exhausted", expires_at, None, worker, None
        return "lease_expired", expires_at, None, worker, ahead

    def is_silent(self, queue, since):
        """Whether a job is due for a minute, and no job of its queue was claimed since.

        A history is shorter: any claim was within the minute.
        """
        minute_ago = self.earliest - timedelta(minutes=1)
        is_claimed = any(
            live.queue == queue and live.leased_at and self.is_past(live.available_at)
            for live in self.rows("live_job")
        )
        has_ended = any(
            last.queue == queue
            and at(last.ended_at) > minute_ago
            and (
                last.outcome in ("succeeded", "failed")
                or last.failure_code == "attempts_exhausted"
            )
            for last in self.rows("attempt")
        )
        return at(since) < minute_ago and not is_claimed and not has_ended

    # Operators.

    def has_failed(self, job_id):
        return self.has_ended(job_id) and (
            self.attempts(job_id)[-1].outcome != "succeeded"
        )

    def pause_of(self, queue):
        """Since when and by whom a queue is paused, or None."""
        return self.view.get(("pause", queue))

    def pause(self, queue):
        self.lock_policy(queue)
        if self.pause_of(queue) is not None:
            return [(False,)]
        self.layer["pause", queue] = Pause(self.now(), self.role)
        self.record("pause", {"queue": queue})
        return [(True,)]

    def resume(self, queue):
        self.lock_policy(queue)
        if self.pause_of(queue) is None:
            return [(False,)]
        self.layer["pause", queue] = GONE
        self.record("resume", {"queue": queue})
        return [(True,)]

    def lock_policy(self, queue):
        self.refuse_to_wait_for("policy", None)
        self.layer["policy", None] = GONE
        if queue not in QUEUES:
            raise Refused("LJ003")

    def erase(self, job_id):
        if self.view.get(("job", job_id)) is None:
            raise Refused("LJ006")
        self.refuse_to_wait_for("job", job_id)
        if not self.has_ended(job_id):
            raise Refused("LJ007")
        self.forget(job_id)
        self.record("erase", {"job_id": str(job_id.value)}, 1)
        return [(True,)]

    def forget(self, job_id):
        for attempt in self.attempts(job_id):
            self.layer["attempt", job_id, attempt.attempt] = GONE
        self.layer["job", job_id] = GONE

    def redrive(self, job_id, extra_attempts):
        if not 1 <= extra_attempts <= 100:
            raise Refused("LJ007")
        if self.view.get(("job", job_id)) is None:
            raise Refused("LJ006")
        self.refuse_to_wait_for("job", job_id)
        if not self.has_failed(job_id):
            raise Refused("LJ007")
        due_at = self.requeue([job_id], extra_attempts)
        self.record(
            "redrive",
            {"job_id": str(job_id.value), "extra_attempts": extra_attempts},
            1,
        )
        return [("queued", due_at)]

    def redrive_failed(self, queue, since, before, code, limit, extra_attempts):
        if queue not in QUEUES:
            raise Refused("LJ003")
        if since is None:
            raise Refused("LJ007")
        if code is not None and not NAME.fullmatch(code):
            raise Refused("LJ005")
        if not 1 <= limit <= 10000 or not 1 <= extra_attempts <= 100:
            raise Refused("LJ007")
        taken = [
            last.job_id
            for last in self.ends()
            if self.has_failed(last.job_id)
            and self.view["job", last.job_id].queue == queue
            and since <= at(last.ended_at)
            and (before is None or at(last.ended_at) < before)
            and code in (None, last.failure_code)
        ][:limit]
        self.requeue(taken, extra_attempts)
        asked = {
            "queue": queue,
            "since": Written(since),
            "before": before and Written(before),
            "failure_code": code,
            "limit": limit,
            "extra_attempts": extra_attempts,
            "over_seconds": 0,
            "kind": None,
        }
        if taken:
            self.record("redrive_failed", asked, len(taken))
        return [(len(taken),)]

    def requeue(self, job_ids, extra_attempts):
        """Queue failed jobs again, one after the other; returns when the last is due."""
        now = None
        for job_id in job_ids:
            now = self.now()
            last = self.attempts(job_id)[-1]
            self.hold("job", job_id)
            self.layer["live_job", job_id] = LiveJob(
                job_id,
                now,
                last.attempt,
                last.attempt + extra_attempts,
                self.view["job", job_id].queue,
                last_failure_code=last.failure_code,
            )
        return now

    def ends(self):
        """The last attempt of each ended job that nobody else holds, in order."""
        lasts = [
            self.attempts(job.job_id)[-1]
            for job in self.rows("job")
            if self.has_ended(job.job_id) and not self.is_held("job", job.job_id)
        ]
        return sorted(lasts, key=lambda last: at(last.ended_at))

    def purge(self, before, limit):
        if before is None or before > self.latest or not 1 <= limit <= 10000:
            raise Refused("LJ007")
        return self.delete(before, limit, before)

    def enforce_retention(self, limit):
        if not 1 <= limit <= 10000:
            raise Refused("LJ007")
        cut_off = Later(self.now(), -RETENTION)
        return self.delete(self.earliest - RETENTION, limit, cut_off)

    def delete(self, before, limit, cut_off):
        """Delete what ended before a time; the act has it as the cut-off."""
        gone = [last.job_id for last in self.ends() if at(last.ended_at) < before]
        for job_id in gone[:limit]:
            self.forget(job_id)
        count = len(gone[:limit])
        if count:
            self.record("purge", {"before": Written(cut_off), "limit": limit}, count)
        return [(count,)]

    def retire_expired(self, limit):
        if not 1 <= limit <= 10000:
            raise Refused("LJ007")
        lapsed = [
            live
            for live in self.rows("live_job")
            if live.lease_owner is not None
            and self.is_past(live.lease_expires_at)
            and live.attempt >= live.max_attempts
            and not self.is_held("live_job", live.job_id)
        ]
        for live in lapsed:
            self.reclaim(live)
        if lapsed:
            self.record("retire_expired", {"limit": limit}, len(lapsed))
        return [(len(lapsed),)]

    def record(self, act, arguments, job_count=0):
        number = next(self.model.numbers)
        self.layer["operator_act", number] = OperatorAct(
            self.now(), self.role, act, arguments, job_count
        )


def is_delay(delay):
    """Whether a release may be delayed by so many seconds."""
    return delay is not None and 0 <= delay <= 86400


def is_sound(code, retryable, after):
    """Whether a failure is well-formed."""
    is_named = bool(code and NAME.fullmatch(code))
    return is_named and retryable is not None and (after is None or after >= 0)
