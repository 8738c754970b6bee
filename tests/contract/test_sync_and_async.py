"""The two clients, written twice by hand, held equal."""

import inspect

import pytest

from lenso_jobs import AsyncJobs, Jobs, prepare, prepare_async

# The magic methods that are ways to use a client, by what asyncio calls them.
COUNTERPARTS = {"__enter__": "__aenter__", "__exit__": "__aexit__"}


def surface(client):
    """What an application may call, constructor and context manager included."""
    return {
        name: member
        for name, member in vars(client).items()
        if inspect.isfunction(member)
        and (not name.startswith("_") or name.startswith("__"))
    }


SYNC, ASYNC = surface(Jobs), surface(AsyncJobs)
COROUTINES = sorted(SYNC.keys() - {"__init__", "__repr__"})
every_method = pytest.mark.parametrize("name", sorted(SYNC))


def counterpart(name):
    return ASYNC[COUNTERPARTS.get(name, name)]


def first_sentence(function):
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


def test_the_two_clients_have_the_same_methods():
    assert sorted(COUNTERPARTS.get(name, name) for name in SYNC) == sorted(ASYNC)
    assert {"enqueue", "claim", "wait", "fail_many", "close"} < SYNC.keys()


@every_method
def test_a_method_takes_and_answers_the_same_in_both(name):
    # Names of types, so an alias such as Connection stands for each client's own.
    assert inspect.signature(SYNC[name]) == inspect.signature(counterpart(name))


@every_method
def test_a_method_says_first_what_the_other_says(name):
    assert first_sentence(SYNC[name]) == first_sentence(counterpart(name))


@pytest.mark.parametrize("name", COROUTINES)
def test_every_method_for_asyncio_is_awaited(name):
    assert inspect.iscoroutinefunction(counterpart(name))
    assert not inspect.iscoroutinefunction(SYNC[name])


def test_the_two_ways_to_prepare_take_the_same_and_answer_their_client():
    one, other = inspect.signature(prepare), inspect.signature(prepare_async)

    assert one.parameters == other.parameters
    assert (one.return_annotation, other.return_annotation) == ("Jobs", "AsyncJobs")
    assert inspect.iscoroutinefunction(prepare_async)
    assert "``prepare``" in first_sentence(prepare_async)


def test_the_two_clients_are_described_for_the_same_arguments():
    described = [
        [
            line.strip().partition(":")[0]
            for line in inspect.getdoc(client).partition("Args:")[2].splitlines()
            if line.startswith("    ") and not line.startswith("     ")
        ]
        for client in (Jobs, AsyncJobs)
    ]

    arguments = [name for name in inspect.signature(Jobs).parameters if name != "self"]
    assert described[0] == arguments
    assert described[1][: len(arguments)] == arguments
