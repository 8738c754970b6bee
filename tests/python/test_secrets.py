from __future__ import annotations

import os
import subprocess
import sys
import traceback
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs import DirectorySecrets, EnvironmentSecrets, SecretNotFound, prepare
from lenso_jobs._prepare import connection_string
from lenso_jobs.embedded import EmbeddedServer

PASSWORD = "hush-hush"


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "jobs").mkdir()
    return tmp_path


@pytest.fixture
def from_directory(directory):
    return DirectorySecrets(directory)


# The environment.


@pytest.mark.parametrize(
    ("reference", "variable"),
    [
        ("jobs/database-url", "JOBS_DATABASE_URL"),
        ("JOBS_DATABASE_URL", "JOBS_DATABASE_URL"),
        ("a.b_c-d/e9", "A_B_C_D_E9"),
    ],
)
def test_a_reference_names_a_variable(reference, variable, monkeypatch):
    monkeypatch.setenv(variable, "the secret")

    assert EnvironmentSecrets()(reference) == "the secret"


def test_a_missing_or_empty_variable_is_named(monkeypatch):
    monkeypatch.delenv("JOBS_DATABASE_URL", raising=False)
    for _ in range(2):
        with pytest.raises(SecretNotFound, match="set JOBS_DATABASE_URL"):
            EnvironmentSecrets()("jobs/database-url")
        monkeypatch.setenv("JOBS_DATABASE_URL", "")


# A directory.


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_the_last_line_break_is_not_part_of_the_secret(
    ending, directory, from_directory
):
    (directory / "jobs" / "url").write_bytes(f"the secret{ending}".encode())

    assert from_directory("jobs/url") == "the secret"


def test_only_one_line_break_is_taken_away_and_nothing_else(directory, from_directory):
    (directory / "url").write_text(" the\nsecret \n\n")

    assert from_directory("url") == " the\nsecret \n"


def test_a_secret_may_be_a_link_as_kubernetes_mounts_it(directory, from_directory):
    (directory / "..data").mkdir()
    (directory / "..data" / "url").write_text("the secret")
    (directory / "url").symlink_to("..data/url")

    assert from_directory("url") == "the secret"


@pytest.mark.parametrize(
    "reference",
    ["../url", "a/../../url", "..", ".", "/etc/passwd", "a//b", "a/", "/", "", "./a"],
)
def test_a_reference_cannot_leave_the_directory(reference, directory):
    (directory.parent / "url").write_text("another secret")
    (directory / "a").mkdir()

    with pytest.raises(SecretNotFound, match="no path below"):
        DirectorySecrets(directory)(reference)


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_file_is_not_a_secret(content, directory, from_directory):
    (directory / "url").write_text(content)

    with pytest.raises(SecretNotFound, match="is empty"):
        from_directory("url")


def test_a_file_that_cannot_be_read_is_named_with_the_reason(directory, from_directory):
    (directory / "garbled").write_bytes(PASSWORD.encode() + b"\xff")

    for reference, reason in (
        ("missing", "No such file"),
        ("missing/url", "No such file"),
        ("jobs", "Is a directory"),
        ("garbled", "UTF-8"),
        ("garbled/url", "Not a directory"),
        ("nul\0", "cannot be read"),
    ):
        with pytest.raises(SecretNotFound, match=reason) as caught:
            from_directory(reference)
        assert PASSWORD not in "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
def test_a_file_without_permission_is_reported_as_such(directory):
    path = directory / "url"
    path.write_text(PASSWORD)
    path.chmod(0)
    program = (
        "import sys; from lenso_jobs import DirectorySecrets\n"
        "try: DirectorySecrets(sys.argv[1])('url')\n"
        "except LookupError as error: print(error)"
    )
    if os.geteuid() == 0:
        # Root reads every file, unless it has given that right away.
        setpriv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    else:
        setpriv = []

    result = subprocess.run(
        [*setpriv, sys.executable, "-c", program, directory],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )

    assert "Permission denied" in result.stdout
    assert PASSWORD not in result.stdout


def test_the_repr_of_a_resolver_shows_where_it_looks(tmp_path):
    assert repr(DirectorySecrets(tmp_path)) == f"DirectorySecrets('{tmp_path}')"


# What becomes of the URL.


