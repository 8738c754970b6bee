"""What must be so after a storm: checks over journals and tables.

Each check is a function of the evidence and returns findings, sentences about what is
wrong. Times are the server's. Of a lease the journals and tables hold the SHA-256 of its
token, which names it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise

SLACK = timedelta(seconds=0.5)
"""How long after a lease was judged its end may be recorded."""


@dataclass(frozen=True)
class Evidence:
    """The journals' lines and the tables' rows, as dictionaries.

    ``jobs`` and ``attempts`` hold what was purged, too; ``leases`` has a row for each
    time that a lease was given or prolonged.
    """

    journal: list = field(default_factory=list)
    jobs: list = field(default_factory=list)
    live: list = field(default_factory=list)
    attempts: list = field(default_factory=list)
    leases: list = field(default_factory=list)
    effects: list = field(default_factory=list)
    acts: list = field(default_factory=list)

    def noted(self, *whats):
        return [entry for entry in self.journal if entry["what"] in whats]

    def acknowledged(self):
        return [item for entry in self.noted("acknowledged") for item in entry["items"]]

    def acted(self, name):
        return [act for act in self.acts if act["act"] == name]

    def redriven(self):
        """How many attempts redrives have granted, by job."""
        granted = Counter()
        for act in self.acted("redrive"):
            granted[act["job_id"]] += act["extra_attempts"]
        return granted

    def released(self):
        """How many attempts releases have granted, by job."""
        return Counter(
            row["job_id"] for row in self.attempts if row["outcome"] == "released"
        )

    def attempts_by_job(self):
        """The attempts of each job, in their order."""
        found = defaultdict(list)
        for row in sorted(self.attempts, key=lambda row: row["attempt"]):
            found[row["job_id"]].append(row)
        return found

    def leases_by_job(self):
        """The leases of each job in the order they were given, with their last end."""
        last = {}
        for row in self.leases:
            known = last.get(row["lease"], row)
            end = max(known["lease_expires_at"], row["lease_expires_at"])
            last[row["lease"]] = {**known, "lease_expires_at": end}
        found = defaultdict(list)
        for row in sorted(last.values(), key=lambda row: row["leased_at"]):
            found[row["job_id"]].append(row)
        return found

    def ends_of_leases(self):
        """When each lease ended by itself, at the latest."""
        return {
            row["lease"]: row["lease_expires_at"]
            for rows in self.leases_by_job().values()
            for row in rows
        }


def no_acknowledged_job_is_lost(evidence):
    known = {row["job_id"] for row in evidence.jobs}
    for item in evidence.acknowledged():
        if item["job_id"] and item["job_id"] not in known:
            yield f"job {item['job_id']} was acknowledged and is gone"


def every_key_is_one_job(evidence):
    rows = {row["job_id"]: row for row in evidence.jobs}
    ids = defaultdict(set)
    for item in evidence.acknowledged():
        if item["outcome"] not in {"created", "existing"}:
            yield f"key {item['key']} was answered {item['outcome']}"
        ids[item["key"]].add(item["job_id"])
        row = rows.get(item["job_id"])
        if row and row["idempotency_key"] != item["key"]:
            yield f"key {item['key']} was answered another key's job"
    for row in evidence.jobs:
        ids[row["idempotency_key"]].add(row["job_id"])
    for key, found in ids.items():
        # A key is free again once its job was purged.
        kept = [job for job in found if job in rows and not rows[job]["is_purged"]]
        if len(kept) > 1:
            yield f"key {key} is {len(kept)} jobs"


def every_job_was_asked_for(evidence):
    asked = {key for entry in evidence.noted("intends") for key in entry["keys"]}
    for row in evidence.jobs:
        if row["idempotency_key"] not in asked:
            yield f"nobody enqueued job {row['job_id']}"


def every_purge_is_in_the_audit(evidence):
    purges = evidence.acted("purge")
    purged = [row["job_id"] for row in evidence.jobs if row["is_purged"]]
    counted = sum(act["job_count"] for act in purges)
    if counted != len(purged):
        yield f"{len(purged)} jobs were purged, and the audit says {counted}"
    answered = [e["answer"] for e in evidence.noted("acted") if e["act"] == "purge"]
    if sum(answered) > counted:
        yield f"purge answered {sum(answered)}, and the audit says {counted}"
    attempts = evidence.attempts_by_job()
    for job in purged:
        ended_at = attempts[job][-1]["ended_at"] if attempts[job] else None
        if not any(ended_at and ended_at < act["before"] for act in purges):
            yield f"job {job} was purged and had not ended by then"


def no_job_is_completed_twice(evidence):
    done = defaultdict(set)
    for entry in evidence.noted("answered"):
        if entry["answer"] == "completed":
            done[entry["job_id"]].add(entry["lease"])
    for row in evidence.attempts:
        if row["outcome"] == "succeeded":
            done[row["job_id"]].add(row["lease"])
    for job, leases in done.items():
        if len(leases) > 1:
            yield f"job {job} was completed by {len(leases)} leases"


def no_dead_lease_ends_anything(evidence):
    ends = evidence.ends_of_leases()
    for row in evidence.attempts:
        name = f"attempt {row['attempt']} of job {row['job_id']}"
        if row["lease"] not in ends:
            yield f"{name} was ended under a lease that was never given"
        elif row["outcome"] == "lease_expired":
            if row["ended_at"] < ends[row["lease"]]:
                yield f"{name} was taken for lapsed while its lease was live"
        elif row["ended_at"] > ends[row["lease"]] + SLACK:
            late = row["ended_at"] - ends[row["lease"]]
            yield f"{name} {row['outcome']} {late} after its lease had ended"


def no_two_leases_of_a_job_are_live_at_once(evidence):
    reported = {
        row["lease"]: row["ended_at"]
        for row in evidence.attempts
        if row["outcome"] != "lease_expired"
    }
    for job, leases in evidence.leases_by_job().items():
        for first, second in pairwise(leases):
            end = min(
                first["lease_expires_at"],
                reported.get(first["lease"], first["lease_expires_at"]),
            )
            if second["leased_at"] < end:
                yield f"job {job} had two live leases for {end - second['leased_at']}"
    for job, attempts in evidence.attempts_by_job().items():
        for first, second in pairwise(attempts):
            if second["leased_at"] < first["ended_at"]:
                yield f"attempts {second['attempt']} and before of job {job} overlap"


def fencing_tokens_grow(evidence):
    for job, leases in evidence.leases_by_job().items():
        for first, second in pairwise(leases):
            if second["attempt"] <= first["attempt"]:
                yield (
                    f"job {job} was given token {second['attempt']} "
                    f"after {first['attempt']}"
                )
    told = defaultdict(set)
    for entry in evidence.noted("claimed"):
        told[entry["job_id"], entry["attempt"]].add(entry["lease"])
    for (job, attempt), leases in told.items():
        if len(leases) > 1:
            yield f"token {attempt} of job {job} was told {len(leases)} workers"


def attempts_stay_within_their_limit(evidence):
    asked = {row["job_id"]: row["max_attempts"] for row in evidence.jobs}
    granted = evidence.redriven() + evidence.released()
    for row in [*evidence.attempts, *evidence.live]:
        job = row["job_id"]
        if row["attempt"] > row["max_attempts"]:
            yield f"job {job} is at attempt {row['attempt']} of {row['max_attempts']}"
        if job in asked and row["max_attempts"] > asked[job] + granted[job]:
            yield f"job {job} has {row['max_attempts']} attempts, more than granted"
    for job, leases in evidence.leases_by_job().items():
        if job in asked and len(leases) > asked[job] + granted[job]:
            yield f"job {job} was claimed {len(leases)} times, more than granted"


def every_end_has_its_evidence(evidence):
    attempts, live = evidence.attempts_by_job(), set()
    for row in evidence.live:
        live.add(row["job_id"])
        ended = row["attempt"] - (row["lease"] is not None)
        if [each["attempt"] for each in attempts[row["job_id"]]] != [
            *range(1, ended + 1)
        ]:
            yield f"job {row['job_id']} has not the evidence of {ended} attempts"
    for job in {row["job_id"] for row in evidence.jobs} - live:
        numbers = [row["attempt"] for row in attempts[job]]
        if not numbers:
            yield f"job {job} has ended without evidence"
        elif numbers != [*range(1, numbers[-1] + 1)]:
            yield f"job {job} has evidence of attempts {numbers} only"
        elif not is_terminal(attempts[job][-1]):
            yield f"job {job} has ended, and its last attempt was not the last"


def no_ended_job_is_alive(evidence):
    attempts, redriven = evidence.attempts_by_job(), evidence.redriven()
    for row in evidence.live:
        job = row["job_id"]
        ends = [each for each in attempts[job] if is_terminal(each)]
        if any(each["outcome"] == "succeeded" for each in ends):
            yield f"job {job} has succeeded and is alive"
        elif ends and not redriven[job]:
            yield f"job {job} has failed and is alive"
    known = {row["job_id"] for row in evidence.jobs if not row["is_purged"]}
    for row in evidence.live:
        if row["job_id"] not in known:
            yield f"job {row['job_id']} is alive, and nobody knows what it is"


def answers_are_what_the_tables_say(evidence):
    rows = {row["lease"]: row for row in evidence.attempts}
    purged = {row["job_id"] for row in evidence.jobs if row["is_purged"]}
    for entry in evidence.noted("answered"):
        # Where the evidence is gone, nothing is known of a lease that ended well.
        if entry["answer"] == "invalid_lease" and entry["job_id"] in purged:
            continue
        row = rows.get(entry["lease"], {"outcome": None, "failure_code": None})
        wanted = _WANTED.get((entry["call"], entry["answer"]))
        is_right = wanted is not None and row["outcome"] in wanted
        if entry["call"] == "fail" and entry["answer"] in {"queued", "failed"}:
            is_right &= row["failure_code"] == entry["code"]
            if is_right and entry.get("available_at"):
                is_right = _time(entry["available_at"]) == row["retry_at"]
        if not is_right:
            yield (
                f"{entry['call']} of job {entry['job_id']} was answered "
                f"{entry['answer']}, and the table says {row['outcome']}"
            )


_OTHER = (None, "lease_expired")
_WANTED = {
    ("complete", "completed"): ("succeeded",),
    ("complete", "invalid_lease"): _OTHER,
    ("fail", "queued"): ("retried",),
    ("fail", "failed"): ("failed",),
    ("fail", "handed_back"): ("retried", "failed"),
    ("fail", "invalid_lease"): _OTHER,
    ("release", "released"): ("released",),
    # What a worker that has lost its lease, or the answer, cannot know.
    ("end", "lost"): (*_OTHER, "succeeded", "retried", "failed", "released"),
}


def leases_are_what_workers_were_told(evidence):
    given = {row["lease"]: row for row in evidence.leases}
    ends = evidence.ends_of_leases()
    for entry in evidence.noted("claimed", "renewed"):
        row = given.get(entry["lease"])
        name = f"a lease on job {entry['job_id']}"
        if row is None:
            yield f"{name} was told and never given"
        elif (row["job_id"], row["attempt"]) != (entry["job_id"], entry["attempt"]):
            yield f"{name} was told as that of another job or attempt"
        elif _time(entry["until"]) > ends[entry["lease"]]:
            yield f"{name} was told to end later than it does"


def effects_are_those_of_completions(evidence):
    """Of the jobs that are completed in the transaction of their effect."""
    done = Counter(
        (row["job_id"], row["lease"])
        for row in evidence.attempts
        if row["outcome"] == "succeeded"
    )
    effects = Counter((row["job_id"], row["lease"]) for row in evidence.effects)
    for (job, lease), count in effects.items():
        if count != done[job, lease]:
            yield f"job {job} had {count} effects of a lease that did not complete it"
    having = {job for job, _ in effects}
    wanting = {row["job_id"] for row in evidence.jobs if row["fate"] == "effect"}
    for job in {job for job, _ in done} & wanting - having:
        yield f"job {job} was completed without its effect"


def every_job_has_ended(evidence):
    if evidence.live:
        yield f"{len(evidence.live)} jobs have not ended"


def every_process_ends_when_told(evidence):
    for entry in evidence.noted("exited"):
        # -15: before it could listen to that.
        if entry["code"] not in {0, 3, -15} and not entry["is_killed"]:
            yield f"{entry['name']} exited with {entry['code']}: {entry['said'][-300:]}"


def is_terminal(attempt):
    return (
        attempt["outcome"] in {"succeeded", "failed"}
        or attempt["failure_code"] == "attempts_exhausted"
    )


def _time(text):
    return datetime.fromisoformat(text)


CHECKS = (
    no_acknowledged_job_is_lost,
    every_key_is_one_job,
    every_job_was_asked_for,
    every_purge_is_in_the_audit,
    no_job_is_completed_twice,
    no_dead_lease_ends_anything,
    no_two_leases_of_a_job_are_live_at_once,
    fencing_tokens_grow,
    attempts_stay_within_their_limit,
    every_end_has_its_evidence,
    no_ended_job_is_alive,
    answers_are_what_the_tables_say,
    leases_are_what_workers_were_told,
    effects_are_those_of_completions,
    every_job_has_ended,
    every_process_ends_when_told,
)


def findings(evidence):
    """What each check that found something found."""
    found = {check.__name__: [*check(evidence)] for check in CHECKS}
    return {name: sentences for name, sentences in found.items() if sentences}
