"""Windows of a text: the tokens that a network reads, and their labels, the next tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.data.columns import resolve_indices


@dataclass(frozen=True)
class TokenWindows:
    """Windows of consecutive tokens of one text. Window n begins at token `first + n * stride`."""

    tokens: np.ndarray
    """The whole text, uint8 or int32 (tokens,)."""
    count: int
    length: int
    stride: int
    """Tokens between the starts of two windows."""
    first: int
    """0 for windows that a network reads, 1 for their labels, the next tokens."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(windows, tokens)."""
        return self.count, self.length

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tokens.dtype

    def __getitem__(self, indices: Any) -> np.ndarray:
        """Return the windows at n indices or at a slice, (n, length)."""
        starts = self.first + resolve_indices(indices, self.count) * self.stride
        return self.tokens[starts[..., np.newaxis] + np.arange(self.length)]


def make_window_columns(tokens: np.ndarray, length: int, stride: int) -> dict[str, TokenWindows]:
    """Return columns `tokens` and `label`, the next tokens, both (n, length). Raises ValueError for
    a text that is shorter than a window and its next token."""
    count = (len(tokens) - 1 - length) // stride + 1
    if len(tokens) <= length:
        raise ValueError(
            f"{len(tokens):,} tokens; a window needs {length + 1:,}: {length:,} and the token "
            "after each"
        )
    labels = TokenWindows(tokens, count, length, stride, first=1)
    return {"tokens": replace(labels, first=0), "label": labels}


def to_narrow_dtype(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return tokens as uint8 if the vocabulary has at most 256 tokens, else as int32."""
    return tokens.astype(np.uint8 if vocabulary <= 256 else np.int32)
