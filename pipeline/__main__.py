"""The command line: do what it says; tell in one message what went wrong.

Exit status: 0 done, 1 the run failed or was stopped, 2 the recipe or its data is wrong.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence

from pipeline.errors import report_errors

COLLECT_SELDOM = (100_000, 20, 100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return the exit status."""
    begun = time.perf_counter()
    args = list(sys.argv[1:] if arguments is None else arguments)
    # Imports and tracing make millions of objects that stay; looking through them again and again
    # for garbage took some 0.25 of 3 s until the first step.
    gc.set_threshold(*COLLECT_SELDOM)
    debug = "debug=true" in map(str.lower, args)
    return report_errors(lambda: _command(args, begun)(), debug=debug)


def _command(args: list[str], begun: float) -> Callable[[], int]:
    if "--help" in args or "-h" in args:
        return _show_guide
    if args[:1] == ["schema"]:
        return _show_schema
    if args[:1] == ["explain"]:
        return lambda: _explain(args[1:])
    if args[:1] == ["convert"]:
        return lambda: _convert(args[1:])
    if args[:1] == ["export"]:
        return lambda: _export(args[1:])
    if args[:1] == ["infer"]:
        return lambda: _infer(args[1:])
    return lambda: _launch(args, begun)


def _show_guide() -> int:
    from pipeline.config.guide import guide

    print(guide())
    return 0


def _show_schema() -> int:
    from pipeline.config.schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))
    return 0


def _explain(args: list[str]) -> int:
    from pipeline.explain import explain

    return explain(args)


def _convert(args: list[str]) -> int:
    from pipeline.convert import convert

    return convert(args)


def _export(args: list[str]) -> int:
    from pipeline.export import export

    return export(args)


def _infer(args: list[str]) -> int:
    from pipeline.infer import infer

    return infer(args)


def _launch(args: list[str], begun: float) -> int:
    from pipeline.launch import launch

    return launch(args, begun)


if __name__ == "__main__":
    sys.exit(main())
