"""Errors of data files, with the name of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.errors import DataError

SIZED_BY_FILE = (ValueError, MemoryError)
"""Errors of reading arrays whose sizes are in the file."""


@contextmanager
def name_file(name: object, errors: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Raise DataError, which starts with `name`, for OSError and `errors` in the block."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: can't be read: {error.strerror or error}") from error
    except errors as error:
        raise DataError(f"{name}: {error}") from error
