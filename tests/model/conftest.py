"""Sessions on an Instance whose leases and waits are hours long."""

from __future__ import annotations

import pytest

from jobs_machine import POLICY, ROLES, Bench


@pytest.fixture
def bench(conninfo, configure, prefix):
    configure(**POLICY)
    roles = {role: role for role, _ in ROLES} | {"operator": f"{prefix}_duty"}
    bench = Bench(conninfo, roles)
    yield bench
    bench.close()
