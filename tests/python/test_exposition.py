"""The metrics of an Instance, compared with its SQL functions."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from threading import Event
from urllib.request import Request, urlopen

import psycopg
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

from lenso_jobs import exposition
from lenso_jobs.cli import main
from lenso_jobs.errors import InvalidArgument
from lenso_jobs.exposition import METRICS, InstanceCollector
from lenso_jobs.metrics import PrometheusObserver
from lenso_jobs.operator import configure, setup

LATER = "2040-01-01T00:00:00Z"
SECRET = "hunter2"
NOWHERE = f"host=/nowhere dbname=nothing password={SECRET}"


@pytest.fixture
def url(conninfo):
    """The connection string of a declared observer."""
    return make_conninfo(conninfo, user="operations")


@pytest.fixture
def collector():
    """Make collectors; by default of a server that is not there."""
    made = []

    def collector(source=NOWHERE, **options):
        made.append(InstanceCollector(source, "jobs_email", **options))
        return made[-1]

    yield collector
    for each in made:
        each.close()


@pytest.fixture
def registry(collector, url):
    """A registry, with operations reading."""
    registry = CollectorRegistry()
    registry.register(collector(url))
    return registry


def read(registry):
    """What is exposed: the value of each name without lenso_jobs_, by its labels."""
    text = generate_latest(registry).decode()
    return parsed(text)


def parsed(text):
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("schema") == "jobs_email"
            name = sample.name.removeprefix("lenso_jobs_")
            key = tuple(labels[label] for label in METRICS[name][1])
            assert len(key) == len(labels)
            assert values.setdefault(name, {}).setdefault(key, sample.value) is not None
    return values


def test_the_exposed_samples_equal_the_reads(
    owner, worker, enqueue, claim, expire, registry
):
    enqueue(available_at=LATER)
    for _ in range(4):
        enqueue()
    for code, retryable in (("timeout", True), ("refused", False)):
        job_id, token = claim()
        worker.execute("select fail(%s, %s, %s, %s)", (job_id, token, code, retryable))
    worker.execute("select complete(%s, %s)", claim())
    expire(claim()[0])
    for _ in range(2):
        enqueue("slow")
    claim("slow")
    owner.execute("delete from queue where queue = 'slow'")

    values = read(registry)

    queue = owner.row("select * from inspect_queues() where queue = 'email'")
    held = owner.row("select * from inspect_workers() where worker = 'email-worker'")
    states = ("ready", "scheduled", "retry_waiting", "running", "expired")
    assert [queue[state] for state in states] == [0, 1, 1, 0, 1]
    assert values["queue_jobs"] == {
        **{("email", state): queue[state] for state in states},
        **dict.fromkeys([("slow", state) for state in states], 0),
        ("slow", "ready"): 1,
        ("slow", "running"): 1,
    }
    assert values["queue_declared"] == {("email",): 1, ("slow",): 0}
    assert values["queue_estimated"] == {("email",): 0, ("slow",): 0}
    assert values["queue_oldest_ready_seconds"]["email",] == 0
    assert 0 < values["queue_oldest_ready_seconds"]["slow",] < 60
    assert values["queue_next_due_timestamp_seconds"] == {
        ("email",): pytest.approx(queue["next_due_at"].timestamp())
    }
    assert values["queue_last_claim_timestamp_seconds"]["email",] == pytest.approx(
        queue["last_claimed_at"].timestamp()
    )
    assert values["queue_ended_recently"]["email", "succeeded"] == 1
    assert values["queue_ended_recently"]["email", "failed"] == 1
    assert values["queue_failures_recently"] == {("email", "refused"): 1}
    assert values["queue_counted_seconds"]["email",] == pytest.approx(300, abs=1)
    assert values["worker_leases"] == {("email-worker",): 2, ("spare-worker",): 0}
    assert values["worker_expired_leases"]["email-worker",] == 1
    assert 0 < values["worker_oldest_lease_seconds"]["email-worker",] < 60
    assert values["worker_oldest_lease_seconds"]["spare-worker",] == 0
    assert values["worker_sessions"]["email-worker",] == held["sessions"] > 0
    assert values["worker_declared"]["email-worker",] == 1
    assert values["schema_version"] == {
        (): owner.value("select version from installed_version")
    }
    assert values["up"] == {(): 1}
    assert 0 < values["scrape_seconds"][()] < 60
    assert values.keys() == METRICS.keys()


def test_every_finding_has_a_sample_0_while_it_is_not_found(owner, enqueue, registry):
    listed = dict.fromkeys(
        owner.rows("select finding, severity from health_finding"), 0
    )
    before = read(registry)["health_findings"]
    for queue in ("email", "slow"):
        enqueue(queue)
    owner.execute(
        "update live_job set available_at = clock_timestamp() - interval '2 minutes'"
    )

    after = read(registry)["health_findings"]

    # The roles of other processes' tests come and go.
    for found in (before, after):
        found["role_missing", "critical"] = found["membership_stray", "warning"] = 0
    assert before == listed
    assert after == listed | {("queue_silent", "critical"): 2}


def test_names_and_helps_are_well_formed_and_not_those_of_the_worker(
    collector,
):
    registry, workers = CollectorRegistry(), CollectorRegistry()
    registry.register(collector())
    PrometheusObserver(workers)
    theirs = {family.name for family in workers.collect()}

    for family in collector().describe():
        assert family.type == "gauge"
        assert family.documentation
        assert family.name not in theirs
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(collector())


def test_rare_failure_codes_are_counted_together(owner, worker, enqueue, registry):
    for number in range(23):
        enqueue(key=f"{number}")
    for number, row in enumerate(
        worker.rows("select job_id, lease_token from claim('email', 23)")
    ):
        code = "other" if number < 2 else f"code_{max(3, number):02}"
        worker.execute("select fail(%s, %s, %s, false)", (*row, code))

    found = read(registry)["queue_failures_recently"]

    assert len(found) == exposition.MOST_CODES
    assert sum(found.values()) == 23
    assert found["email", "other"] == 2 + 1


def test_a_sample_shows_as_an_estimate(owner, by_hand, fill, registry):
    fill(scheduled=300)
    owner.execute(
        "create or replace function _queue_share_to_read() returns real language sql volatile"
        " as 'select 99.9::real'"
    )

    values = read(registry)

    assert values["queue_estimated"]["email",] == 1
    assert values["worker_estimated"]["email-worker",] == 1


# Whom it asks, and as whom.


def test_a_login_without_direct_rights_reads_as_the_caller(
    conninfo, new_role, collector
):
    role = new_role(attributes="login noinherit", members_of=["operations"])
    source = make_conninfo(conninfo, user=role)
    with ConnectionPool(source, min_size=1, max_size=1, open=True) as pool:
        reading = collector(pool, caller="operations")
        list(reading.collect())

        with pool.connection() as connection:
            (left,) = connection.execute(
                "select current_setting('role'), current_setting('statement_timeout'),"
                " current_setting('lock_timeout')"
            ).fetchall()
    assert reading.error is None
    assert left == ("none", "0", "0")


@pytest.mark.slow
def test_a_declared_role_reads_and_an_undeclared_member_is_reported(
    new_instance, role, fresh_prefix, collector
):
    configuration, conninfo = new_instance()
    setup(configuration, conninfo)
    declared = role(admin=conninfo)
    granted = role(member_of=(f"{fresh_prefix}_observer",), admin=conninfo)
    observers = ("operations", declared)
    changed = configuration.model_copy(update={"observer_instances": observers})
    configure(changed, conninfo)

    findings = []
    for name in (declared, granted):
        reading = collector(make_conninfo(conninfo, user=name))
        registry = CollectorRegistry()
        registry.register(reading)
        findings.append(read(registry)["health_findings"])
        reading.close()

    for found in findings:
        assert {key: value for key, value in found.items() if value} == {
            ("membership_stray", "warning"): 1
        }


def test_a_role_without_rights_reads_nothing(conninfo, collector, caplog):
    registry = CollectorRegistry()
    reading = collector(make_conninfo(conninfo, user="stranger"))
    registry.register(reading)

    values = read(registry)
    read(registry)

    assert values.keys() == {"up", "scrape_seconds"}
    assert values["up"] == {(): 0}
    assert isinstance(reading.error, psycopg.errors.InsufficientPrivilege)
    assert len(caplog.messages) == 1, "said once, not at every scrape"


@pytest.fixture(params=["conninfo", "pool"])
def source(request, conninfo):
    """What a collector may be given."""
    role = make_conninfo(conninfo, user="operations", application_name="reading")
    if request.param == "conninfo":
        yield role
    else:
        with ConnectionPool(
            role,
            min_size=1,
            open=True,
            check=ConnectionPool.check_connection,
            kwargs={"row_factory": dict_row},
        ) as pool:
            yield pool


@pytest.mark.slow
def test_one_connection_is_kept_and_opened_anew_when_it_is_lost(
    owner, collector, source
):
    registry = CollectorRegistry()
    registry.register(collector(source))

    def asks():
        assert read(registry)["up"] == {(): 1}
        return owner.value(
            "select pid from pg_stat_activity where application_name = 'reading'"
            " and datname = current_database()"
        )

    first = asks()
    assert asks() == first
    owner.execute("select pg_terminate_backend(%s, 10000)", (first,))
    assert asks() != first


@pytest.mark.slow
@pytest.mark.parametrize("pooler", [1], indirect=True)
def test_it_reads_through_a_transaction_pooler(pooler, collector):
    reading = collector(make_conninfo(user="operations", **pooler), caller="operations")
    other = collector(make_conninfo(user="email-worker", **pooler))

    for _ in range(8):
        list(reading.collect())
        list(other.collect())
        assert reading.error is None
        assert isinstance(other.error, psycopg.errors.InsufficientPrivilege)


# What cannot be read.


def test_a_server_that_is_not_there_is_down(collector, caplog):
    registry = CollectorRegistry()
    registry.register(collector())

    values = read(registry)

    assert values.keys() == {"up", "scrape_seconds"}
    assert values["up"] == {(): 0}
    assert "/nowhere" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.slow
def test_of_several_hosts_one_may_be_deaf(url, collector):
    parameters = conninfo_to_dict(url)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        host, port = parameters["host"], parameters.get("port", 5432)
        reading = collector(
            make_conninfo(
                url,
                host=f"127.0.0.1,{host}",
                port=f"{deaf.getsockname()[1]},{port}",
            )
        )

        begun = time.monotonic()
        list(reading.collect())

    assert time.monotonic() - begun > 1, "it was not deaf"
    assert reading.error is None


def test_a_locked_table_hides_the_queues_but_not_that_it_is_locked(
    owner, collector, url, monkeypatch
):
    monkeypatch.setattr(exposition, "_LOCK_MILLISECONDS", 50)
    reading, registry = collector(url), CollectorRegistry()
    registry.register(reading)
    with owner.transaction():
        owner.execute("lock table live_job")
        during = read(registry)
        why = reading.error
    after = read(registry)

    assert during["up"] == {(): 0}
    assert during["health_findings"]["table_locked", "critical"] == 1
    assert "queue_jobs" not in during
    assert isinstance(why, psycopg.errors.LockNotAvailable)
    assert after["up"] == {(): 1}
    assert "queue_jobs" in after


@pytest.mark.slow
def test_a_read_that_takes_too_long_is_given_up(owner, collector, url):
    owner.execute(
        "create or replace function inspect_workers() returns setof inspected_worker"
        " language plpgsql as $$ begin perform pg_sleep(20); end $$"
    )
    registry = CollectorRegistry()
    reading = collector(url, timeout=2)
    registry.register(reading)

    values = read(registry)

    assert values["up"] == {(): 0}
    assert isinstance(reading.error, psycopg.errors.QueryCanceled)
    assert values["scrape_seconds"][()] < 15
    assert values["queue_declared"] == {("email",): 1, ("slow",): 1}


def test_a_server_that_keeps_no_time_out_is_hung_up_on():
    connection = psycopg.connect(os.environ["LENSO_JOBS_TEST_SERVER"])

    def ask():
        with exposition._cut_off(connection, 0.1):
            connection.execute("select pg_sleep(20)")

    begun = time.monotonic()
    with pytest.raises(psycopg.OperationalError):
        ask()
    assert time.monotonic() - begun < 10
    assert connection.broken
    connection.close()


def test_threads_that_ask_meanwhile_share_the_next_result(
    collector, background, monkeypatch
):
    reading = collector()
    begun, release, asked, reads = Event(), Event(), [], []

    def slow():
        reads.append(1)
        begun.set()
        assert release.wait(20)
        return []

    def clock():
        asked.append(1)
        return time.monotonic()

    monkeypatch.setattr(reading, "_read", slow)
    monkeypatch.setattr(exposition, "monotonic", clock)
    first = background(reading.collect)
    assert begun.wait(20)
    others = [background(reading.collect) for _ in range(5)]
    deadline = time.monotonic() + 20
    while len(asked) < 2 + len(others):  # the first asks when it begins, too
        assert time.monotonic() < deadline, "nobody asked"
        time.sleep(0.001)
    release.set()

    answers = [other.result(20) for other in others]

    assert len(reads) == 2
    assert all(answer is answers[0] for answer in answers)
    assert answers[0] is not first.result(20)


@pytest.mark.parametrize(
    "source", [None, 7, f"postgresql+psycopg://ada:{SECRET}@localhost/jobs"]
)
def test_a_source_that_is_not_a_connection_string_or_pool_is_refused(source):
    with pytest.raises(InvalidArgument) as caught:
        InstanceCollector(source, "jobs_email")

    assert str(caught.value).startswith("source ")
    assert SECRET not in str(caught.value)


def test_a_collector_does_not_outlive_a_fork(collector, monkeypatch):
    reading = collector()
    monkeypatch.setattr(reading._home, "_pid", 0)

    with pytest.raises(RuntimeError, match="after the fork"):
        reading.collect()


# The command.


@pytest.fixture
def lenso_jobs(monkeypatch, capsys, tmp_path, document):
    """Run the command in this process: (exit code, output, errors)."""

    def lenso_jobs(*arguments, url=NOWHERE):
        path = tmp_path / "jobs.json"
        path.write_text(document())
        monkeypatch.setenv("JOBS_DATABASE_URL", url)
        command = ["lenso-jobs", "metrics", "--config", str(path), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return caught.value.code or 0, said.out, said.err

    return lenso_jobs


def test_the_command_prints_them_once(lenso_jobs, conninfo, url):
    code, out, err = lenso_jobs(url=url)
    refused = lenso_jobs(url=make_conninfo(conninfo, user="stranger"))

    assert (code, err) == (0, "")
    assert parsed(out).keys() >= {"up", "queue_jobs", "worker_leases"}
    assert refused[0] == 1
    assert "has no rights in schema jobs_email" in refused[2]


def test_the_command_says_why_they_could_not_be_read(lenso_jobs):
    code, out, err = lenso_jobs()

    assert code == 2
    assert parsed(out)["up"] == {(): 0}
    assert "cannot be reached" in err
    assert SECRET not in out + err


@pytest.mark.parametrize(
    "listen", ["9753", "localhost:", "localhost:x", "localhost:99999", "192.0.2.1:80"]
)
def test_the_command_refuses_what_it_cannot_listen_on(lenso_jobs, listen):
    code, out, err = lenso_jobs("--listen", listen)

    assert (code, out) == (2, "")
    assert "--listen" in err


def test_without_the_extra_the_command_names_it(lenso_jobs, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "lenso_jobs.exposition")

    code, out, err = lenso_jobs()

    assert (code, out) == (2, "")
    assert "pip install 'lenso-jobs[prometheus]'" in err


@pytest.fixture
def handlers():
    """Put the handlers of signals back; meanwhile none ends the tests."""
    before = {
        number: signal.signal(number, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def served(lenso_jobs, url, background, caplog, handlers):
    """Serve the metrics while a function asks; return exit code and result."""
    caplog.set_level("INFO")

    def served(ask, host="127.0.0.1", source=url):
        def wait_and_ask():
            deadline = time.monotonic() + 20
            try:
                while not any("listening on" in each for each in caplog.messages):
                    assert time.monotonic() < deadline, "it does not listen"
                    time.sleep(0.01)
                return ask(int(caplog.messages[0].split()[-1]))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        asked = background(wait_and_ask)
        code, out, err = lenso_jobs("--listen", f"{host}:0", url=source)
        assert (out, "Traceback" in err) == ("", False)
        assert caplog.messages[-1] == "stopped"
        return code, asked.result(20)

    return served


def get(port, host="127.0.0.1", **options):
    with urlopen(Request(f"http://{host}:{port}/metrics", **options)) as answer:
        return answer.headers, answer.read().decode()


def test_the_command_serves_until_sigterm(served):
    code, (headers, text) = served(get)

    assert code == 0
    assert parsed(text)["up"] == {(): 1}
    assert headers["Content-Type"].startswith("text/plain; version=")


def test_a_scrape_while_the_server_is_down_says_so(served):
    _, (_, text) = served(get, source=NOWHERE)

    assert parsed(text)["up"] == {(): 0}
    assert SECRET not in text


def test_a_client_that_hangs_up_ends_no_server(served):
    def ask(port):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return get(port)

    _, (_, text) = served(ask)

    assert parsed(text)["up"] == {(): 1}


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6")
def test_it_listens_on_ipv6_too(served):
    _, (_, text) = served(lambda port: get(port, "[::1]"), "[::1]")

    assert parsed(text)["up"] == {(): 1}
