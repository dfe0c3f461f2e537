"""The JSON schema that editors complete recipe files from: `python -m pipeline schema`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipeline.cli._usage import asks_for_help, show_usage
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError
from pipeline.registry import parts

DEFAULTS = {
    "type": "array",
    "description": "Groups to take options from, as in `- override /model: resnet50`",
    "items": {"anyOf": [{"type": "object"}, {"type": "string"}]},
}

HELP = """usage: python -m pipeline schema

Print the JSON schema of recipes, from which editors complete and check them.

example: python -m pipeline schema > recipe.schema.json
"""


def schema(args: Sequence[str]) -> int:
    """Print the schema; the exit status is 0. Raises RecipeError where it is asked for more."""
    if asks_for_help(args):
        return show_usage(HELP)
    if args:
        raise RecipeError([f"{' '.join(args)}: schema takes no arguments"])
    print(json.dumps(recipe_schema(), indent=2))
    return 0


def recipe_schema() -> dict[str, Any]:
    """The schema of recipe files and of the files under conf/.

    They hold a part of a recipe each: conf/ fills in the rest, so no key is required and a part
    may leave out its name. A device may start from another one's file. Whether a recipe is complete
    is checked when it has been composed.
    """
    schema = _partial(Recipe.model_json_schema())
    for device in parts("device").values():
        schema["$defs"][device.__name__]["properties"]["defaults"] = DEFAULTS
    schema["properties"] = {
        "defaults": DEFAULTS,
        "hydra": {"type": "object"},
        **schema["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Recipe",
    }


def _partial(node: Any) -> Any:
    """The schema without `required`, and with unions that a section without a name can satisfy."""
    if isinstance(node, list):
        return [_partial(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _partial(value) for key, value in node.items() if key != "required"}
    if "oneOf" in kept and "discriminator" in kept:
        kept["anyOf"] = kept.pop("oneOf")
        del kept["discriminator"]
    return kept
