"""What the commands on a fleet do without PL/Proxy; tests/fleet has the rest."""

import json
import sys

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from lenso_jobs.cli import main

NO_SERVER = "host=127.0.0.1 port=1 dbname=none user=postgres"


@pytest.fixture
def fleet(monkeypatch, capsys, document, tmp_path):
    """Run ``lenso-jobs fleet``: (exit code, output, errors)."""

    def fleet(name, *options, shards, router=NO_SERVER, references=None, **changes):
        for variable, url in zip(
            ("JOBS_ROUTER", "JOBS_SHARD_0", "JOBS_SHARD_1"),
            (router, *shards),
            strict=False,
        ):
            monkeypatch.setenv(variable, url)
        instance = json.loads(document(database_url_secret="jobs/router", **changes))
        named = [f"jobs/shard-{number}" for number in range(len(shards))]
        fields = {"instance": instance, "shards": references or named}
        path = tmp_path / "fleet.json"
        path.write_text(json.dumps(fields), encoding="utf-8")
        monkeypatch.setenv("LENSO_JOBS_FLEET", str(path))
        monkeypatch.setattr(sys, "argv", ["lenso-jobs", "fleet", name, *options])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return caught.value.code or 0, said.out, said.err

    return fleet


COMMANDS = ["setup", "plan", "check", "upgrade", "configure", "health", "stats"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_secret_is_named_before_anything_is_done(name, fleet):
    references = ["jobs/shard-0", "jobs/nowhere"]

    code, said, errors = fleet(name, references=references, shards=[NO_SERVER])
    assert (code, said) == (2, "")
    assert errors == (
        "error: the secret jobs/nowhere is not in the environment: set JOBS_NOWHERE\n"
    )


def test_health_names_the_shard_and_one_that_is_not_reached(fleet, conninfo):
    assert fleet("health", shards=[conninfo]) == (
        0,
        "nothing is wrong with any shard\n",
        "",
    )

    code, said, errors = fleet("health", shards=[conninfo, NO_SERVER])
    assert (code, errors) == (1, "")
    assert said.startswith(
        "  1  CRITICAL  shard_unreachable  shard 1: the server cannot"
    )


def test_health_of_a_shard_without_an_instance_says_to_set_it_up(fleet, new_database):
    code, said, errors = fleet("health", shards=[new_database()])
    assert (code, errors) == (1, "")
    assert "holds no Instance" in said
    assert "Run lenso-jobs fleet setup" in said
    assert "Start its server" not in said


def test_stats_name_the_shard_and_one_that_is_not_reached(fleet, conninfo, enqueue):
    enqueue()

    code, said, errors = fleet("stats", shards=[conninfo, NO_SERVER])
    assert code == 2
    assert ["0", "email", "1"] in [line.split()[:3] for line in said.splitlines()]
    assert errors.startswith("error: shard 1: the server cannot be reached: ")
    assert errors.endswith("and the host and port in its secret.\n")


@pytest.mark.usefixtures("conninfo")  # makes the role
def test_a_role_that_is_no_superuser_is_refused_at_the_router(fleet, new_database):
    router = make_conninfo(new_database(), user="accounts")

    code, said, errors = fleet("setup", shards=[NO_SERVER], router=router)
    assert (code, said) == (1, "")
    assert "the secret jobs/router must hold a superuser's URL" in errors


def test_a_router_without_plproxy_is_refused_and_the_package_is_named(
    fleet, new_database, fresh_prefix
):
    router = new_database()
    with psycopg.connect(router) as connection:
        if connection.execute(
            "select name from pg_available_extensions where name = 'plproxy'"
        ).fetchone():
            pytest.skip("this server has PL/Proxy")

    code, said, errors = fleet(
        "setup", shards=[NO_SERVER], router=router, role_prefix=fresh_prefix
    )
    assert (code, said) == (1, "")
    assert "the server of the router has no extension plproxy" in errors
    assert "apt-get install postgresql-15-plproxy" in errors


def test_an_option_of_another_command_is_refused_by_plan(fleet):
    code, said, errors = fleet("plan", "configure", "--repair", shards=[NO_SERVER])
    assert (code, said) == (2, "")
    assert "is an option of upgrade" in errors
