"""`python -m pipeline convert weights|records|model ...`: from one format into another."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from pipeline.cli.arguments.commands import conversions
from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.core.errors import UsageError
from pipeline.core.files.error_text import no_such

HELP = """usage: python -m pipeline convert weights SOURCE TARGET [+recipe=NAME] [KEY=VALUE ...]
       python -m pipeline convert records OUT [--overwrite] dataset=NAME [KEY=VALUE ...]
       python -m pipeline --plugin FILE convert model MODULE TARGET [SIZE ...] [KEY=VALUE ...]

Convert weights from one format and one set of names into another, a dataset into ArrayRecord files,
or a network of PyTorch into a recipe. `convert weights --help` and the others say more.

example: python -m pipeline convert weights theirs.pth ours.safetensors +recipe=resnet18_cifar10
"""


def main(args: Sequence[str]) -> int:
    """Convert what the first argument names and return the exit status.

    Raises UsageError for anything else than weights, records or model.
    """
    kinds = conversions()
    if asks_for_help(args[:1]):
        return show_usage(HELP)
    if not args:
        raise UsageError(["convert"], f"must be followed by one of {', '.join(kinds)}")
    if args[0] not in kinds:
        raise UsageError(["convert", args[0]], no_such("conversion", args[0], kinds))
    status: int = import_module(f"pipeline.cli.convert_{args[0]}").main(args[1:])
    return status
