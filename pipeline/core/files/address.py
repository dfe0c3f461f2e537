"""Addresses of remote files and folders, such as s3://bucket/folder, in place of paths."""

from __future__ import annotations

import re
from pathlib import Path, PosixPath
from typing import Any

SCHEMES = ("https", "http", "s3", "gs", "hf")
LOCAL = "file://"
EXPECTED = f"must be a path or an address: {', '.join(f'{scheme}://' for scheme in SCHEMES)}"
_FORM = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


class Address(PosixPath):
    """An address in place of a path. It names no local file."""

    def __str__(self) -> str:
        """Return the address; pathlib has joined its two slashes."""
        return re.sub(r"^(\w+):/", r"\1://", super().__str__())


def parse_location(text: Any) -> Any:
    """Return the Address or local path that a text names; other values as they are.

    Raises ValueError for an address of another kind, and for one with a password, which messages of
    libraries could show.
    """
    if not isinstance(text, str) or not _FORM.fullmatch(text):
        return text
    require_address(text)
    if text.startswith(LOCAL):
        return Path(text.removeprefix(LOCAL))
    address = Address(text)
    if str(address) != text.rstrip("/"):
        raise ValueError(f"{text}: must have no empty part and no part `.` after the host")
    return address


def require_address(text: str) -> str:
    """Return an address, also of a local folder. Raises ValueError if it can't be opened."""
    form = _FORM.fullmatch(text)
    if form is None or form[1] not in (*SCHEMES, "file"):
        raise ValueError(f"{text}: {EXPECTED}, {LOCAL}")
    scheme, host, _ = form.groups()
    if "@" in host:
        raise ValueError(
            f"{text}: must have no name or password; storage reads them from the environment"
        )
    if scheme == "file" and host:
        raise ValueError(f"{text}: needs a whole path, as in file:///data")
    if scheme != "file" and not host:
        raise ValueError(f"{text}: lacks a host or bucket")
    return text
