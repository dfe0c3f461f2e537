"""`python -m benchmarks.public BOARD ...`: a board of the field, ours beside published figures."""

from __future__ import annotations

import runpy
import sys

BOARDS = ("mnist1d", "ucr", "tables", "optimizers", "cifar")


def main(arguments: list[str]) -> None:
    """Run the module of a board with its arguments. Exits with 2 for an unknown board."""
    if not arguments or arguments[0] not in BOARDS:
        print(f"usage: python -m benchmarks.public {'|'.join(BOARDS)} ...", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = arguments
    runpy.run_module(f"benchmarks.public.{arguments[0]}", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
