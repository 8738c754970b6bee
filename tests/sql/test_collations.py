import psycopg
import pytest

LEASES = """
select array_agg(job_id order by job_id) as ids,
    array_agg(lease_token order by job_id) as tokens
from claim('email', 10)
"""


@pytest.fixture(params=['"POSIX"', '"en-x-icu"', "blind"])
def collation(request, owner):
    """A collation that a caller's own column might have."""
    name = request.param
    if name == "blind":
        name = "public.blind"
        try:
            owner.execute(
                "create collation public.blind (provider = icu, locale = 'und-u-ks-level2',"
                " deterministic = false)"
            )
        except psycopg.Error:
            pytest.skip("this PostgreSQL was built without ICU")
    elif not owner.value(
        "select count(*) from pg_collation where collname = %s", name.strip('"')
    ):
        pytest.skip(f"this PostgreSQL has no {name}")
    return name


def test_names_mean_the_same_in_any_collation(collation, producer, worker, owner):
    def a(value):
        return f"'{value}'::text collate {collation}"

    made = f"enqueue({a('email')}, {a('send')}, '{{}}', {a('k')})"
    first = producer.rows(f"select * from {made}")[0]

    assert producer.rows(f"select * from {made}") == [(first[0], False)]
    with producer.refusing("LJ002"):
        producer.execute(f"select enqueue({a('email')}, {a('call')}, '{{}}', {a('k')})")
    with producer.refusing("LJ001"):
        producer.execute(f"select enqueue({a('Email')}, {a('send')}, '{{}}', {a('l')})")
    with producer.refusing("LJ001"):
        producer.execute(f"select enqueue({a('email')}, {a('é')}, '{{}}', {a('l')})")
    assert worker.value(f"select next_available_at({a('email')}) is not null")
    assert worker.value(f"select wait_key({a('email')}) = wait_key('email')")
    for verb in ("claim", "next_available_at", "wait_key"):
        with worker.refusing("LJ003"):
            worker.execute(f"select {verb}({a('Email')})")
    (job_id, token), *rest = worker.rows(
        f"select job_id, lease_token from claim({a('email')})"
    )
    assert (job_id, rest) == (first[0], [])
    assert worker.rows(f"select from claim({a('email')}, 5)") == []
    assert worker.value(f"select renew(%s, {a(token)}) is not null", job_id)
    fail = f"select status from fail(%s, {a(token)}, {a('smtp.down')}, false)"
    assert [worker.value(fail, job_id) for _ in range(2)] == ["failed"] * 2
    assert owner.value("select producer from job") == "accounts"


def test_batches_mean_the_same_in_any_collation(collation, enqueue, worker):
    for _ in range(3):
        enqueue()
    held = worker.row(LEASES)
    tokens = f"(%s::text[])::text[] collate {collation}"

    renewed = worker.rows(
        f"select outcome from renew_many(%s, {tokens})", held["ids"], held["tokens"]
    )
    completed = worker.rows(
        f"select outcome from complete_many(%s, {tokens})",
        held["ids"][:1] * 2,
        held["tokens"][:1] * 2,
    )
    failed = worker.rows(
        f"select outcome from fail_many(%s, {tokens}, {tokens}, array[true, false, true])",
        [*held["ids"][1:], held["ids"][0]],
        [*held["tokens"][1:], "nobody's"],
        ["a", "b", "c"],
    )

    assert renewed == [("renewed",)] * 3
    assert completed == [("completed",)] * 2
    assert failed == [("queued",), ("failed",), ("invalid_lease",)]


def test_columns_of_two_collations_in_one_call_are_not_compared(
    collation, producer, worker
):
    created = producer.value(
        "select e.created from (select 'email'::text collate ucs_basic as queue,"
        f" 'send'::text collate {collation} as kind, 'k'::text as key offset 0) as o"
        " cross join lateral enqueue(o.queue, o.kind, '{}', o.key) as e"
    )

    assert created is True
    assert len(worker.rows("select from claim('email')")) == 1
