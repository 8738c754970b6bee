"""Flat where the field degrades, at a size that takes minutes: pytest -m benchmark."""

import itertools
import json

import pytest

import measures
import report
from stage import serving, stage

pytestmark = [pytest.mark.benchmark, pytest.mark.xdist_group("benchmark")]


@pytest.mark.parametrize("name", ["growth", "running", "kept", "held", "purging"])
def test_it_stays_flat(name):
    with serving() as server, stage(server) as it:
        figures = measures.MEASURES[name](it, 3, 0.4)[name]

    row = report.summary(name, figures)
    assert report.reached(name, row), (row["ratio"], row["figures"])


SWITCHES = ("indexscan", "indexonlyscan", "tidscan", "nestloop", "material", "sort")
BATCH = 20


def spend(session, schema, name):
    """Buffers that each verb touches, for one job, in one Instance: the least of some."""
    spent = {}

    def touch(verb, arguments, *parameters, jobs=1, label=None):
        (plan,) = session.execute(
            "explain (analyze, buffers, format json)"
            f" select {schema}.{verb}({arguments})",
            parameters,
        ).fetchone()[0]
        plan = plan["Plan"]
        touched = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        label = label or (verb if jobs == 1 else f"{verb} of many")
        spent[label] = min(touched / jobs, spent.get(label, touched))

    def lease(count):
        rows = session.execute(
            f"select job_id, lease_token from {schema}.claim('email', %s::integer)",
            (count,),
        ).fetchall()
        return [row[0] for row in rows], [row[1] for row in rows]

    key = ("'email', 'send', '{}', %s", f"{name}-0")
    items = json.dumps(
        [
            {
                "queue": "email",
                "kind": "send",
                "payload": {},
                "idempotency_key": f"{name}-{n}",
            }
            for n in range(1, 10 * BATCH)
        ]
    )
    touch("enqueue", *key)
    touch("enqueue", *key, label="enqueue again")
    touch("enqueue_many", "%s", items, jobs=10 * BATCH)
    touch("enqueue_many", "%s", items, jobs=10 * BATCH, label="enqueue_many again")
    for _ in range(4):
        touch("claim", "'email'")
    touch("claim", "'email', %s::integer", BATCH, jobs=BATCH)
    touch("next_available_at", "'email'")
    for verb, more, many in (
        ("renew", "", ""),
        ("complete", "", ""),
        ("fail", ", 'c', false", ", %s, %s"),
    ):
        (job_id,), (token,) = lease(1)
        touch(verb, f"%s, %s{more}", job_id, token)
        job_ids, tokens = lease(BATCH)
        arguments = [job_ids, tokens, ["c"] * BATCH, [True] * BATCH]
        touch(
            f"{verb}_many",
            f"%s, %s{many}",
            *arguments[: 4 if many else 2],
            jobs=BATCH,
        )
        touch("inspect", "%s", job_id)
    return spent


@pytest.mark.parametrize("plans", ["made before", "made after", "switches off"])
def test_no_verb_reads_more_for_millions_of_jobs_that_are_kept(plans):
    with serving() as server, stage(server) as it:
        it.fill("jobs_bench", running=50, ended=100)
        with it.worker() as first, it.worker() as second:
            if plans == "switches off":
                for session, switch in itertools.product((first, second), SWITCHES):
                    session.execute(f"set enable_{switch} to off")
            for n in range(2):
                few = spend(first, "jobs_bench", f"few-{n}")
            it.fill("jobs_bench", running=5000, scheduled=1_000_000, ended=2_000_000)
            session = first if plans == "made before" else second
            for n in range(2):
                many = spend(session, "jobs_bench", f"many-{n}")

    many.pop("next_available_at")  # it reads every running job, and says so
    assert {
        verb: (few[verb], each)
        for verb, each in many.items()
        if each > 2 * few[verb] + 20
    } == {}
