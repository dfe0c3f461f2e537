"""Errors of data files, with the name of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.errors import DataError

SIZED_BY_FILE = (ValueError, MemoryError)
"""Errors of arrays whose sizes the file decides."""


@contextmanager
def name_file(name: object, errors: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Raise OSError and `errors` of the block as DataError that names a file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: can't be read: {error.strerror or error}") from error
    except errors as error:
        raise DataError(f"{name}: {error}") from error
