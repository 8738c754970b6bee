"""The places of a fleet: what of the secrets goes where, and what is refused."""

import json

import pytest
from psycopg.conninfo import conninfo_to_dict

from lenso_jobs import Fleet, SecretNotFound
from lenso_jobs.operator._router import Places

URLS = {
    "jobs/database-url": "postgresql://root@router/jobs",
    "jobs/shard-0": "postgresql://root:p%40ss@db-0,db-0b:6432/jobs?sslmode=verify-full"
    "&application_name=x&passfile=/p&sslkey=/k&options=-cx%3Dy&connect_timeout=3",
    "jobs/shard-1": "host=db-1 dbname='two words' user=root password='p'",
    "jobs/accounts": "sesame",
}


@pytest.fixture
def places(document):
    """Resolve the secrets of a fleet of two shards, some of them changed."""

    def places(**changes):
        fleet = Fleet.from_json(
            json.dumps(
                {
                    "instance": json.loads(document()),
                    "shards": ["jobs/shard-0", "jobs/shard-1"],
                    "passwords": {"accounts": "jobs/accounts"},
                }
            )
        )
        urls = URLS | {
            f"jobs/{name.replace('_', '-')}": v for name, v in changes.items()
        }
        return Places.of(fleet, urls.__getitem__, pooler_ok=False)

    return places


def test_the_router_gets_the_address_of_a_shard_and_no_role(places):
    found = conninfo_to_dict(places().server(0))
    assert found["host"] == "db-0,db-0b"
    assert found["sslmode"] == "verify-full"
    assert not found.keys() & {"user", "password", "passfile", "sslkey"}
    assert "x" not in (found["options"], found.get("application_name"))
    assert conninfo_to_dict(places().server(1))["dbname"] == "two words"


def test_a_command_waits_10_seconds_for_a_server_unless_its_url_says_else(places):
    found = places()
    waits = [
        conninfo_to_dict(url)["connect_timeout"]
        for url in (found.router, *found.shards)
    ]
    assert [int(each) for each in waits] == [10, 3, 10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard_1": "dbname=jobs"}, "jobs/shard-1 must name host and database"),
        (
            {"shard_0": "host=db-0 user=root"},
            "jobs/shard-0 must name host and database",
        ),
        ({"shard_0": "host='a user=b' dbname=x"}, "jobs/shard-0 must not have user="),
        ({"shard_0": ""}, "the secret jobs/shard-0 is empty"),
        ({"accounts": ""}, "the secret jobs/accounts is no password"),
        ({"accounts": "a\0b"}, "the secret jobs/accounts is no password"),
        ({"accounts": None}, "the secret jobs/accounts is no password"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused_by_its_name(changes, message, places):
    with pytest.raises(SecretNotFound) as caught:
        places(**changes)
    assert message in str(caught.value)
    assert "db-0" not in str(caught.value)


def test_no_repr_shows_a_secret(places):
    shown = repr(places())
    assert "jobs/shard-0" in shown
    for secret in ("p@ss", "p%40ss", "sesame", "db-0", "root"):
        assert secret not in shown
