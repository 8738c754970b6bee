"""What a caller of the router may try, and does not get."""

import json
from contextlib import ExitStack

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from lenso_jobs import Jobs, SecretNotFound
from lenso_jobs.operator import setup_fleet

pytestmark = pytest.mark.slow

ODD = 'o\'hara \\ "mail"'
# What each caller may call on the router, besides what an Instance grants it.
BEHIND = """
    select p.proname from pg_proc as p
    where p.pronamespace = current_schema()::regnamespace and p.proname ~ '^_'
        and has_function_privilege(p.oid, 'execute')
    order by 1
"""
NOT_A_PRODUCERS = {
    "claim": "'email'",
    "complete": "gen_random_uuid(), 'token'",
    "redrive": "gen_random_uuid()",
    "purge": "now()",
    "pause": "'email'",
    "erase": "gen_random_uuid()",
    "inspect_jobs": "'email', 'queued'",
    "inspect_queues": "",
    "explain_job": "gen_random_uuid()",
}


@pytest.fixture
def producer(fleet):
    return fleet.open("accounts")


def test_each_role_of_a_session_is_its_own_caller_on_the_shards(fleet):
    session = fleet.open()
    keys = [fleet.key(shard) for shard in range(2)]
    callers = ["accounts", ODD, "organization", ODD, "accounts"]

    made = []
    for caller in callers:
        session.execute(sql.SQL("set role {}").format(sql.Identifier(caller)))
        made += [
            session.value("select created from enqueue('email', 'send', '{}', %s)", key)
            for key in keys
        ]

    assert made == [True] * 6 + [False] * 4
    for shard in range(2):
        session = fleet.open(shard=shard)
        assert session.rows("select producer from job order by 1") == [
            ("accounts",),
            (ODD,),
            ("organization",),
        ]


@pytest.fixture
def conninfo(fleet):
    """What the pooler stands before."""
    return fleet.router


def test_callers_that_share_sessions_of_a_pooler_stay_apart(fleet, pooler):
    callers = ["accounts", "organization"] * 10

    with ExitStack() as stack:
        clients = [
            Jobs(
                stack.enter_context(
                    psycopg.connect(
                        **pooler,
                        user="postgres",
                        autocommit=True,
                        prepare_threshold=None,
                    )
                ),
                fleet.schema,
                caller=caller,
            )
            for caller in callers[:4]
        ]
        for n, caller in enumerate(callers):
            key = f"{caller}-{n}"
            clients[n % 4].enqueue("email", "send", {}, idempotency_key=key)

    for shard in range(2):
        session = fleet.open(shard=shard)
        made = session.rows("select idempotency_key, producer from job")
        assert made
        for key, producer in made:
            assert key.startswith(f"{producer}-")
        # Two sessions of the router, and two callers.
        of_callers = "select count(*) from pg_stat_activity where usename = any (%s)"
        assert session.value(of_callers, callers) <= 4


def test_a_producer_may_not_call_what_an_instance_does_not_let_it(fleet, producer):
    for name, arguments in NOT_A_PRODUCERS.items():
        for session in (producer, fleet.open("accounts", 0)):
            with session.refusing("42501"):
                session.execute(f"select {name}({arguments})")
    behind = [name for (name,) in producer.rows(BEHIND)]

    # Each of them runs on a shard as this caller, and the shard judges it.
    assert behind == [
        "_shard_enqueue",
        "_shard_enqueue_many",
        "_shard_inspect",
        "_shard_inspect_key",
        "_shard_of",
        "_shard_refused",
        "_shard_server",
        "_shards",
    ]


def test_no_function_runs_as_its_owner_a_superuser_and_public_may_call_none(fleet):
    functions = fleet.open().rows(
        "select p.proname, l.lanname, p.prosecdef, p.proconfig::text, p.proacl::text"
        " from pg_proc as p join pg_language as l on l.oid = p.prolang"
        " where p.pronamespace = current_schema()::regnamespace"
    )

    assert len(functions) > 50
    for name, language, runs_as_owner, settings, rights in functions:
        assert not runs_as_owner, name
        assert rights is not None, name  # NULL would be PUBLIC's right
        assert "{=" not in rights, name
        assert ",=" not in rights, name
        if language == "plpgsql":
            assert f"search_path={fleet.schema}, pg_temp" in settings, name


