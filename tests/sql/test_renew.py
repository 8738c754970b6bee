from datetime import timedelta

RENEW = "select renew(%s::uuid, %s)"
LEASE = timedelta(seconds=30)


def test_renew_extends_a_lease_by_its_length_from_now(worker, owner, enqueue, claim):
    enqueue()
    held = claim()
    owner.execute(
        "update live_job set lease_expires_at = clock_timestamp() + interval '5 s'"
    )
    before = owner.value("select clock_timestamp()")

    expires_at = worker.value(RENEW, *held)

    after = owner.value("select clock_timestamp()")
    assert before + LEASE <= expires_at <= after + LEASE
    assert owner.value("select lease_expires_at from live_job") == expires_at


def test_renew_changes_nothing_but_the_end(worker, owner, enqueue, claim):
    enqueue()
    held = claim()
    rest = "select (to_jsonb(l) - 'lease_expires_at')::text from live_job as l"
    before = owner.value(rest)

    worker.value(RENEW, *held)

    assert owner.value(rest) == before
    assert owner.value("select count(*) from attempt") == 0


def test_renew_never_shortens_a_lease(worker, owner, enqueue, claim):
    enqueue()
    held = claim()
    owner.execute(
        "update live_job set lease_expires_at = clock_timestamp() + interval '1 day'"
    )
    end = owner.value("select lease_expires_at from live_job")

    assert worker.value(RENEW, *held) == end
    assert owner.value("select lease_expires_at from live_job") == end


def test_renew_goes_on_as_often_as_asked(worker, enqueue, claim):
    enqueue()
    held = claim()

    ends = [worker.value(RENEW, *held) for _ in range(5)]

    assert ends == sorted(ends)
    assert len(set(ends)) == 5


def test_renew_counts_from_the_clock_not_the_transactions_start(
    worker, owner, enqueue, claim
):
    enqueue()
    held = claim()

    with worker.transaction():
        worker.execute("select 1")
        passed = owner.value("select clock_timestamp()")
        expires_at = worker.value(RENEW, *held)

    assert expires_at > passed + LEASE


def test_renew_gives_the_lease_that_the_policy_says(worker, owner, enqueue, claim):
    enqueue()
    held = claim()
    owner.execute("update instance set lease_seconds = 3600")

    expires_at = worker.value(RENEW, *held)

    left = expires_at - owner.value("select clock_timestamp()")
    assert timedelta(seconds=3590) < left <= timedelta(seconds=3600)


def test_renew_updates_the_row_in_its_page(connect, enqueue, claim):
    enqueue()
    worker = connect("email-worker")
    held = claim()

    with worker.transaction():
        worker.value(RENEW, *held)
        counts = worker.row(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_xact_user_tables"
            " where relname = 'live_job'"
        )

    assert counts == {"n_tup_upd": 1, "n_tup_hot_upd": 1}
