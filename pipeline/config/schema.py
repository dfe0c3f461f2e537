"""JSON schema of recipes, which editors use to complete and check recipe files."""

from __future__ import annotations

from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.core.registry import parts

DEFAULTS = {
    "type": "array",
    "description": "Groups to take options from, as in `- override /model: resnet50`",
    "items": {"anyOf": [{"type": "object"}, {"type": "string"}]},
}


def recipe_schema() -> dict[str, Any]:
    """The schema of recipe files and of the files under conf/.

    Each holds a part of a recipe: conf/ fills in the rest, so no key is required and a part may
    omit its name. A device may start from the file of another. Completeness is checked on the
    composed recipe.
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
    """The schema without `required`, and with unions that accept a section without a name."""
    if isinstance(node, list):
        return [_partial(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _partial(value) for key, value in node.items() if key != "required"}
    if "oneOf" in kept and "discriminator" in kept:
        kept["anyOf"] = kept.pop("oneOf")
        del kept["discriminator"]
    return kept
