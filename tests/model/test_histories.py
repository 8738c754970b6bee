import os
import random

import pytest

from jobs_machine import run


@pytest.mark.parametrize("examples", [5, pytest.param(15, marks=pytest.mark.slow)])
def test_every_call_returns_and_leaves_behind_the_model_s_state(bench, examples):
    number = int(os.environ.get("LENSO_JOBS_SEED", random.randrange(2**32)))
    print(f"LENSO_JOBS_SEED={number}")  # shown with the failure

    run(bench, examples=examples, number=number)

    assert bench.steps.total() > 33 * examples
