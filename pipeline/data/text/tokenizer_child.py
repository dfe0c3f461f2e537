"""Child process of `tokenizer_process`, which computes with the library `tokenizers`."""

from __future__ import annotations

import array
import json
from typing import Any

from pipeline.core.host.limited_child import serve

FILE = b"f"
ENCODE = b"e"
ENCODE_SPECIAL = b"s"
DECODE = b"d"


class _Library:
    """The tokenizer that was read last."""

    tokenizer: Any

    def compute(self, kind: bytes, content: bytes) -> list[bytes]:
        """About a file as JSON, the tokens of a text as int32, or the text of tokens."""
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
