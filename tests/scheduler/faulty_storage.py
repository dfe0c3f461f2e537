"""A file system of fsspec that fails: a local folder, under the scheme s3."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipeline.core.files import storage

FOLDER = "FAULTY_STORAGE"
"""The variable with the folder of all buckets."""


class FaultyFileSystem(LocalFileSystem):
    """Fails now and then: before an operation, in its middle, or by data that arrive in part."""

    protocol: ClassVar[Any] = "s3"
    share: ClassVar[float] = 0.0
    """The share of operations that fail."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        text = str(path)
        if text.startswith("s3://"):
            text = f"{os.environ[FOLDER]}/{text.removeprefix('s3://')}"
        return super()._strip_protocol(text)

    def _fails(self) -> bool:
        return random.random() < self.share

    def _fail(self) -> None:
        raise OSError("injected: the connection was reset")

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        if self._fails():
            self._fail()
        return super().find(path, *args, **options)

    def put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> None:
        """Copy a file to the store, or a half of it before an error."""
        if self._fails():
            content = Path(lpath).read_bytes()
            super().pipe_file(rpath, content[: len(content) // 2])
            self._fail()
        super().put_file(lpath, rpath, *args, **options)

    def get_file(self, rpath: str, lpath: str, *args: Any, **options: Any) -> None:
        """Copy a file from the store, or, without an error, a half of it."""
        super().get_file(rpath, lpath, *args, **options)
        if self._fails():
            content = Path(lpath).read_bytes()
            Path(lpath).write_bytes(content[: len(content) // 2])

    def pipe_file(self, path: str, value: bytes, *args: Any, **options: Any) -> None:
        """Write a file, or a half of it before an error."""
        if self._fails():
            super().pipe_file(path, value[: len(value) // 2], *args, **options)
            self._fail()
        super().pipe_file(path, value, *args, **options)

    def rm(self, path: Any, *args: Any, **options: Any) -> None:
        """Remove a file or a folder, or fail before."""
        if self._fails():
            self._fail()
        super().rm(path, *args, **options)


def register_faulty_storage(folder: Path, share: float) -> None:
    """Make s3:// this file system in the current process, whose buckets are in a folder."""
    os.environ[FOLDER] = str(folder)
    FaultyFileSystem.share = share
    fsspec.register_implementation("s3", FaultyFileSystem, clobber=True)
    storage.WAITS_S = (0.0, 0.0, 0.0)
