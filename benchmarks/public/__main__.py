"""`python -m benchmarks.public BOARD ...`: a board of the field, ours beside published figures."""

from __future__ import annotations

import runpy
import sys
from functools import partial

from pipeline.core.report_errors import report_errors

BOARDS = ("mnist1d", "ucr", "tables", "optimizers", "cifar")


def main(arguments: list[str]) -> int:
    """Run the module of a board with its arguments; return the exit status.

    Exits with 2 for an unknown board. If the reader of the table leaves, as `head` does, the status
    is as for other programs.
    """
    if not arguments or arguments[0] not in BOARDS:
        print(f"usage: python -m benchmarks.public {'|'.join(BOARDS)} ...", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = arguments
    return report_errors(partial(_run, f"benchmarks.public.{arguments[0]}"), debug=True)


def _run(module: str) -> int:
    """Run a module as a program; return 0."""
    runpy.run_module(module, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
