"""The fault: LIMIT is not respected.

Exactly as many jobs as asked, under every plan.
"""

import pytest

JOBS = 1000
PLANNER = (
    "enable_bitmapscan",
    "enable_hashagg",
    "enable_hashjoin",
    "enable_indexonlyscan",
    "enable_indexscan",
    "enable_material",
    "enable_memoize",
    "enable_mergejoin",
    "enable_nestloop",
    "enable_seqscan",
    "enable_sort",
    "enable_tidscan",
    "enable_incremental_sort",
)
LIMITS = (1, 5, 1)


@pytest.fixture(params=["none", "from an empty table"])
def statistics(request, owner):
    """What the planner knows of a thousand due jobs."""
    for table in ("job", "live_job", "attempt"):
        owner.execute(f"alter table {table} set (autovacuum_enabled = off)")
    if request.param != "none":
        owner.execute("vacuum analyze")


@pytest.fixture
def leased(statistics, owner, producer):
    """How many of a thousand due jobs are leased."""
    producer.execute(
        "select count(*) from generate_series(1, %s) as n,"
        " lateral enqueue('email', 'send', '{}', 'k' || n)",
        (JOBS,),
    )

    def leased():
        return owner.value("select count(lease_owner) from live_job")

    return leased


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
def test_exactly_the_limit_is_leased_under_any_planner_setting(leased, connect, mode):
    taken = 0

    for off in (*((name,) for name in PLANNER), PLANNER):
        session = connect("email-worker")
        for name in off:
            session.execute(f"set {name} to off")
        session.execute(f"set plan_cache_mode to {mode}")
        for limit in LIMITS:
            rows = session.rows("select * from claim('email', %s)", limit)
            assert len(rows) == limit, off
            taken += limit
        session.close()
        assert leased() == taken, off


@pytest.mark.slow
def test_exactly_the_limit_is_leased_by_every_client(leased, client):
    off = " ".join(f"-c {name}=off" for name in PLANNER)
    taken = 0

    for options in ("", off):
        worker = client("email-worker", options=options)
        for limit in LIMITS:
            assert len(worker.claim("email", limit)) == limit
            taken += limit
            assert leased() == taken
