"""Crashes under load, in short; ``python tests/chaos`` is the long form."""

from __future__ import annotations

import pytest

from chaos import blow, blow_over_fault
from sabotage import FAULTS
from servers import Server, ground

pytestmark = pytest.mark.slow


@pytest.fixture
def directory():
    with ground() as directory:
        yield directory


def test_every_promise_outlives_a_storm(directory):
    with Server(directory / "cluster") as server:
        happened, found = blow(server, directory, 5, 1)

    assert found == {}
    assert all(happened["acts"].values()), happened


def test_a_calm_instance_without_a_fault_is_found_sound(directory):
    with Server(directory / "cluster") as server:
        assert blow_over_fault(server, directory, 1) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(directory, fault):
    wanted, *_ = FAULTS[fault]

    with Server(directory / "cluster") as server:
        assert wanted in blow_over_fault(server, directory, 1, fault)
