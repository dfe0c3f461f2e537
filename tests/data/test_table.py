"""How a CSV file is written: delimiters and encodings that there are."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipeline.data.table import TableFormat


@pytest.mark.parametrize("delimiter", [None, ",", ";", "\t", " "])
def test_delimiter_is_one_character(delimiter: str | None) -> None:
    assert TableFormat(delimiter=delimiter).delimiter == delimiter


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "\r", "\0"])
def test_invalid_delimiter_is_refused(delimiter: str) -> None:
    with pytest.raises(ValidationError, match="must be one character, and no quote or line break"):
        TableFormat(delimiter=delimiter)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252", "utf-16"])
def test_text_encoding_is_accepted(encoding: str) -> None:
    assert TableFormat(encoding=encoding).encoding == encoding


@pytest.mark.parametrize("encoding", ["utf-9", "base64", "", "rot13", "a\0b"])
def test_invalid_encoding_is_refused(encoding: str) -> None:
    with pytest.raises(ValidationError, match="must be an encoding of texts, such as utf-8"):
        TableFormat(encoding=encoding)
