"""Which acts leave a row in the audit, and for how long it is kept."""

import pytest

NOTHING = [
    "purge('2020-01-01')",
    "enforce_retention()",
    "retire_expired()",
    "redrive_failed('email', '2020-01-01')",
]


@pytest.mark.parametrize("call", NOTHING)
def test_an_act_that_changed_nothing_leaves_no_row(operator, owner, enqueue, call):
    owner.execute("update instance set retention_seconds = 1")
    enqueue()

    for _ in range(3):
        assert operator.value(f"select {call}") == 0

    assert owner.rows("select act from operator_act where act <> 'configure'") == []


@pytest.fixture
def acts(owner):
    """Write acts of so many days ago, and read whose are left."""
    owner.execute("delete from operator_act")

    def write(*days):
        for number in days:
            owner.execute(
                "insert into operator_act (acted_at, operator, act, arguments, job_count)"
                " values (clock_timestamp() - make_interval(days => %s), 'o', 'purge',"
                " jsonb_build_object('days', %s::integer), 1)",
                (number, number),
            )

    def left():
        return [
            days
            for (days,) in owner.rows(
                "select (arguments ->> 'days')::integer from operator_act"
                " order by operator_act_id"
            )
        ]

    return write, left


@pytest.mark.parametrize(
    ("retention_days", "kept"),
    [(1, [399, 1]), (500, [499, 401, 399, 1]), (None, [501, 499, 401, 399, 1])],
)
def test_enforce_retention_deletes_acts_older_than_400_days_or_the_retention(
    operator, owner, acts, retention_days, kept
):
    write, left = acts
    write(501, 499, 401, 399, 1)
    owner.execute(
        "update instance set retention_seconds = %s",
        (retention_days and retention_days * 86400,),
    )

    assert operator.value("select enforce_retention()") == 0

    assert left() == kept


def test_enforce_retention_deletes_no_more_acts_than_its_limit(operator, owner, acts):
    write, left = acts
    write(503, 502, 501)
    owner.execute("update instance set retention_seconds = 1")

    operator.value("select enforce_retention(2)")
    assert left() == [501]
    operator.value("select enforce_retention(2)")
    assert left() == []
