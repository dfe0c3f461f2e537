"""A learning-rate schedule from a file: one rate for each update."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from pydantic import model_validator

from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.npy import parse_npy
from pipeline.core.files.value_text import show
from pipeline.core.registry import MAX_FLOAT, FilePath, component
from pipeline.training.component_specs import ScheduleSpec

MAX_BYTES = 64 * 2**20
"""Size limit of a file: 16 million rates in float32."""
FLOATS = ("float16", "float32", "float64")
"""Dtypes that a .npy file may have."""


@dataclass(frozen=True)
class RateFile:
    """The rates of a file, their dtype and the file's checksum."""

    rates: np.ndarray
    """Rate of each update, float64 (updates,), finite and not negative."""
    dtype: str
    """Dtype of the numbers in the file; `text` for a text file."""
    sha256: str
    """SHA-256 of the file's bytes, in hexadecimal."""


@component("schedule")
class TableSchedule(ScheduleSpec):
    """The learning rates in a file: row i is the rate of update i, as in MindSpore.

    The rates aren't multiplied by `train.optimizer.lr`. A file may have more rows than training has
    updates. With fewer rows, the run ends before compilation; in MindSpore 2.10 it ends in the
    middle of training.
    """

    name: Literal["table"] = "table"
    file: FilePath | None = None
    """A `.npy` file, floats (updates,), or a text, `.csv` or `.txt`, with one number per line.
    Empty lines and lines that begin with # are ignored."""

    @model_validator(mode="after")
    def _require_file(self) -> Self:
        if self.file is None:
            raise ValueError(f"file = null: must be a file that ends in {', '.join(_READERS)}")
        return self

    def read(self) -> RateFile:
        """Read the file. Raises ValueError with its name and the problem."""
        assert self.file is not None, "_require_file checked it"
        try:
            read = _READERS.get(self.file.suffix)
            if read is None:
                raise ValueError(f"must end in {', '.join(_READERS)}")
            content = read_bytes(self.file, MAX_BYTES)
            rates, dtype = read(content)
            _require_rates(rates)
        except OSError as error:
            raise ValueError(f"file = {self.file}: can't be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"file = {self.file}: {error}") from error
        return RateFile(rates, dtype, hashlib.sha256(content).hexdigest())

    def table(self, lr: float, steps: int, steps_per_epoch: int) -> np.ndarray:
        """Return the first `steps` rates of the file, float32 (steps,). Raises ValueError if the
        file has fewer or can't be read."""
        rates = self.read().rates
        if len(rates) < steps:
            raise ValueError(
                f"file = {self.file}: has {len(rates):,} rates, and training has {steps:,} "
                "updates; must have a rate for each"
            )
        return rates[:steps].astype(np.float32)


def _parse_array(content: bytes) -> tuple[np.ndarray, str]:
    """Return the rates in a .npy file, float64, and the array's dtype. Raises ValueError if the
    file doesn't hold an array (updates,) of floats."""
    if not content.startswith(MAGIC_PREFIX):
        raise ValueError("isn't a file that numpy.save writes")
    array = parse_npy("its array", content)
    if array.dtype.name not in FLOATS:
        raise ValueError(f"holds {array.dtype}; must be one of {', '.join(FLOATS)}")
    if array.ndim != 1:
        raise ValueError(f"has shape {array.shape}; must be (updates,), a rate for each update")
    return array.astype(np.float64), array.dtype.name


def _parse_text(content: bytes) -> tuple[np.ndarray, str]:
    """Return the numbers of a text with one number per line, float64, and "text". Raises ValueError
    for text that isn't UTF-8 and for a line that isn't a number."""
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError("isn't text in UTF-8; must have one number a line") from None
    rates = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            try:
                rates.append(float(line))
            except ValueError:
                raise ValueError(f"line {number} is {show(line)}; must be one number") from None
    return np.array(rates, np.float64), "text"


def _require_rates(rates: np.ndarray) -> None:
    """Raise ValueError for no rates, and for a rate that is negative or not finite."""
    if not len(rates):
        raise ValueError("has no rates; must have one for each update")
    # Comparisons with NaN are false, so NaN is wrong too.
    is_wrong = ~((rates >= 0) & (rates <= MAX_FLOAT))
    num_wrong = int(is_wrong.sum())
    if num_wrong:
        first = int(is_wrong.argmax())
        more_text = f", and {num_wrong - 1:,} more are wrong" if num_wrong > 1 else ""
        raise ValueError(
            f"the rate of update {first:,} is {rates[first]:g}{more_text}; must be finite and not "
            "negative"
        )


_READERS: Mapping[str, Callable[[bytes], tuple[np.ndarray, str]]] = {
    ".npy": _parse_array,
    ".csv": _parse_text,
    ".txt": _parse_text,
}
