"""The command ``lenso-jobs work``, as a process that is sent signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from psycopg.conninfo import make_conninfo

import lenso_jobs.worker
from lenso_jobs.cli import _work, main
from lenso_jobs.worker import Observer, Tally, _prepared

COMMAND = [sys.executable, "-c", "from lenso_jobs.cli import main; main()"]
PACKAGE = str(Path(lenso_jobs.__file__).parents[1])

HANDLERS = """
import asyncio, functools, pathlib, signal, threading, time
from lenso_jobs import Fail, Kinds
from lenso_jobs.worker import Observer

def note(lease):
    pathlib.Path("ran").open("a").write(lease.payload["secret"] + chr(10))

async def note_async(lease):
    await asyncio.sleep(0)
    note(lease)

def quiet(lease): pass
async def quiet_async(lease): pass

class Note:
    async def __call__(self, lease):
        note(lease)

instance = Note()

def kill():
    # A thread of its own takes it, so it does not wake the main one.
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

async def kill_soon(lease):
    note(lease)
    threading.Timer(0.5, kill).start()

def stay(lease):
    note(lease)
    time.sleep(60)

async def block(lease):
    stay(lease)

def fail(lease):
    note(lease)
    raise Fail("no_good")

class Watching(Observer):
    def ended(self, ended):
        pathlib.Path("watched").open("a").write(ended.outcome)

no_function = 7

def none(): pass
def two(lease, log): pass
def named(lease, *, log): pass
def optional(lease, log=None): pass

class Send:
    def __init__(self, lease): pass

