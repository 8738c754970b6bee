"""`check`, inspect_health and explain_job: one judgement, in the same words."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from damages import BY_HAND, SEEN, UNSEEN
from lenso_jobs.operator import setup
from lenso_jobs.operator._plan import found

# What inspect_health and check both look for. Of objects, inspect_health says that they
# differ and refers to check.
COMMON = {
    "index_unusable",
    "grant_missing",
    "grant_stray",
    "role_missing",
    "role_unsafe",
    "membership_missing",
    "membership_stray",
    "setting_harmful",
    "not_configured",
    "queue_undeclared",
    "sequence_behind",
    "migration_unfinished",
}
# check knows here whether a document or a session is there, and says what to do exactly.
REFINED = {"queue_undeclared", "migration_unfinished"}
REFER = "lenso-jobs check"
WITH_OBJECT = " is missing with its object"
# A sequence is not rolled back.
LASTING = [each for each in SEEN if "setval" in each]
EVERY = [each for each in SEEN + UNSEEN + BY_HAND if each not in LASTING]
# One for each finding that more than one of them reports, and one for each way to refer.
FEW = [
    "drop function complete(uuid, text)",
    "drop function _catalogue_objects(text)",
    "alter function purge(timestamptz, integer) rename to purged",
    "revoke execute on function claim(text, integer) from {p}_worker",
    "alter index live_job_claimable_idx rename to claimable",
    "drop table caller",
    "set session_replication_role = replica; delete from instance",
    "alter role {p}_owner rename to {p}_owners",
    "reassign owned by {p}_owner to postgres",
    "alter role {worker} rename to {worker}_now",
    "revoke {p}_worker from {worker}",
    "grant {p}_owner to {worker}",
    "grant {p}_owner to stranger",
    "drop sequence claim_floor_1_at",
    BY_HAND[0],
    "delete from queue",
    "insert into yoyo_lock (locked, ctime, pid) values (1, localtimestamp, 7)",
]


class Judged:
    """What each of the three says while something is broken."""

    def __init__(self, session, configuration, job):
        def asked(question, *values):
            try:
                with session.transaction(force_rollback=True):
                    return session.execute(question, values or None).fetchall()
            except psycopg.errors.UndefinedFunction:
                return []

        with session.transaction(force_rollback=True):
            session.execute("set local search_path = pg_catalog, pg_temp")
            self.check = [
                (each.finding, each.what, each.remedy)
                for each in found(session, configuration)
            ]
        self.health = asked(
            "select finding, concat_ws(' ', subject, detail), remedy"
            " from jobs_email.inspect_health()"
        )
        self.explain = asked(
            "select reason, detail, remedy from jobs_email.explain_job(%s)", job
        )

    def disagreements(self):
        """Name what is said by one and denied or worded otherwise by another."""
        return [*self.of_health(), *self.of_check(), *self.of_explain()]

    def of_health(self):
        """Name what inspect_health says, and check does not."""
        for finding, sentence, remedy in self.health:
            if sentence.endswith(WITH_OBJECT):
                thing = sentence.partition(" on ")[2].partition(" to ")[0]
                is_said = any(
                    f" {thing} is missing" in what for _, what, _ in self.check
                )
            elif finding in COMMON:
                is_said = any(
                    begins(what, sentence)
                    and (mend == remedy or what != sentence or finding in REFINED)
                    for _, what, mend in self.check
                )
            else:
                is_said = remedy != REFER or any(
                    code in ("object_changed", "role_missing")
                    for code, *_ in self.check
                )
            if not is_said:
                yield f"check does not say: {sentence}: {remedy}"

    def of_check(self):
        """Name what check says, and inspect_health does not, where that can read on."""
        said = [sentence for _, sentence, _ in self.health]
        ends = any(
            finding == "object_changed" and not sentence.startswith("objects differ ")
            for finding, sentence, _ in self.health
        )
        for finding, what, _ in self.check:
            is_said = any(begins(what, sentence) for sentence in said)
            if finding in COMMON and not ends and not is_said:
                yield f"inspect_health does not say: {what}"

    def of_explain(self):
        """Name what explain_job says is wrong, and inspect_health does not."""
        said = {sentence: remedy for _, sentence, remedy in self.health}
        for reason, detail, remedy in self.explain:
            lines = detail.splitlines() if reason == "instance_damaged" else []
            for line in lines:
                if said.get(line) != remedy:
                    yield f"inspect_health does not say: {line}: {remedy}"
            if reason == "queue_not_declared" and "queue_undeclared" not in {
                finding for finding, *_ in self.health
            }:
                yield "inspect_health does not say that the queue is not declared"


def begins(what, sentence):
    """Tell whether check says this; it may add what an object was renamed to."""
    return what == sentence or what.startswith(f"{sentence}; ")


@pytest.fixture
def disagreements(new_instance, role):
    """Break an Instance, ask all three, and roll that back; return what they disagree on."""
    callers = {kind: role("nologin") for kind in ("producer", "worker", "observer")}
    configuration, conninfo = new_instance(
        **{f"{kind}_instances": [name] for kind, name in callers.items()}
    )
    setup(configuration, conninfo)
    dbname = conninfo_to_dict(conninfo)["dbname"]
    names = {"p": configuration.prefix, "db": dbname, **callers}
    with psycopg.connect(
        conninfo, autocommit=True, options="-c search_path=jobs_email"
    ) as session:
        session.execute(f"set role {callers['producer']}")
        ((job,),) = session.execute(
            "select job_id from enqueue('email', 'send', '{}', 'one')"
        )
        session.execute("reset role")

        def disagreements(statement):
            with session.transaction(force_rollback=True):
                try:
                    with session.transaction():
                        session.execute(statement.format(**names))
                except (psycopg.errors.SyntaxError, psycopg.errors.UndefinedFunction):
                    return []
                session.execute(
                    "reset role; set local session_replication_role = origin"
                )
                session.execute("select pg_backend_pid()")
                judged = Judged(session, configuration, job)
                return [f"{statement}: {each}" for each in judged.disagreements()]

        yield disagreements


@pytest.mark.slow
def test_check_health_and_explain_say_the_same_of_each_kind_of_damage(disagreements):
    assert set(FEW) <= set(EVERY)
    assert [each for damage in FEW for each in disagreements(damage)] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_check_health_and_explain_say_the_same_of_every_damage(part, disagreements):
    assert [each for damage in EVERY[part::8] for each in disagreements(damage)] == []


@pytest.mark.slow
@pytest.mark.parametrize("damage", LASTING)
def test_check_health_and_explain_say_the_same_of_a_lasting_damage(
    damage, disagreements
):
    assert disagreements(damage) == []
