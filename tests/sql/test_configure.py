import json

import pytest

CONFIGURE = "select configure(%s::jsonb)"
POLICY = (
    "select lease_seconds, retry_base_seconds, retry_max_seconds, retry_jitter, notify,"
    " retention_seconds from instance"
)


@pytest.fixture
def configure(owner, prefix):
    """Call configure with the document in force, with changes."""
    in_force = {
        "schema": "jobs_email",
        "role_prefix": prefix,
        "database_url_secret": "jobs/database-url",
        "lease_seconds": 30,
        "retry_base_seconds": 5,
        "retry_max_seconds": 300,
        "queues": ["email", "slow"],
        "producer_instances": ["accounts", "organization"],
        "worker_instances": ["email-worker", "spare-worker"],
        "observer_instances": ["operations"],
    }

    def configure(**changes):
        document = {k: v for k, v in (in_force | changes).items() if v is not ...}
        return owner.value(CONFIGURE, json.dumps(document))

    return configure


@pytest.fixture
def stored(owner):
    """All that the configuration is, to compare before and after."""

    def stored():
        return {
            "policy": owner.rows(POLICY),
            "queues": owner.rows("select queue from queue order by 1"),
            "callers": owner.rows("select c::text from caller as c order by 1"),
            "acts": owner.rows("select count(*) from operator_act"),
        }

    return stored


def test_configure_with_the_document_in_force_changes_nothing(configure, stored):
    before = stored()

    assert configure() is False

    assert stored() == before


def test_configure_stores_the_policy(configure, owner):
    changed = configure(
        lease_seconds=45,
        retry_base_seconds=2,
        retry_max_seconds=99,
        retry_jitter=0.25,
        notify=False,
        retention_seconds=86400,
    )

    assert changed is True
    assert owner.rows(POLICY) == [(45, 2, 99, 0.25, False, 86400)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease_seconds", 31),
        ("retry_base_seconds", 6),
        ("retry_max_seconds", 301),
        ("retry_jitter", 0.5),
        ("notify", False),
        ("retention_seconds", 1),
    ],
)
def test_configure_stores_each_part_of_the_policy_alone(configure, owner, field, value):
    assert configure(**{field: value}) is True
    assert owner.value(f"select {field} from instance") == value
    assert configure() is True


def test_configure_stores_each_kind_of_a_caller_alone(configure, owner):
    kinds = "select is_producer, is_worker, is_observer from caller where caller = %s"

    assert configure(producer_instances=["accounts", "organization", "operations"])
    assert owner.rows(kinds, "operations") == [(True, False, True)]
    assert configure()
    assert configure(worker_instances=["email-worker", "spare-worker", "operations"])
    assert owner.rows(kinds, "operations") == [(False, True, True)]
    assert configure()
    assert configure(observer_instances=["operations", "accounts"])
    assert owner.rows(kinds, "accounts") == [(True, False, True)]


def test_configure_falls_back_to_the_defaults_of_what_is_left_out(configure, owner):
    configure(retry_jitter=0.25, notify=False, retention_seconds=86400)

    configure()

    assert owner.rows(POLICY) == [(30, 5, 300, 0, True, None)]


def test_configure_accepts_null_where_the_document_may_have_none(configure, owner):
    configure(retention_seconds=86400)

    assert configure(retention_seconds=None)

    assert owner.value("select retention_seconds from instance") is None