def decorated(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call

note_wrapped = decorated(note_async)
note_partial = functools.partial(note, )

kinds, kinds_async = Kinds(), Kinds()
kinds("send", queue="email")(two)

@kinds_async("send", queue="email")
async def send(lease, payload): pass
"""


@pytest.fixture
def directory(tmp_path, document):
    (tmp_path / "jobs.json").write_text(document())
    (tmp_path / "handlers.py").write_text(HANDLERS)
    return tmp_path


@pytest.fixture
def work(directory, conninfo):
    """Start the command as the role email-worker."""
    started = []

    def work(
        handler,
        *options,
        queue="email",
        before=(),
        config=("--config", "jobs.json"),
        **parameters,
    ):
        process = subprocess.Popen(
            [
                *before,
                *COMMAND,
                *("work", *config, "--queue", queue),
                *("--handler", f"handlers:{handler}", *options),
            ],
            cwd=directory,
            env={
                **os.environ,
                "PYTHONPATH": PACKAGE,
                "JOBS_DATABASE_URL": make_conninfo(
                    conninfo, **({"user": "email-worker"} | parameters)
                ),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield work
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def work_here(directory, conninfo, monkeypatch):
    """Run the command in this process, without its signals; return the exit code."""
    monkeypatch.setattr(_work, "_stop_by_signals", lambda *_: None)
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))

    def work_here(*options, user="email-worker", config=("--config", "jobs.json")):
        monkeypatch.setenv("JOBS_DATABASE_URL", make_conninfo(conninfo, user=user))
        arguments = ["lenso-jobs", "work", *config, *options]
        for option, value in (("--queue", "email"), ("--handler", "handlers:note")):
            arguments += () if option in options else (option, value)
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code

    yield work_here
    sys.modules.pop("handlers", None)


@pytest.fixture
def ran(directory):
    """Wait until handlers have begun with so many jobs."""

    def ran(count):
        path, deadline = directory / "ran", time.monotonic() + 20
        while not path.exists() or len(path.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, "no handler began"
            time.sleep(0.01)

    return ran


@pytest.fixture
def status(owner):
    def status(job_id):
        return owner.rows("select status, last_failure_code from inspect(%s)", job_id)[
            0
        ]

    return status


def ended(process):
    """The exit code, and what was logged."""
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("handler", "number"),
    [
        ("note", signal.SIGTERM),
        pytest.param("note_async", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("instance", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("note_wrapped", signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param("note_partial", signal.SIGQUIT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_it_cleanly(work, ran, enqueue, status, handler, number):
    jobs = [enqueue(payload={"secret": f"hush-{n}"}) for n in range(3)]
    process = work(handler, "--observer", "handlers:Watching")
    ran(3)

    process.send_signal(number)

    code, errors = ended(process)
    assert code == 0, errors
    assert [status(job_id) for job_id in jobs] == [("succeeded", None)] * 3
    assert "Traceback" not in errors
    assert "hush" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_jobs_that_run_when_the_grace_is_over_are_handed_back(
    work, ran, enqueue, status, number
):
    job_id = enqueue(payload={"secret": "hush"})
    process = work("stay", "--grace", "0.2")
    ran(1)

    process.send_signal(number)

    code, errors = ended(process)
    assert code == 3, errors
    assert status(job_id) == ("queued", "worker_shutdown")


@pytest.mark.slow
def test_a_signal_that_another_thread_takes_stops_an_event_loop(work, ran, enqueue):
    enqueue(payload={"secret": "hush"})
    process = work("kill_soon")
    ran(1)

    code, errors = ended(process)
    assert code == 0, errors


@pytest.mark.slow
def test_a_hang_up_that_is_ignored_stays_ignored(work, ran, enqueue, status):
    process = work("note", before=("nohup",))
    enqueue(payload={"secret": "hush"})
    ran(1)

    process.send_signal(signal.SIGHUP)
    job_id = enqueue(payload={"secret": "hush"})
    ran(2)

    process.terminate()
    code, errors = ended(process)
    assert code == 0, errors
    assert status(job_id) == ("succeeded", None)


@pytest.mark.slow
def test_a_second_signal_ends_the_grace(work, ran, enqueue, status, directory):
    job_id = enqueue(payload={"secret": "hush"})
    process = work("stay", "--grace", "600", "--on-shutdown", "lapse")
    ran(1)

    process.terminate()
    process.send_signal(signal.SIGINT)

    code, errors = ended(process)
    assert code == 3, errors
    assert status(job_id) == ("running", None)
    assert not (directory / "watched").exists()


@pytest.mark.slow
def test_an_event_loop_that_is_blocked_does_not_outlive_the_last_resort(
    work, ran, enqueue, status, directory
):
    (directory / "handlers.py").write_text(
        HANDLERS + "\nfrom lenso_jobs.cli import _work"
        "\n_work._LAST_RESORT_SECONDS = 2.0\n"
    )
    job_id = enqueue(payload={"secret": "hush"})
    process = work("block", "--grace", "0")
    ran(1)

    process.terminate()

    code, errors = ended(process)
    assert code == 3, errors
    assert status(job_id) == ("queued", "worker_shutdown")
    assert "handlers do not let the process end" in errors


@pytest.mark.slow
def test_an_impossible_worker_is_refused_at_once(work):
    code, errors = ended(work("note", queue="nowhere"))

    assert code == 1, errors
    assert "queue nowhere is not declared (LJ003 invalid_queue)" in errors
    assert "Queues of the document are email, slow." in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("user", "says"),
    [("operations", "42501 unauthorized"), ("stranger", "LJ008 schema_not_ready")],
)
def test_a_caller_that_is_not_a_worker_is_refused_at_once(
    work_here, capsys, user, says
):
    assert work_here(user=user) == 1

    errors = capsys.readouterr().err
    assert says in errors
    assert "Traceback" not in errors


def test_a_declared_worker_whose_group_lost_a_right_is_sent_to_check(
    work_here, capsys, owner, prefix, monkeypatch
):
    verified = "lenso_jobs._prepare._verify_grants"
    monkeypatch.setattr(verified, lambda *_: None)  # it was lost since
    owner.execute(
        f"revoke execute on function claim(text, integer) from {prefix}_worker"
    )

    assert work_here() == 1

    errors = capsys.readouterr().err
    assert "permission denied for function claim" in errors
    assert "If it is declared, it or its group lost a right: run lenso-jobs check" in (
        " ".join(errors.split())
    )


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--concurrency", "0", "concurrency must be a whole number from 1 to 1,000"),
        ("--batch", "1001", "batch must be a whole number from 1 to 1,000"),
        ("--grace", "-1", "grace must be 0 seconds or more"),
        ("--timeout", "0", "timeout must be more than 0 seconds"),
        ("--queue", "email:0", "concurrency must be a whole number from 1 to 1,000"),
        (
            "--observer",
            "handlers:note",
            "observers must be a list or tuple of Observer",
        ),
        ("--observer", "handlers:nothing", "cannot find handlers:nothing"),
        ("--handler", "no module", "no module is not of the form"),
        ("--handler", "handlers", "handlers is not of the form"),
        ("--handler", "handlers:nothing", "cannot find handlers:nothing"),
        ("--handler", "handlers:note:more", "handlers:note:more is not of the form"),
        ("--handler", ".handlers:note", ".handlers:note is not of the form"),
        ("--handler", "missing:send", "No module named 'missing'"),
        ("--handler", "handlers.missing:send", "No module named 'handlers.missing'"),
        ("--handler", "handlers:nota", "has no nota; did you mean note?"),
        ("--handler", "handlers:no_function", "handler must be callable"),
        ("--handler", "handlers:none", "handler must take one argument, the lease"),
        ("--handler", "handlers:two", "handler must take one argument, the lease"),
        ("--handler", "handlers:named", "handler must take one argument, the lease"),
        ("--handler", "handlers:Send", "handler is a class"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    work_here, capsys, option, value, says
):
    code = work_here(option, value)

    errors = capsys.readouterr().err
    assert code == 2, errors
    assert says in " ".join(errors.replace("│", " ").split())
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("module", "line", "says"),
    [
        (
            "import nothing_here",
            1,
            "ModuleNotFoundError: No module named 'nothing_here'",
        ),
        ("def send(lease: pass", 1, "SyntaxError: invalid syntax"),
        ("\nimport sys\nsys.exit('no setting')", 3, "SystemExit: no setting"),
        ("def f():\n    return {}['x']\nf()", 2, "KeyError: 'x'"),
        (
            "\nimport json\njson.loads('{')",
            3,
            "json.decoder.JSONDecodeError: Expecting",
        ),
        ("class Stop(BaseException): pass\nraise Stop('now')", 2, "handlers.Stop: now"),
        ("raise ExceptionGroup('two', [ValueError('v')])", 1, "ExceptionGroup: two"),
        ("class E(Exception):\n  def __str__(self): raise E\nraise E", 3, "handlers.E"),
        ("def __getattr__(name):\n    return 1 / 0", 2, "ZeroDivisionError: division"),
    ],
    ids=lambda each: str(each).splitlines()[0],
)
def test_a_handler_that_cannot_be_imported_is_reported_with_its_line_first(
    work_here, capsys, directory, module, line, says
):
    (directory / "handlers.py").write_text(module)

    code = work_here()

    first, second, *rest = capsys.readouterr().err.splitlines()
    path = directory / "handlers.py"
    assert code == 2
    assert first.startswith(f"error: {path}, line {line}: {says}")
    assert second == "--handler handlers:note cannot be imported:"
    assert f'File "{path}", line {line}' in "\n".join(rest)
    for frame in ("_work.py", "importlib", "typer"):
        assert not [each for each in rest if "File" in each and frame in each]


def test_an_observer_that_cannot_be_made_is_reported_with_its_line_first(
    work_here, capsys, directory
):
    (directory / "handlers.py").write_text(
        f"{HANDLERS}\nclass Broken(Observer):\n    def __init__(self): 1 / 0\n"
    )

    code = work_here("--observer", "handlers:Broken")

    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith(f"error: {directory}/handlers.py, line ")
    assert "ZeroDivisionError: division by zero\n--observer handlers:Broken" in err


@pytest.mark.parametrize(
    "name",
    [
        *("note_async", "instance", "note_wrapped", "note", "optional", "note_partial"),
        *("kinds", "kinds_async"),
    ],
)
def test_the_kind_of_worker_is_that_of_the_handler(monkeypatch, work_here, name):
    made = []

    class Made:
        def __init__(self, *_, **__):
            made.append("threads")

        def run(self, **_):
            return Tally()

    class MadeAsync:
        def __init__(self, *_, **__):
            made.append("asyncio")

        async def run(self, **_):
            return Tally()

    for module in (lenso_jobs.worker, _prepared):
        monkeypatch.setattr(module, "Worker", Made)
        monkeypatch.setattr(module, "AsyncWorker", MadeAsync)

    assert not work_here("--handler", f"handlers:{name}")
    is_async = name in {"note_async", "instance", "note_wrapped", "kinds_async"}
    assert made == ["asyncio" if is_async else "threads"]


def test_the_options_reach_the_worker(monkeypatch, work_here):
    made = {}

    class Made:
        def __init__(self, _conninfo, **options):
            made.update(options)

        def run(self, *, until_idle):
            made["until_idle"] = until_idle
            return Tally()

    for module in (lenso_jobs.worker, _prepared):
        monkeypatch.setattr(module, "Worker", Made)
    code = work_here(
        *("--queue", "slow", "--caller", "spare-worker", "--batch", "9"),
        *("--queue", "email:2", "--concurrency", "7", "--timeout", "600"),
        *("--grace", "1.5", "--on-shutdown", "lapse", "--tracebacks", "--until-idle"),
        *("--no-prepare", "--observer", "handlers:Watching"),
        user=None,  # the superuser, who may act as any caller
    )

    assert not code
    assert made.pop("handler").__name__ == "note"
    assert isinstance(made.pop("observers")[0], Observer)
    assert made == {
        "schema": "jobs_email",
        "queues": {"slow": 7, "email": 2},
        "batch": 9,
        "caller": "spare-worker",
        "grace": 1.5,
        "on_shutdown": "lapse",
        "prepare_threshold": None,
        "timeout": 600.0,
        "tracebacks": True,
        "until_idle": True,
    }


def test_a_queue_whose_name_ends_in_a_number_is_known_by_its_declaration():
    declared = ["shard:4", "email"]

    given = ["shard:4", "email:2", "shard:4:9"]
    assert _work._queues(given[:2], 3, declared) == {"shard:4": 3, "email": 2}
    assert _work._queues(given[1:], 3, declared) == {"shard:4": 9, "email": 2}
    with pytest.raises(typer.BadParameter, match="shard:4 is given twice"):
        _work._queues(given, 3, declared)


@pytest.mark.slow
def test_until_idle_ends_once_all_queues_are_worked(work, ran, enqueue, status):
    jobs = [
        enqueue(queue=queue, payload={"secret": "hush"}) for queue in ("email", "slow")
    ]

    code, errors = ended(work("note", "--queue", "slow", "--until-idle"))

    assert code == 0, errors
    assert [status(job_id) for job_id in jobs] == [("succeeded", None)] * 2


def test_the_last_resort_comes_after_the_grace(monkeypatch):
    slept, left = [], []
    monkeypatch.setattr(_work, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(_work.os, "_exit", left.append)

    _work._leave_after(30)

    assert slept == [30 + _work._LAST_RESORT_SECONDS]
    assert left == [_work.FORCED]


# A fleet: here both shards are ways to one Instance.


@pytest.fixture
def fleet_here(directory, conninfo, document, work_here, monkeypatch):
    """Run the command with a fleet's document; return the exit code."""
    shards = ["jobs/shard-0", "jobs/shard-1"]
    (directory / "fleet.json").write_text(
        json.dumps({"instance": json.loads(document()), "shards": shards})
    )
    for variable in ("JOBS_SHARD_0", "JOBS_SHARD_1"):
        monkeypatch.setenv(variable, make_conninfo(conninfo, user="email-worker"))
    monkeypatch.delenv("LENSO_JOBS_CONFIG", raising=False)

    def fleet_here(*options):
        return work_here("--until-idle", *options, config=())

    return fleet_here


def test_a_fleet_is_worked_until_all_shards_are_idle(
    fleet_here, enqueue, status, caplog
):
    caplog.set_level("INFO", "lenso_jobs.worker")
    job_id = enqueue()

    assert fleet_here("--fleet", "fleet.json", "--handler", "handlers:quiet") == 0

    assert status(job_id) == ("succeeded", None)
    for shard in range(2):
        assert f"shard {shard}: worker of queue email has stopped" in caplog.text


def test_a_handler_of_a_fleet_may_be_a_coroutine_function(fleet_here, enqueue, status):
    job_id = enqueue()

    assert fleet_here("--fleet", "fleet.json", "--handler", "handlers:quiet_async") == 0

    assert status(job_id) == ("succeeded", None)


def test_shard_chooses_the_shards_that_are_worked(fleet_here, caplog):
    caplog.set_level("INFO", "lenso_jobs.worker")

    assert fleet_here("--fleet", "fleet.json", "--shard", "1") == 0

    assert "shard 1: worker of queue email starts" in caplog.text
    assert "shard 0" not in caplog.text


def test_a_shard_that_cannot_be_reached_is_named_with_exit_code_2(
    fleet_here, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("JOBS_SHARD_1", f"host={tmp_path} dbname=x password=sesame")

    assert fleet_here("--fleet", "fleet.json", "--shard", "1") == 2

    errors = capsys.readouterr().err
    assert "shard 1 (jobs/shard-1)" in errors
    assert "the host and port in the secret jobs/shard-1" in " ".join(errors.split())
    assert "sesame" not in errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "none of them given"),
        (("--fleet", "fleet.json", "--config", "jobs.json"), "2 of them given"),
        (("--config", "jobs.json", "--shard", "1"), "--shard: needs --fleet"),
        (
            ("--fleet", "fleet.json", "--shard", "2"),
            "shards must be numbers from 0 to 1",
        ),
        (
            ("--fleet", "fleet.json", "--shard", "0", "--shard", "0"),
            "shards must not name a shard twice",
        ),
        (("--fleet", "jobs.json"), "is that of one Instance"),
    ],
)
def test_documents_and_shards_that_cannot_be_worked_are_refused(
    fleet_here, capsys, options, says
):
    assert fleet_here(*options) == 2

    errors = capsys.readouterr().err
    assert says in " ".join(errors.replace("│", " ").split())
    assert "Traceback" not in errors


