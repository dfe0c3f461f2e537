"""`python -m tests.scheduler --schedules 100 [--seed N]`: random schedules of three recipes.

Jobs with a mirror are killed, stopped, shrunk from 4 to 3 to 1 devices, and moved to an empty
folder, where the mirror alone is left. They are started again after exit status 75 and after a
kill, and never after 1. Operations of the object store fail, and deliver halves of files. Losses,
evaluations and weights must be those of an unbroken run, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.scheduler.schedules import RECIPES, Scheduler


def main() -> int:
    """Print the tally; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.scheduler", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=float, default=0.05, help="share of operations")
    parser.add_argument("--minutes", type=float, default=60, help="start no job after this time")
    parser.add_argument("--processes", action="store_true", help="4, 3 and 1 processes")
    options = parser.parse_args()
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scheduler = Scheduler(
            folder, options.seed, folder / "cache", options.faults, in_processes=options.processes
        )
        for number in range(options.schedules):
            if time.monotonic() - start_s > 60 * options.minutes:
                break
            scheduler.run_job(list(RECIPES)[number % len(RECIPES)])
            counts = {**asdict(scheduler.tally), "wrong": len(scheduler.tally.wrong)}
            print(counts, f"{time.monotonic() - start_s:.0f} s", flush=True)
    print("\n".join(scheduler.tally.wrong))
    return 1 if scheduler.tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