def test_a_shard_judges_again_who_calls(fleet):
    admin = fleet.open()
    admin.execute(f"grant execute on all functions in schema {fleet.schema} to public")
    try:
        producer = fleet.open("accounts")
        for call in (
            "redrive(gen_random_uuid())",
            "purge(now())",
            "pause('email')",
            "inspect_jobs('email', 'queued')",
            "_shard_pause(array[1], 'email')",
            "_shard_erase(array[0], gen_random_uuid())",
        ):
            with producer.refusing("42501") as refused:
                producer.execute(f"select {call}")
            assert "permission denied for function" in str(refused.value)
    finally:
        setup_fleet(fleet.document, fleet.secrets)
    with fleet.open("accounts").refusing("42501") as refused:
        fleet.open("accounts").execute("select _shard_pause(array[1], 'email')")
    assert "permission denied for function _shard_pause" in str(refused.value)


def test_a_stranger_may_do_nothing(fleet):
    for server in fleet.machines:
        with server.connect("postgres") as session:
            session.execute("drop role if exists stranger; create role stranger login")
    stranger = fleet.open("stranger", options="")

    for statement in (
        f"select {fleet.schema}.enqueue('email', 'send', '{{}}', 'k')",
        f"select {fleet.schema}._shards()",
        f"select * from {fleet.schema}._shard_server(array[0])",
        f"create user mapping for stranger server {fleet.schema}_shards",
    ):
        with stranger.refusing("42501"):
            stranger.execute(statement)
    assert stranger.rows("select umoptions from pg_user_mappings") == [(None,)] * 6


@pytest.mark.parametrize(
    "statement",
    [
        "alter user mapping for {caller} server {server} options (set user 'operations')",
        "alter user mapping for {caller} server {server} options (drop password)",
        "drop user mapping for {caller} server {server}",
        "drop user mapping if exists for current_user server {server}",
        "drop owned by {caller}",
        "create user mapping for public server {server} options (user 'organization')",
        "create user mapping for organization server {server}",
        "drop user mapping for public server {server}",
        "drop user mapping for organization server {server}",
        "alter server {server} options (set p0 'host=localhost')",
        "alter event trigger {server} disable",
        "drop event trigger {server}_drop",
        "alter function _shard_mapping_kept() rename to gone",
        "create server other foreign data wrapper plproxy options (p0 'host=localhost')",
        "create function pg_temp.f() returns int language plproxy as 'run on 0;'",
        "create function {schema}.f() returns int language sql as 'select 1'",
        "set session authorization organization",
        "set role organization",
        "select * from pg_user_mapping",
        "select * from {schema}.caller",
    ],
)
def test_a_caller_may_not_change_how_it_reaches_the_shards(fleet, producer, statement):
    server = f"{fleet.schema}_shards"
    statement = statement.format(caller="accounts", server=server, schema=fleet.schema)

    try:
        with producer.refusing("42501"):
            producer.execute(statement)
    finally:
        producer.execute("reset role")

    key = fleet.key(1)
    producer.execute("select enqueue('email', 'send', '{}', %s)", [key])
    assert fleet.open(shard=1).value("select producer from job") == "accounts"


def test_a_caller_without_a_password_may_not_name_another_role(trusting_fleet):
    fleet = trusting_fleet
    producer = fleet.open("accounts")

    with producer.refusing("42501"):
        producer.execute(
            f"create user mapping for accounts server {fleet.schema}_shards"
            " options (user 'organization')"
        )

    producer.execute("select enqueue('email', 'send', '{}', %s)", [fleet.key(0)])
    assert fleet.open(shard=0).value("select producer from job") == "accounts"


def test_a_caller_reads_no_password_but_its_own(fleet, producer):
    seen = dict(producer.rows("select usename, umoptions from pg_user_mappings"))

    assert [name for name, options in seen.items() if options] == ["accounts"]
    assert {"accounts", "organization", ODD, "email-worker", "public"} <= seen.keys()
    options = producer.rows(
        "select authorization_identifier, option_value"
        " from information_schema.user_mapping_options"
        " where option_name = 'password' and option_value is not null"
    )
    assert [name for name, _ in options] == ["accounts"]
    servers = str(producer.rows("select srvoptions from pg_foreign_server"))
    assert "password" not in servers
    assert "user=" not in servers


def test_a_caller_reads_no_job_of_another(fleet, producer):
    other = fleet.open("organization")
    keys = [fleet.key(shard) for shard in range(2)]
    ids = [
        other.value("select job_id from enqueue('email', 'send', '{}', %s)", key)
        for key in keys
    ]

    for call, values in (
        ("inspect(%s)", ids),
        ("inspect_key(%s)", keys),
        ("inspect_key(%s, 'organization')", keys),
        ("_shard_inspect(array[0, 1], %s)", ids),
    ):
        for value in values:
            with producer.refusing("LJ006"):
                producer.execute(f"select {call}", [value])


