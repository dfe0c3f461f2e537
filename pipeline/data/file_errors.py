"""Errors of data files, with the name of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.errors import DataError


@contextmanager
def name_file(name: object) -> Iterator[None]:
    """Raise OSError, ValueError and MemoryError of the block as DataError that names a file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: can't be read: {error.strerror or error}") from error
    except (ValueError, MemoryError) as error:
        raise DataError(f"{name}: {error}") from error
