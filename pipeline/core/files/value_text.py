"""Values in messages."""

from __future__ import annotations

from typing import Any

import yaml

from pipeline.core.errors import printable


def show(value: Any) -> str:
    """A value as it would be typed, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = str(value)
    except ValueError:
        # Python refuses to print a number of more than 4300 digits.
        text = f"a number of {value.bit_length():,} bits"
    if isinstance(value, str) and not _is_plain_text(value):
        text = f"'{value}'"
    return printable(text if len(text) <= 60 else f"{text[:57]}...")


def _is_plain_text(text: str) -> bool:
    """Return whether YAML reads it as a text."""
    if len(text) > 60:
        return True
    try:
        return isinstance(yaml.safe_load(text or "x"), str)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return False
