"""XLA's persistent cache of compiled programs, whose files are complete or absent.

JAX's cache writes a file in place, so a killed process or a full disk leaves an incomplete file.
JAX then warns at every start, and never writes that file again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax

from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.trusted_files import find_foreign_owner, find_writers, make_private
from pipeline.core.host.jax_private import (
    UNWRITABLE_PROGRAM,
    find_opened_program_files,
    use_program_files,
)

_SUFFIX = ".program"
_OWNER_ONLY = stat.S_IRUSR | stat.S_IWUSR
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIGEST_BYTES = hashlib.sha256().digest_size

Report = Callable[[str], None]
"""Function that shows a line to the user."""


def enable_compile_cache(folder: Path | None, report: Report) -> None:
    """Keep every program that is compiled from now on in `folder`; None keeps no program.

    If the folder or a file can't be used, `report` is called, and the program is compiled. Programs
    that XLA can't write are compiled by each process, without a warning.
    """
    warnings.filterwarnings("ignore", UNWRITABLE_PROGRAM)
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    use_program_files(lambda path: (ProgramFiles(Path(path), report), path))


def find_opened_cache(device: jax.Device) -> ProgramFiles | None:
    """Return the cache of programs for a device; None if the cache is off."""
    cache = find_opened_program_files(device.client)
    return cache if isinstance(cache, ProgramFiles) else None


@dataclass
class ProgramFiles:
    """A folder with a file per program: 32 bytes of SHA-256 over key and program, then the program.

    It has the methods that JAX calls on a cache. Files are written atomically. JAX would run any
    content that decompresses. So a damaged file, or a file that other users can write, is reported
    and removed, and its program is compiled again.
    """

    _path: Path
    """The folder, under the attribute name that JAX reads."""
    report: Report
    _reported: set[str] = field(default_factory=set)
    _newest: threading.local = field(default_factory=threading.local)

    @property
    def newest_key(self) -> str | None:
        """Key of the program that this thread has read or written last."""
        return getattr(self._newest, "key", None)

    def get(self, key: str) -> bytes | None:
        """Return the program of a key as JAX wrote it; None if the cache has no valid file."""
        self._newest.key = key
        file = self._path / f"{key}{_SUFFIX}"
        try:
            content = _read_private(file)
        except FileNotFoundError:
            return None
        except _ForeignFileError as error:
            self._discard(file, str(error))
            return None
        except OSError as error:
            self._report_once(f"{self._path}: compiled programs can't be read: {error.strerror}")
            return None
        digest = content[:_DIGEST_BYTES]
        program = content[_DIGEST_BYTES:]
        if digest == _digest(key, program):
            return program
        if digest != hashlib.sha256(program).digest():
            self._discard(file, "was damaged")
        # A file with a digest of the program alone, without the key, is from an older version.
        return None

    def put(self, key: str, value: bytes) -> None:
        """Write the program of a key. If that fails, the next run compiles it again."""
        self._newest.key = key
        try:
            make_private(self._path)
            write_whole(self._path / f"{key}{_SUFFIX}", _digest(key, value) + value, _OWNER_ONLY)
        except OSError as error:
            self._report_once(f"{self._path}: compiled programs can't be kept: {error.strerror}")

    def _discard(self, file: Path, problem: str) -> None:
        """Remove a file, and report its problem."""
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            problem += f" and can't be removed: {error.strerror}"
            self.report(f"{file}: {problem}; compiling again")
        else:
            self.report(f"{file}: {problem} and is removed; compiling again")

    def _report_once(self, text: str) -> None:
        """Report a problem of the disk, unless another program of this run has caused it before."""
        if text not in self._reported:
            self._reported.add(text)
            self.report(text)


class _ForeignFileError(Exception):
    """A cached file that another user may have written. The message has the reason."""


def _read_private(file: Path) -> bytes:
    """Return the content of a regular file that other users can't write.

    The opened file is checked, since another process may rename files meanwhile. Links aren't
    followed, and the call doesn't wait for a pipe. Raises _ForeignFileError, and OSError.
    """
    if file.is_symlink():
        raise _ForeignFileError("was a link")
    with open(file, "rb", opener=lambda path, _: os.open(path, _READ_FLAGS)) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _ForeignFileError("was no file")
        if owner := find_foreign_owner(status):
            raise _ForeignFileError(f"belonged to {owner}")
        if writers := find_writers(status):
            raise _ForeignFileError(f"could be written by {writers}")
        return opened.read()


def _digest(key: str, program: bytes) -> bytes:
    """Return the SHA-256 over the length of a key, the key and a program."""
    name = key.encode()
    return hashlib.sha256(len(name).to_bytes(8, "little") + name + program).digest()