def test_a_payload_shows_in_no_view_of_other_sessions(fleet, producer):
    secret = "a-payload-nobody-may-read"
    for shard in range(2):
        producer.execute(
            "select enqueue('email', 'send', %s, %s)",
            [json.dumps({"secret": secret}), fleet.key(shard)],
        )
    producer.execute(
        "select enqueue_many(%s)",
        [json.dumps([{"queue": "email", "payload": {"secret": secret}}])],
    )
    shown = "select usename, query from pg_stat_activity where usename = 'accounts'"

    assert fleet.open().rows(shown)
    for shard in (None, 0, 1):
        assert secret not in str(fleet.open(shard=shard).rows(shown))
    for _, query in fleet.open("organization").rows(shown):
        assert query == "<insufficient privilege>"


def test_direct_calls_with_strange_shards_end_in_an_error_or_in_nothing(
    fleet, producer
):
    call = "select * from _shard_inspect(%s::integer[], gen_random_uuid())"
    many = "select * from _shard_enqueue_many(%s::integer[], array['[]'::jsonb])"
    pid = producer.pid

    for shards in (
        [],
        None,
        [None],
        [0, None],
        [[0, 1], [0, 1]],
        [-1],
        [2147483647],
        [-2147483648],
        [1] * 10000,
    ):
        for statement in (call, many):
            try:
                said = producer.rows(statement, shards)
            except psycopg.Error as error:
                said = error.sqlstate
            assert said in ([], "XX000", "LJ006", "LJ007")
    assert producer.pid == pid
    assert producer.value("select 1") == 1


def test_objects_of_a_caller_are_not_used_in_place_of_the_routers(fleet, producer):
    producer.execute("create temp table enqueued_job (job_id int, created int)")
    producer.execute("create temp view error_code as select 1")
    producer.execute(
        "create function pg_temp._shard_of(text) returns integer language sql"
        " as 'select 0'"
    )
    producer.execute(
        "create function pg_temp.jsonb_typeof(jsonb) returns text language sql"
        " as $$ select 'mine' $$"
    )
    producer.execute(f"set search_path = pg_temp, pg_catalog, {fleet.schema}")
    key = fleet.key(1)

    producer.execute(
        f"select {fleet.schema}.enqueue('email', 'send', '{{}}', %s)", [key]
    )
    item = {
        "queue": "email",
        "kind": "k",
        "payload": {},
        "idempotency_key": fleet.key(1),
    }
    producer.execute(f"select {fleet.schema}.enqueue_many(%s)", [json.dumps([item])])

    assert fleet.open(shard=1).value("select count(*) from job") == 2


def test_a_new_password_is_used_and_shows_in_no_log_and_no_message(new_fleet):
    fleet = new_fleet("rotated")
    old, new = fleet.secrets("password/0"), "a 'plough\\share'"
    before = [len(fleet.log(machine)) for machine in range(3)]

    def know(password):
        for shard in fleet.shards:
            with psycopg.connect(shard, autocommit=True) as session:
                session.execute("set log_statement = 'none'")
                session.execute("set log_min_duration_statement = -1")
                session.execute(
                    sql.SQL("alter role accounts password {}").format(password)
                )

    know(new)
    try:
        with fleet.open("accounts").refusing("08006") as refused:
            fleet.open("accounts").execute(
                "select enqueue('email', 'send', '{}', %s)", [fleet.key(0)]
            )
        assert "password authentication failed" in str(refused.value)

        setup_fleet(
            fleet.document,
            lambda name: new if name == "password/0" else fleet.secrets(name),
        )

        fleet.open("accounts").execute(
            "select enqueue('email', 'send', '{}', %s)", [fleet.key(0)]
        )
    finally:
        know(old)
        fleet.empty()
    said = str(refused.value)
    for machine, length in enumerate(before):
        said += fleet.log(machine)[length:]
    assert "bootstrap" in said
    assert "trout" not in said
    assert "plough" not in said


def test_a_hostile_document_does_not_get_into_the_routers_statements(new_fleet):
    name = "x'; create table stolen (); --"
    fleet = new_fleet("odd", producer_instances=[name, "accounts"])
    try:
        fleet.open(name).execute(
            "select enqueue('email', 'send', '{}', %s)", [fleet.key(0)]
        )
        assert fleet.open(shard=0).value("select producer from job") == name
        assert fleet.open().value("select to_regclass('stolen')") is None
    finally:
        fleet.empty()


@pytest.mark.parametrize("name", ["dbname", "host", "sslrootcert"])
def test_a_url_that_would_hide_the_caller_from_pl_proxy_is_refused(fleet, name):
    # PL/Proxy adds no role where it finds these letters, and libpq takes the server's.
    hiding = make_conninfo(fleet.shards[1], **{name: "/a user=b"})

    with pytest.raises(SecretNotFound, match="user="):
        setup_fleet(
            fleet.document,
            lambda ref: hiding if ref == "shard/1" else fleet.secrets(ref),
        )
