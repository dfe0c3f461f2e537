"""`python -m tests.power_cut --moments 200 [--seed N]`: cut the power at random moments, resume.

Every file operation of a run is recorded in its order. At a random moment only what was synced is
taken to be there; of changes of names that were not, each has happened or not. The same command
must then continue from the newest checkpoint that the run had said is on disk, or from a newer one,
without a loss, and end bit for bit as an unbroken run. With `--ext4` the power is cut from an
ext4 file system instead, which root may mount: it stops at once and replays its journal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

from tests.faults.preload import reason_to_skip
from tests.power_cut.cuts import KEEPS, RecordedCuts, Tally
from tests.power_cut.ext4 import Ext4Cuts, reason_to_skip_ext4


def main() -> int:
    """Print the counts and what is wrong; 1 where anything is."""
    parser = argparse.ArgumentParser(prog="python -m tests.power_cut", description=__doc__)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=60, help="after so many no run is begun")
    parser.add_argument("--ext4", action="store_true", help="on an ext4 file system, as root")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work there, and keep bad cases")
    asked = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if reason := reason_to_skip_ext4(folder) if asked.ext4 else reason_to_skip():
            print(f"no power is cut: {reason}", file=sys.stderr)
            return 0
        with ExitStack() as stack:
            cuts = (
                Ext4Cuts(folder, asked.seed)
                if asked.ext4
                else stack.enter_context(RecordedCuts(folder, asked.seed))
            )
            tally = cuts.tally
            for keep in cycle(KEEPS):
                if tally.moments >= asked.moments or _minutes_since(begun) >= asked.minutes:
                    break
                cuts.cut_one_run(keep)
                print(f"{tally.moments} moments, {len(tally.wrong)} wrong", file=sys.stderr)
    show(tally, asked.seed, _minutes_since(begun))
    return 1 if tally.wrong else 0


def _minutes_since(begun: float) -> float:
    return (time.monotonic() - begun) / 60


def show(tally: Tally, seed: int, minutes: float) -> None:
    """Print the table, and what is wrong."""
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
