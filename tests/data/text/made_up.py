"""A small tokenizer.json, as the library writes one."""

from __future__ import annotations

import json
from typing import Any

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "cat", "sat", "dog", "ran", "."]


def tokenizer_json(**changes: Any) -> bytes:
    """Whole words of a fixed list, with [CLS] and [SEP] around a text."""
    special = [
        {
            "id": number,
            "content": WORDS[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number in range(4)
    ]
    pair = {"[CLS]": 1, "[SEP]": 2}
    tree = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {
                name: {"id": name, "ids": [number], "tokens": [name]}
                for name, number in pair.items()
            },
        },
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(WORDS)},
            "unk_token": "[UNK]",
        },
        **changes,
    }
    return json.dumps(tree).encode()
