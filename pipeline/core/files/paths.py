"""Paths of the package and its files, in a checkout and in a wheel, of the user's cache, and
addresses of remote files and folders, such as s3://bucket/folder."""

from __future__ import annotations

import os
import re
from pathlib import Path, PosixPath
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2]


def _find_shipped(name: str) -> Path:
    """Return the path of a file or folder: in the package in a wheel, beside it in a checkout."""
    path_in_wheel = PACKAGE / name
    return path_in_wheel if path_in_wheel.exists() else PACKAGE.parent / name


CONF = _find_shipped("conf")
RECIPES = _find_shipped("recipes")
PROJECT = _find_shipped("examples") / "project"
"""The project that `new` copies."""
LOCK = _find_shipped("pylock.toml")
"""Versions of all packages of the Python 3.11 environment that is tested completely (PEP 751)."""


def find_user_cache() -> Path:
    """Return `pipeline` in $XDG_CACHE_HOME, or in ~/.cache. Raises RuntimeError without a home."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "pipeline"


def expand_home(path: Path) -> Path:
    """Return a path with the home folder in place of its `~`. The `~` of an unknown user stays."""
    return Path(os.path.expanduser(path)) if str(path).startswith("~") else path


SCHEMES = ("https", "http", "s3", "gs", "hf")
LOCAL = "file://"
EXPECTED = f"must be a path or an address: {', '.join(f'{scheme}://' for scheme in SCHEMES)}"
_FORM = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


class Address(PosixPath):
    """A remote address with the type of a path. There is no local file at it."""

    def __str__(self) -> str:
        """Return the address with its two slashes, which pathlib has joined."""
        return re.sub(r"^(\w+):/", r"\1://", super().__str__())


def parse_location(text: Any) -> Any:
    """Return the Address or local path for a text with a scheme; other values unchanged.

    Raises ValueError for an unknown scheme, and for an address with a password, which messages of
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
    """Return `text`. Raises ValueError if it isn't a valid address, remote or file:///.

    No connection is opened.
    """
    match = _FORM.fullmatch(text)
    if match is None or match[1] not in (*SCHEMES, "file"):
        raise ValueError(f"{text}: {EXPECTED}, {LOCAL}")
    scheme, host, _ = match.groups()
    if "@" in host:
        raise ValueError(
            f"{text}: must have no name or password; storage reads them from the environment"
        )
    if scheme == "file" and host:
        raise ValueError(f"{text}: needs a whole path, as in file:///data")
    if scheme != "file" and not host:
        raise ValueError(f"{text}: lacks a host or bucket")
    return text
