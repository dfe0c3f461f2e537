"""Cut the power of runs at random moments and resume them.

    python -m tests.power_cut --moments 200 [--seed N]

Every file operation of a run is recorded in order. After a cut only synced contents are on the
disk; each unsynced change of a name has happened or not. The same command must then resume from the
newest checkpoint that the run relied on, or a newer one, and end with the same bits as an
uninterrupted run. With `--ext4` the power of an ext4 file system is cut instead, which needs root:
it stops at once and replays its journal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

from tests.faults.preload import explain_skip
from tests.power_cut.cuts import KEEPS, RecordedCuts, Tally
from tests.power_cut.ext4 import Ext4Cuts, explain_skip_ext4


def main() -> int:
    """Print the counts and the problems; return 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.power_cut", description=__doc__)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=60, help="start no run after this time")
    parser.add_argument("--ext4", action="store_true", help="on an ext4 file system, as root")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="for failed cases")
    options = parser.parse_args()
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if reason := explain_skip_ext4(folder) if options.ext4 else explain_skip():
            print(f"no power is cut: {reason}", file=sys.stderr)
            return 0
        with ExitStack() as stack:
            cuts = (
                Ext4Cuts(folder, options.seed)
                if options.ext4
                else stack.enter_context(RecordedCuts(folder, options.seed))
            )
            tally = cuts.tally
            for keep in cycle(KEEPS):
                if tally.moments >= options.moments or _minutes_since(start_s) >= options.minutes:
                    break
                cuts.cut_one_run(keep)
                print(f"{tally.moments} moments, {len(tally.wrong)} wrong", file=sys.stderr)
    print_tally(tally, options.seed, _minutes_since(start_s))
    return 1 if tally.wrong else 0


def _minutes_since(start_s: float) -> float:
    return (time.monotonic() - start_s) / 60


def print_tally(tally: Tally, seed: int, minutes: float) -> None:
    """Print the counts as a table, and the problems to stderr."""
    rows = {
        "moments": tally.moments,
        "of these with a checkpoint on disk": tally.with_checkpoint,
        "of these in a run resumed after a cut": tally.during_resume,
        "runs resumed": tally.resumed,
        "runs that were done": tally.done,
        "wrong": len(tally.wrong),
        "seed": seed,
        "minutes": round(minutes, 1),
    }
    for name, value in rows.items():
        print(f"{name:<40} {value:>12}")
    for problem in tally.wrong:
        print(f"wrong: {problem}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
