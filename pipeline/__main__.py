"""The command line: do what it says; tell in one message what went wrong.

Exit status: 0 done, 1 the run failed or was stopped, 2 the recipe or its data is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from pipeline.errors import report_errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return the exit status."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    return report_errors(lambda: _command(args)(), debug="debug=true" in map(str.lower, args))


def _command(args: list[str]) -> Callable[[], int]:
    if "--help" in args or "-h" in args:
        return _show_guide
    if args[:1] == ["schema"]:
        return _show_schema
    return lambda: _launch(args)


def _show_guide() -> int:
    from pipeline.config.guide import guide

    print(guide())
    return 0


def _show_schema() -> int:
    from pipeline.config.schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))
    return 0


def _launch(args: list[str]) -> int:
    from pipeline.launch import launch

    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
