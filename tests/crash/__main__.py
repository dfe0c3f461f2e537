"""Kill runs with SIGKILL at random moments, resume them, and compare.

    python -m tests.crash --kills 200 [--seed N]

Runs of LeNet-5 in sinks of 1000 steps are killed at moments drawn uniformly from their lifetime,
one in three while a checkpoint is being written. The same command resumes them until they are done.
Each run must then equal an uninterrupted run to the bit: every line of metrics.jsonl and
evals.jsonl, the same checkpoints, the same bits in every array.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.killing import Crashes, Tally

EVERY_STEPS = 100


def main() -> int:
    """Print the tally; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--minutes", type=float, default=60, help="start no run after this time")
    options = parser.parse_args()
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        crashes = Crashes(Path(folder), options.seed, options.steps, EVERY_STEPS)
        while crashes.tally.kills < options.kills and _minutes_since(start_s) < options.minutes:
            crashes.kill_one_run(options.kills)
            tally = crashes.tally
            print(f"{tally.kills} kills, {tally.runs} runs", file=sys.stderr, flush=True)
    print_tally(crashes.tally, options.seed, _minutes_since(start_s))
    return 1 if crashes.tally.wrong else 0


def _minutes_since(start_s: float) -> float:
    return (time.monotonic() - start_s) / 60


def print_tally(tally: Tally, seed: int, minutes: float) -> None:
    """Print the counts as a table, and the problems to stderr."""
    rows = {
        "kills": tally.kills,
        "of these with a checkpoint half written": tally.while_writing,
        "resumes": tally.resumes,
        "runs": tally.runs,
        "mismatches": len(tally.mismatches),
        "unreadable": len(tally.unreadable),
        "lost beyond the last interval": len(tally.lost),
        "failed": len(tally.failed),
        "most steps done again": tally.most_lost_steps,
        "seed": seed,
        "minutes": round(minutes, 1),
    }
    for name, value in rows.items():
        print(f"{name:<40} {value:>12}")
    for problem in tally.wrong:
        print(f"wrong: {problem}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
