import os
import random

from jobs_machine import run


def test_every_call_answers_and_leaves_behind_what_the_model_says(bench):
    number = int(os.environ.get("LENSO_JOBS_SEED", random.randrange(2**32)))
    print(f"LENSO_JOBS_SEED={number}")  # shown with the failure

    run(bench, examples=15, number=number)

    assert bench.steps.total() > 500
