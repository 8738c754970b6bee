"""The sessions by what their role may do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest


@pytest.fixture(autouse=True)
def _no_wait_is_for_ever(no_wait_is_for_ever):
    """Fail a test that waits without an end."""


@pytest.fixture
def as_callers(request):
    """The sessions by what their role may do, each opened when it is asked for."""

    class Sessions(Mapping):
        def __getitem__(self, role):
            return request.getfixturevalue(role)

        def __iter__(self):
            return iter(("producer", "worker", "observer", "operator", "stranger"))

        def __len__(self):
            return 5

    return Sessions()
