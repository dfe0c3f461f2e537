"""Errors of reading data files, converted to DataError with the name of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.errors import DataError

SIZED_BY_FILE = (ValueError, MemoryError)
"""Errors of reading a file whose header has the sizes of its arrays, since it may be damaged."""


@contextmanager
def name_file(name: object, errors: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Convert OSError and `errors` in the block to DataError, whose message starts with `name`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: can't be read: {error.strerror or error}") from error
    except errors as error:
        raise DataError(f"{name}: {error}") from error
