"""`python -m pipeline schema`: the JSON schema of recipes."""

from __future__ import annotations

import json

from pipeline.config.schema import recipe_schema


def main() -> int:
    """Print the schema; the exit status is 0."""
    print(json.dumps(recipe_schema(), indent=2))
    return 0