@pytest.fixture
def refused(configuration, capfd, caplog):
    """Prepare with a URL that is to be refused, and return all that was said of it."""

    def refused(url, error):
        with pytest.raises(error) as caught:
            prepare(configuration(), lambda _: url)
        shown = "\n".join(
            line
            for each in traceback.TracebackException.from_exception(
                caught.value, capture_locals=False
            ).format(chain=True)
            for line in each.splitlines()
        )
        captured = capfd.readouterr()
        return f"{shown}{caught.value!r}{captured.out}{captured.err}{caplog.text}"

    return refused


MALFORMED = [
    f"postgresql://ada:{PASSWORD}",
    f"postgresql://ada:{PASSWORD}@[::1/jobs",
    f"postgresql://ada:p@{PASSWORD}@localhost/jobs",
    f"postgresql://ada:p/{PASSWORD}@localhost/jobs",
    f"postgres://ada:{PASSWORD}@@localhost/jobs",
    f"postgresql://ada:x@localhost/jobs?password={PASSWORD}&unknown=1",
    f"postgresql://ada:%zz{PASSWORD}@localhost/jobs",
    f"password={PASSWORD} =",
    f"password={PASSWORD} host=localhost {PASSWORD}",
    f"password='{PASSWORD}",
    f"passwort={PASSWORD}",
    f"mysql://ada:{PASSWORD}@localhost/jobs",
    f"{PASSWORD}\ud800",
    f"postgresql://ada:{PASSWORD}\ud800@localhost/jobs",
    PASSWORD,
    "postgresql://ada@hush-hush@nowhere.invalid",
]


@pytest.mark.parametrize("url", MALFORMED, ids=range(len(MALFORMED)))
def test_nothing_of_a_malformed_url_is_shown(url, refused):
    said = refused(url, SecretNotFound)

    assert PASSWORD not in said


@pytest.mark.parametrize("url", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_url_is_reported_by_its_reference(url, configuration):
    with pytest.raises(SecretNotFound, match="jobs/database-url"):
        connection_string(configuration(), lambda _: url)


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        (
            "postgresql://ada:p%40s%2Fs@db.example:5433/jobs?sslmode=require",
            {
                "user": "ada",
                "password": "p@s/s",
                "host": "db.example",
                "port": "5433",
                "dbname": "jobs",
                "sslmode": "require",
            },
        ),
        ("postgres:///jobs", {"dbname": "jobs"}),
        (
            "postgresql://ada:p?s#s@localhost",
            {"user": "ada", "password": "p?s#s", "host": "localhost"},
        ),
        (
            "postgresql://a,b:1/jobs?application_name=x@y/z",
            {
                "host": "a,b",
                "port": ",1",
                "dbname": "jobs",
                "application_name": "x@y/z",
            },
        ),
        ("dbname=jobs password=p@s/s@s", {"dbname": "jobs", "password": "p@s/s@s"}),
    ],
)
def test_a_sound_url_keeps_every_field(url, fields, configuration):
    conninfo = connection_string(configuration(), lambda _: url)

    assert conninfo_to_dict(conninfo) == fields


def test_nothing_of_the_url_is_shown_when_the_host_cannot_be_reached(refused, tmp_path):
    url = f"postgresql://ada:{PASSWORD}@/jobs?host={tmp_path}"

    said = refused(url, psycopg.OperationalError)

    assert PASSWORD not in said
    assert url not in said


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scram-sha-256", "md5"])
def test_nothing_of_the_url_is_shown_when_the_password_is_wrong(
    method, refused, locked
):
    with locked(method) as conninfo:
        said = refused(f"{conninfo} password={PASSWORD}", psycopg.OperationalError)

    assert "password authentication failed" in said
    assert PASSWORD not in said


@pytest.fixture
def locked():
    """A server that asks one role for a password."""

    @contextmanager
    def locked(method):
        with EmbeddedServer() as server:
            with psycopg.connect(server.conninfo(), autocommit=True) as connection:
                connection.execute(f"set password_encryption = '{method}'")
                connection.execute("create role ada login password 'right'")
                (file,) = connection.execute("show hba_file").fetchone()
                connection.execute(
                    "copy (values ('local all postgres trust'),"
                    f" ('local all all {method}')) to '{file}'"
                )
                connection.execute("select pg_reload_conf()")
            yield server.conninfo(user="ada")

    return locked


def test_the_last_line_break_of_a_variable_is_not_part_of_the_secret(monkeypatch):
    for end in ("", "\n", "\r\n"):
        monkeypatch.setenv("JOBS_DATABASE_URL", f"postgresql:///jobs{end}")
        assert EnvironmentSecrets()("jobs/database-url") == "postgresql:///jobs"
