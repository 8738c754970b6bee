"""Crashes under load, and whether every promise was kept.

    python tests/chaos [--seconds 120] [--seed N] [--sabotage NAME] [--keep DIR]

Producers and workers keep journals of what they were answered, while their server and
they themselves are killed, stopped, cut off and started again. Then the journals are
compared with the tables. Exits with 1 where something was found. The seed chooses what
happens in which order; what it meets is up to the machine. With --sabotage the Instance
has a fault, and the check that is there for it must find it.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import time
from pathlib import Path

from chaos import blow, blow_over_fault
from sabotage import FAULTS
from servers import Server, ground


def main():
    """Blow, check, tell."""
    parser = argparse.ArgumentParser(
        prog="python tests/chaos", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--sabotage", choices=FAULTS)
    parser.add_argument("--keep", type=Path, help="where to copy what is wrong")
    options = parser.parse_args()
    print(f"seed: {options.seed}", flush=True)

    started = time.monotonic()
    with ground() as directory, Server(directory / "cluster") as server:
        if options.sabotage:
            found = blow_over_fault(server, directory, options.seed, options.sabotage)
            is_right = FAULTS[options.sabotage][0] in found
        else:
            happened, found = blow(server, directory, options.seconds, options.seed)
            is_right = not found
            for name, value in happened.items():
                print(f"{name}: {value}")
        for name, sentences in found.items():
            print(f"{name}: {len(sentences)}")
            for sentence in sentences[:5]:
                print(f"    {sentence}")
        if not is_right and options.keep:
            ignored = shutil.ignore_patterns(".s.PGSQL*")
            shutil.copytree(directory, options.keep, ignore=ignored)
    print(f"{len(found)} checks found something; {time.monotonic() - started:.0f} s")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