def test_configure_takes_effect_at_the_next_call(
    configure, owner, worker, enqueue, claim
):
    enqueue()
    held = claim()
    enqueue()

    configure(lease_seconds=3600, retry_base_seconds=77)

    worker.execute("select fail(%s, %s, 'timeout', true)", held)
    claim()
    assert (
        owner.value(
            "select extract(epoch from retry_at - ended_at)::integer from attempt"
        )
        == 77
    )
    assert (
        owner.value(
            "select extract(epoch from lease_expires_at -"
            " leased_at)::integer from live_job"
            " where lease_owner is not null"
        )
        == 3600
    )


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("lease_seconds", [0, -1, 3601, None, ...]),
        ("retry_base_seconds", [0, -1, 86401, 301, None, ...]),
        ("retry_max_seconds", [0, -1, 86401, 4, None, ...]),
        ("retry_jitter", [-0.01, 1.01]),
        ("retention_seconds", [0, -1]),
        ("queues", [[], None, ..., [""], ["a b"], ["q" * 129], [None]]),
        (
            "producer_instances",
            [[], None, ..., [""], ["none"], ["public"], ["pg_read"]],
        ),
        ("worker_instances", [[], None, ..., ["w" * 64], ["PUBLIC"], [None]]),
        ("observer_instances", [["pg_monitor"]]),
        ("schema", ["jobs_other", None, ...]),
        ("priority", [1]),
        ("lease_secs", [30]),
    ],
)
def test_configure_refuses_a_value_out_of_bounds_and_changes_nothing(
    configure, stored, owner, field, values
):
    before = stored()

    for value in values:
        with pytest.raises(owner.Error) as caught:
            configure(**{field: value})
        assert caught.value.sqlstate in ("LJ007", "23502", "23514"), value

    assert stored() == before


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("lease_seconds", [2.5, 3600.4, 0.6, "30", True]),
        ("retry_max_seconds", [299.5]),
        ("retry_jitter", ["0.5"]),
        ("notify", ["true", 1]),
        ("retention_seconds", [1.5]),
        ("queues", [["email", "slow", "email"], "email", ["email", "slow", 1]]),
        ("producer_instances", [["accounts", "organization", "accounts"]]),
        ("worker_instances", [["email-worker", "email-worker"]]),
    ],
)
def test_configure_refuses_values_that_no_document_may_hold(
    configure, stored, owner, field, values
):
    before = stored()

    taken = []
    for value in values:
        with owner.transaction(force_rollback=True):
            try:
                configure(**{field: value})
            except owner.Error as error:
                if error.sqlstate == "LJ007":
                    continue
            taken.append(value)

    assert taken == []
    assert stored() == before


def test_configure_accepts_a_value_at_its_bound(configure):
    for changes in (
        {"lease_seconds": 1},
        {"lease_seconds": 3600},
        {"retry_base_seconds": 1, "retry_max_seconds": 1},
        {"retry_base_seconds": 86400, "retry_max_seconds": 86400},
        {"retry_jitter": 1},
        {"retry_jitter": 0.5},
        {"retention_seconds": 1},
        {"queues": ["email", "slow", "q" * 128, "AZaz09._:/-"]},
        {"observer_instances": ...},
        {"role_prefix": ...},
    ):
        assert configure(**changes) is True, changes


@pytest.mark.parametrize("document", [None, "null", "[]", '"x"', "1", "{}"])
def test_configure_refuses_a_value_that_is_not_a_document(owner, stored, document):
    before = stored()

    with owner.refusing("LJ007"):
        owner.value(CONFIGURE, document)

    assert stored() == before


def test_configure_names_the_unknown_field(configure, owner):
    with owner.refusing("LJ007") as caught:
        configure(priority=1)

    assert "priority" in caught.value.diag.message_primary


def test_configure_declares_a_queue_and_a_caller(configure, owner, producer, worker):
    configure(queues=["email", "slow", "new"], worker_instances=["email-worker"])

    producer.execute("select enqueue('new', 'send', '{}', 'k')")
    assert len(worker.rows("select * from claim('new')")) == 1
    assert owner.rows("select caller from caller where is_worker") == [
        ("email-worker",)
    ]


def test_configure_undeclares_a_caller(configure, worker, rival, producer, enqueue):
    enqueue()

    configure(worker_instances=["spare-worker"], producer_instances=["organization"])

    with worker.refusing("42501"):
        worker.execute("select claim('email')")
    with producer.refusing("42501"):
        producer.execute("select enqueue('email', 'send', '{}', 'k')")
    assert len(rival.rows("select * from claim('email')")) == 1


def test_configure_lets_a_caller_be_several_things(configure, owner):
    configure(producer_instances=["accounts", "email-worker"])

    assert owner.row("select * from caller where caller = 'email-worker'") == {
        "caller": "email-worker",
        "is_producer": True,
        "is_worker": True,
        "is_observer": False,
    }


def test_configure_undeclares_a_queue_without_live_jobs(
    configure, producer, worker, enqueue, claim
):
    enqueue(queue="slow")
    worker.execute("select complete(%s, %s)", claim("slow"))
    enqueue()

    assert configure(queues=["email"]) is True
    claim()

    with worker.refusing("LJ003"):
        worker.execute("select claim('slow')")
    with producer.refusing("LJ001"):
        producer.execute("select enqueue('slow', 'send', '{}', 'k')")


