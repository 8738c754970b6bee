"""The client that blocks is written from the one for asyncio, and both are complete."""

import importlib.util
import inspect
from pathlib import Path

import pytest

from lenso_jobs import AsyncJobs, Jobs, _async_client, _client, prepare, prepare_async
from lenso_jobs._calls import Verbs

TOOL = Path(__file__).parents[2] / "tools" / "async_to_sync.py"


def surface(client):
    """The methods that an application may call."""
    return {
        name: member
        for name, member in vars(client).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


every_method = pytest.mark.parametrize(
    ("client", "name"),
    [(client, name) for client in (Jobs, AsyncJobs) for name in surface(client)],
)


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_client_that_blocks_is_what_the_tool_writes(tool):
    pytest.importorskip("ruff", reason="the tool formats with ruff, of the extra lint")
    source = Path(_async_client.__file__).read_text(encoding="utf-8")
    target = Path(_client.__file__).read_text(encoding="utf-8")

    assert tool.converted(source) == target, f"run python tools/{TOOL.name}"


def test_the_tool_refuses_a_source_that_one_of_its_rules_does_not_fit(tool):
    with pytest.raises(ValueError, match="nothing matches"):
        tool.converted("pass\n")


def test_nothing_of_asyncio_is_left_in_the_client_that_blocks():
    text = Path(_client.__file__).read_text(encoding="utf-8").partition("\n")[2]

    assert "sync" not in text.lower().replace("async_to_sync", "")
    assert "await" not in text


def test_the_two_clients_have_the_same_methods():
    assert list(surface(Jobs)) == list(surface(AsyncJobs)) == list(surface(Verbs))
    assert {"enqueue", "claim", "wait", "fail_many", "release", "close"} < set(
        surface(Jobs)
    )


@every_method
def test_a_method_takes_and_returns_the_same_in_both(client, name):
    # Names of types, so an alias such as Connection stands for each client's own.
    signatures = [inspect.signature(surface(each)[name]) for each in (Jobs, AsyncJobs)]

    assert signatures[0] == signatures[1]
    assert inspect.iscoroutinefunction(surface(client)[name]) == (client is AsyncJobs)


@every_method
def test_the_help_of_a_method_is_complete(client, name):
    doc = inspect.getdoc(surface(client)[name])
    arguments = inspect.signature(surface(client)[name]).parameters.keys() - {"self"}
    sections = doc.split("\n\n")

    if name == "close":
        return
    assert any(section.startswith("Returns:\n    ") for section in sections)
    assert any(section.startswith("Raises:\n    ") for section in sections)
    for section in sections:
        if section.startswith("Args:"):
            assert {
                line.strip().partition(":")[0]
                for line in section.splitlines()[1:]
                if not line.startswith("     ")
            } == arguments


@pytest.mark.parametrize("client", [Jobs, AsyncJobs])
def test_the_help_of_a_client_describes_its_arguments(client):
    doc = inspect.getdoc(client)

    for argument in inspect.signature(client).parameters:
        assert f"\n    {argument}: " in doc
    assert f"psycopg.{'Async' * (client is AsyncJobs)}Connection``" in doc


def test_the_two_ways_to_prepare_take_the_same_and_return_their_client():
    one, other = inspect.signature(prepare), inspect.signature(prepare_async)

    assert one.parameters == other.parameters
    assert (one.return_annotation, other.return_annotation) == ("Jobs", "AsyncJobs")
    assert inspect.iscoroutinefunction(prepare_async)
    assert "``prepare``" in inspect.getdoc(prepare_async)
