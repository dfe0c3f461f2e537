"""`python -m pipeline convert weights|records ...`: from one format into another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.errors import UsageError
from pipeline.problems import no_such


def convert(args: Sequence[str]) -> int:
    """Convert what the first argument names and return the exit status.

    Raises UsageError for anything else than weights or records.
    """
    kinds: dict[str, Callable[[Sequence[str]], int]] = {"weights": _weights, "records": _records}
    if not args:
        raise UsageError(["convert"], f"must be followed by one of {', '.join(kinds)}")
    if args[0] not in kinds:
        raise UsageError(["convert", args[0]], no_such("conversion", args[0], kinds))
    return kinds[args[0]](args[1:])


def _weights(args: Sequence[str]) -> int:
    from pipeline.weights.command import convert_weights

    return convert_weights(args)


def _records(args: Sequence[str]) -> int:
    from pipeline.convert_records import convert_records

    return convert_records(args)
