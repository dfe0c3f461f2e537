"""Windows of a text: tokens, and the token after each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TokenWindows:
    """A column of windows of consecutive tokens. Window n begins at token `first + n * stride`.

    Windows share one text, however much they overlap.
    """

    tokens: np.ndarray
    """The whole text, uint8 or int32 (tokens,)."""
    count: int
    length: int
    stride: int
    first: int
    """0 for the tokens that a network reads, 1 for the tokens after them."""
    trailing: tuple[int, ...] = ()
    """Dimensions of size 1 after the tokens: (1, 1) makes images of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(windows, tokens, *trailing)."""
        return (self.count, self.length, *self.trailing)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tokens."""
        return self.tokens.dtype

    def __getitem__(self, indices: Any) -> np.ndarray:
        """The windows at an integer array of indices, or at a slice."""
        starts = self.first + np.arange(self.count)[indices] * self.stride
        places = starts[..., np.newaxis] + np.arange(self.length)
        return self.tokens[places].reshape(*starts.shape, self.length, *self.trailing)


def window_columns(tokens: np.ndarray, length: int, stride: int) -> dict[str, TokenWindows]:
    """The columns of a language model: `image`, (n, length, 1, 1), and `label`, (n, length).

    Labels are the tokens after the inputs. Raises ValueError if there is no window.
    """
    count = (len(tokens) - 1 - length) // stride + 1
    if len(tokens) <= length:
        raise ValueError(
            f"{len(tokens):,} tokens, and a window takes {length + 1:,}: {length:,} and the one "
            "after them"
        )
    labels = TokenWindows(tokens, count, length, stride, first=1)
    return {"image": replace(labels, first=0, trailing=(1, 1)), "label": labels}


def narrow(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Tokens as uint8 if that holds them, else int32."""
    return tokens.astype(np.uint8 if vocabulary <= 256 else np.int32)
