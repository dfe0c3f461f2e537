"""Errors of data files begin with the name of the file."""

from __future__ import annotations

import pytest

from pipeline.core.errors import DataError
from pipeline.data.file_errors import SIZED_BY_FILE, name_file


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(13, "Permission denied"), "a.npz: can't be read: Permission denied"),
        (OSError("cut off"), "a.npz: can't be read: cut off"),
        (ValueError("has no rows"), "a.npz: has no rows"),
    ],
)
def test_error_has_the_file_name(error: Exception, message: str) -> None:
    with pytest.raises(DataError) as caught, name_file("a.npz"):
        raise error
    assert str(caught.value) == message
    assert caught.value.__cause__ is error


def test_other_errors_are_converted_only_if_listed() -> None:
    with pytest.raises(MemoryError), name_file("a.npz"):
        raise MemoryError
    with pytest.raises(DataError), name_file("a.npz", SIZED_BY_FILE):
        raise MemoryError
