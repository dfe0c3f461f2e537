"""Names of files of texts, for modules that don't read them."""

from __future__ import annotations

TOKENIZER = "tokenizer.json"
"""Name of the tokenizer's file in the folder of a run or an export."""
