"""Flat where the field degrades, at a size that takes minutes: pytest -m benchmark."""

import pytest

import measures
import report
from stage import serving, stage

pytestmark = [pytest.mark.benchmark, pytest.mark.xdist_group("benchmark")]


@pytest.mark.parametrize("name", ["growth", "running", "kept", "held", "purging"])
def test_it_stays_flat(name):
    with serving() as server, stage(server) as it:
        row = report.summary(name, measures.MEASURES[name].run(it, 3, 0.4))

    assert report.reached(row), (row["ratio"], row["figures"])
