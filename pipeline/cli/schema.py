"""`python -m pipeline schema`: the JSON schema by which editors complete recipes."""

from __future__ import annotations

import json
from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.core.registry import list_components

DEFAULTS = {
    "type": "array",
    "description": "Groups to take options from, as in `- override /model: resnet50`",
    "items": {"anyOf": [{"type": "object"}, {"type": "string"}]},
}

EXPECT = {
    "type": "object",
    "description": "What a run must reach, for the command `test`, as in loss@100 and accuracy",
    "propertyNames": {"pattern": r"^\w+(@\d+)?$"},
    "additionalProperties": {"type": ["string", "boolean", "null"]},
}


def main() -> int:
    """Print the schema; the exit status is 0."""
    print(json.dumps(recipe_schema(), indent=2))
    return 0


def recipe_schema() -> dict[str, Any]:
    """Return the schema of recipe files and of the files under conf/.

    No key is required and a component may omit its name, since a file may have a part of a recipe:
    completeness is checked on the composed recipe. A device's file may extend another's.
    """
    schema = _make_keys_optional(Recipe.model_json_schema())
    for device in list_components("device").values():
        schema["$defs"][device.__name__]["properties"]["defaults"] = DEFAULTS
    schema["properties"] = {
        "defaults": DEFAULTS,
        "hydra": {"type": "object"},
        "expect": EXPECT,
        **schema["properties"],
    }
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "title": "Recipe"}


def _make_keys_optional(node: Any) -> Any:
    """Return a copy of a schema in which no key is required, nor the name in a union's member."""
    if isinstance(node, list):
        return [_make_keys_optional(item) for item in node]
    if not isinstance(node, dict):
        return node
    schema = {key: _make_keys_optional(value) for key, value in node.items() if key != "required"}
    if "oneOf" in schema and "discriminator" in schema:
        schema["anyOf"] = schema.pop("oneOf")
        del schema["discriminator"]
    return schema