def test_the_command_line_s_document_counts_before_the_environment_s(
    fleet_here, monkeypatch, caplog
):
    caplog.set_level("INFO", "lenso_jobs.worker")
    monkeypatch.setenv("LENSO_JOBS_FLEET", "fleet.json")

    assert fleet_here("--config", "jobs.json") == 0
    assert "shard" not in caplog.text

    assert fleet_here() == 0
    assert "shard 1: worker of queue email starts" in caplog.text


@pytest.mark.slow
def test_a_signal_stops_the_workers_of_all_shards(
    work, fleet_here, ran, enqueue, status, directory
):
    jobs = [enqueue(payload={"secret": f"hush-{n}"}) for n in range(3)]
    process = work("note", config=("--fleet", "fleet.json"))
    ran(3)

    process.terminate()

    code, errors = ended(process)
    assert code == 0, errors
    assert [status(job_id) for job_id in jobs] == [("succeeded", None)] * 3
    assert "shard 0: worker of queue email has stopped" in errors
    assert "shard 1: worker of queue email has stopped" in errors


@pytest.mark.slow
def test_a_grace_that_is_over_on_one_shard_is_exit_code_3(
    work, fleet_here, ran, enqueue, status
):
    job_id = enqueue(payload={"secret": "hush"})
    process = work("stay", "--grace", "0.2", config=("--fleet", "fleet.json"))
    ran(1)

    process.terminate()

    code, errors = ended(process)
    assert code == 3, errors
    assert status(job_id) == ("queued", "worker_shutdown")
