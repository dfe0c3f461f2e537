"""`python -m pipeline schema`: the JSON schema by which editors complete recipes."""

from __future__ import annotations

import json
from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.core.registry import components

DEFAULTS = {
    "type": "array",
    "description": "Groups to take options from, as in `- override /model: resnet50`",
    "items": {"anyOf": [{"type": "object"}, {"type": "string"}]},
}


def main() -> int:
    """Print the schema; the exit status is 0."""
    print(json.dumps(recipe_schema(), indent=2))
    return 0


def recipe_schema() -> dict[str, Any]:
    """Return the schema of recipe files and of the files under conf/.

    Each holds a part of a recipe: conf/ fills in the rest, so no key is required and a component
    may omit its name. A device may start from the file of another. Completeness is checked on the
    composed recipe.
    """
    schema = _partial(Recipe.model_json_schema())
    for device in components("device").values():
        schema["$defs"][device.__name__]["properties"]["defaults"] = DEFAULTS
    schema["properties"] = {
        "defaults": DEFAULTS,
        "hydra": {"type": "object"},
        **schema["properties"],
    }
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "title": "Recipe"}


def _partial(node: Any) -> Any:
    """Return the schema without `required`, and with unions that accept a section without a
    name."""
    if isinstance(node, list):
        return [_partial(item) for item in node]
    if not isinstance(node, dict):
        return node
    partial = {key: _partial(value) for key, value in node.items() if key != "required"}
    if "oneOf" in partial and "discriminator" in partial:
        partial["anyOf"] = partial.pop("oneOf")
        del partial["discriminator"]
    return partial
