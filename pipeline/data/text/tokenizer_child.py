"""Child process of `tokenizer_process`, which runs the library `tokenizers`."""

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
    """The library's tokenizer, set by FILE."""

    tokenizer: Any

    def compute(self, kind: bytes, content: bytes) -> list[bytes]:
        """Answer a request.

        FILE has a tokenizer.json; the answer is {"vocabulary", "dropout"} as JSON. ENCODE and
        ENCODE_SPECIAL have a text; the answer has tokens, int32. DECODE has tokens; the answer is a
        text.
        """
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
