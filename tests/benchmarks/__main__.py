"""Every figure of the README beside its floor, in one command.

    python tests/benchmarks [--rounds 5] [--only NAME ...] [--scale 1] [--out DIR]
        [--add]

The server is the one in LENSO_JOBS_SERVER_URL, else one of our own on disk (PG_BINDIR
chooses which). Absolute figures mean little on a shared machine. A ratio is the
median over the rounds, each to a figure of the same round. --scale 0.1 is a rehearsal.
--add keeps the other measures in DIR, if they were taken in the same way.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import measures
import report
from stage import describe, serving, stage


def main():
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [*measures.MEASURES, *measures.PLOTTED]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--add", action="store_true")
    options = parser.parse_args()

    rows, curves = {}, {}
    with serving(options.scale) as server:
        for name in options.only:
            started = time.monotonic()
            with stage(server) as it:
                machine = describe(it) | {
                    "rounds": options.rounds,
                    "scale": options.scale,
                }
                if name in measures.MEASURES:
                    run = measures.MEASURES[name]
                    for row, figures in run(it, options.rounds, options.scale).items():
                        rows[row] = report.summary(row, figures)
                        print(f"{row}: {rows[row]['ratio']:.2f}", flush=True)
                else:
                    curves[name] = getattr(measures, name)(it, options.scale)
            print(f"{name} took {time.monotonic() - started:.0f} s", flush=True)
            if options.add:
                rows = report.kept(options.out, machine) | rows
            table = report.write(options.out, machine, rows, curves)
    print(table)


if __name__ == "__main__":
    main()
