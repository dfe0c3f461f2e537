"""`python -m pipeline schema`: the JSON schema of recipes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.config.schema import recipe_schema
from pipeline.core.errors import RecipeError

HELP = """usage: python -m pipeline schema

Print the JSON schema of recipes, from which editors complete and check them.

example: python -m pipeline schema > recipe.schema.json
"""


def main(args: Sequence[str]) -> int:
    """Print the schema; the exit status is 0. Raises RecipeError for any argument."""
    if asks_for_help(args):
        return show_usage(HELP)
    if args:
        raise RecipeError([f"{' '.join(args)}: schema takes no arguments"])
    print(json.dumps(recipe_schema(), indent=2))
    return 0
