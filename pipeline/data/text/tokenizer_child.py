"""Child process of `tokenizer.TokenizerProcess`, which runs the library `tokenizers`."""

from __future__ import annotations

import array
import json
from typing import Any

from pipeline.core.host.limited_child import serve

FILE = b"f"
ENCODE = b"e"
ENCODE_SPECIAL = b"s"
DECODE = b"d"
"""Kinds of requests."""


class _Library:
    """The library's tokenizer, which a request FILE sets."""

    tokenizer: Any

    def compute(self, kind: bytes, content: bytes) -> list[bytes]:
        """Return the answer to a request. FILE has a tokenizer.json, its answer is {"vocabulary",
        "dropout"} as JSON. ENCODE has a text, its answer is the tokens, int32. ENCODE_SPECIAL is
        the same with special tokens, such as [CLS]. DECODE has tokens, its answer is their text."""
        if kind == FILE:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_str(content.decode())
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()
            dropout = getattr(self.tokenizer.model, "dropout", None)
            metadata = {"vocabulary": self.tokenizer.get_vocab(), "dropout": dropout}
            return [json.dumps(metadata).encode()]
        if kind == DECODE:
            text: str = self.tokenizer.decode(list(array.array("i", content)))
            return [text.encode()]
        special = kind == ENCODE_SPECIAL
        encoding = self.tokenizer.encode(content.decode(), add_special_tokens=special)
        return [array.array("i", encoding.ids).tobytes()]


if __name__ == "__main__":
    serve(_Library().compute)