def test_a_refusal_names_each_queue_with_live_jobs_and_how_many(
    configure, owner, enqueue, claim
):
    configure(queues=["email", "slow", "empty", "other"])
    for queue in ("slow", "slow", "other"):
        enqueue(queue=queue)
    claim("slow")

    with owner.refusing("LJ007") as caught:
        configure(queues=["email"])

    assert caught.value.diag.message_primary == (
        "queues that the document leaves out still have live jobs: other (1), slow (2)"
    )


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_configure_is_refused_in_a_snapshot_that_may_be_old(configure, owner, level):
    with owner.refusing("LJ007") as caught:
        owner.execute(f"begin isolation level {level}")
        configure(lease_seconds=40)
    owner.execute("rollback")

    assert caught.value.diag.message_primary == (
        "configure needs a transaction at READ COMMITTED"
    )


def test_read_uncommitted_is_the_same_as_read_committed(configure, owner):
    owner.execute("set default_transaction_isolation = 'read uncommitted'")

    assert configure(lease_seconds=40) is True


@pytest.mark.slow
def test_a_refusal_counts_no_more_than_10000_jobs(configure, owner):
    insert = (
        "insert into live_job (job_id, available_at, attempt, max_attempts, queue)"
        " select gen_random_uuid(), '2040-01-01', 0, 3, 'slow'"
        " from generate_series(1, %s)"
    )
    for more, words in ((10000, "slow (10000)"), (1, "slow (more than 10000)")):
        owner.execute(insert, (more,))
        with owner.refusing("LJ007") as caught:
            configure(queues=["email"])
        assert caught.value.diag.message_primary.endswith(f": {words}")


def test_configure_drops_a_queue_with_live_jobs_on_request_and_they_wait(
    configure, owner, document, enqueue, claim, worker, producer
):
    enqueue(queue="slow")
    running, token = claim("slow")
    waiting = enqueue(queue="slow")
    fewer = document(queues=["email"])

    assert owner.value("select configure(%s::jsonb, true)", fewer) is True
    assert owner.value("select configure(%s::jsonb, true)", fewer) is False

    with worker.refusing("LJ003"):
        worker.execute("select claim('slow')")
    with producer.refusing("LJ001"):
        producer.execute("select enqueue('slow', 'send', '{}', 'k')")
    assert worker.value("select complete(%s, %s)", running, token)
    assert configure(queues=["email"], lease_seconds=31) is True
    configure()
    assert claim("slow")[0] == waiting


def test_configure_refuses_to_drop_queues_without_the_option(owner, document, stored):
    before = stored()

    with owner.refusing("LJ007"):
        owner.execute("select configure(%s::jsonb, null)", (document(),))

    assert stored() == before


@pytest.mark.parametrize("running", [True, False])
def test_configure_refuses_to_undeclare_a_queue_with_live_jobs(
    configure, owner, enqueue, claim, running
):
    enqueue(queue="slow")
    if running:
        claim("slow")
    rows = "select queue from queue order by 1"
    before = owner.rows(rows)

    with owner.refusing("LJ007"):
        configure(queues=["email"], lease_seconds=99)

    assert owner.rows(rows) == before
    assert owner.value("select lease_seconds from instance") == 30


def test_configure_leaves_jobs_and_their_keys_alone(configure, owner, enqueue):
    enqueue()
    jobs = "select j::text from job as j union all select l::text from live_job as l"
    before = owner.rows(jobs)

    configure(producer_instances=["organization"], lease_seconds=99)

    assert owner.rows(jobs) == before


def test_configure_writes_an_audit_row_only_for_a_change(configure, owner):
    rows = "select operator, act, arguments, job_count"
    rows += " from operator_act order by operator_act_id"
    before = owner.rows(rows)

    configure(lease_seconds=99)
    configure(lease_seconds=99)

    me = owner.value("select current_user")
    assert owner.rows(rows) == [
        *before,
        (me, "configure", {"lease_seconds": {"from": 30, "to": 99}}, 0),
    ]


def test_the_audit_of_configure_keeps_what_changed_and_no_secret_reference(
    configure, connect
):
    configure(queues=["email", "other"], worker_instances=["email-worker"])

    shown = connect("operations").rows("select arguments from inspect_acts(1)")
    every = connect("operations").rows("select a::text from inspect_acts() as a")

    assert shown == [
        (
            {
                "queues": {"from": ["email", "slow"], "to": ["email", "other"]},
                "worker_instances": {
                    "from": ["email-worker", "spare-worker"],
                    "to": ["email-worker"],
                },
            },
        )
    ]
    assert not any("database" in row for (row,) in every)


def test_configure_is_for_the_owner_alone(connect, prefix, stored):
    before = stored()

    for role in (
        "accounts",
        "email-worker",
        "operations",
        f"{prefix}_duty",
        "stranger",
    ):
        session = connect(role)
        with session.refusing("42501"):
            session.execute("select jobs_email.configure('{}')")

    assert stored() == before
