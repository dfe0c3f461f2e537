"""Reading of a checkpoint's arrays, by orbax if it wrote them. Files may come from a stranger."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pipeline.checkpoint.array_database import read_database, require_memory
from pipeline.checkpoint.checkpoint_folder import LOST
from pipeline.checkpoint.manifest import DESCRIPTION, DamagedError, make_read_error, read_json
from pipeline.core.errors import RunError
from pipeline.core.files.name_text import show_name

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

ATTEMPTS = 2
"""Attempts to read arrays before DamagedError is raised. Orbax also reports a file as missing if
the process has no descriptor left."""
PLAIN = re.compile(r"[^*?\[\]\\\ud800-\udfff]*", re.DOTALL)
"""Paths that orbax takes as they are. Bytes that aren't UTF-8 are surrogates in Python's texts."""


def silence_orbax() -> None:
    """Silence the messages of orbax: harmless ones, and messages of errors that it also raises.

    If a write fails, Python also warns of coroutines that were never awaited, asyncio logs the
    errors of the other arrays, and tensorstore prints a message for each. These are silenced too.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_unrelated)
    warning = r"coroutine '\S+' was never awaited"
    warnings.filterwarnings("ignore", warning, category=RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _show_unraisable:
        sys.unraisablehook = partial(_show_unraisable, sys.unraisablehook)


def _is_unrelated(record: logging.LogRecord) -> bool:
    """Return False for a record of asyncio about an array that orbax couldn't write."""
    text = record.getMessage()
    return not (text.startswith("Task exception was never retrieved") and "/orbax/" in text)


@contextmanager
def _make_plain_path(folder: Path) -> Iterator[Path]:
    """Yield a path to a folder that orbax can use.

    Orbax takes `[`, `*`, `?` and a backslash for patterns of names, and refuses a path that isn't
    UTF-8. For these, the path leads through a link in the folder of temporary files.
    """
    path = folder.absolute()
    if PLAIN.fullmatch(str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as name:
        link = Path(name) / "run"
        link.symlink_to(path.parent, target_is_directory=True)
        yield link / path.name


def _make_process_options() -> ocp.options.MultiprocessingOptions:
    """Return options for reading and writing without waiting for other processes."""
    import orbax.checkpoint as ocp

    if not jax.distributed.is_initialized():
        return ocp.options.MultiprocessingOptions()
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"process_{process}",
    )


def read_arrays(folder: Path) -> Mapping[str, np.ndarray]:
    """Read the arrays in a folder, by path. Raises DamagedError, also for arrays larger than the
    memory, and RunError as in `make_read_error`."""
    silence_orbax()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            arrays = read_database(folder)
            return _read_with_orbax(folder) if arrays is None else arrays
        except (RunError, MemoryError):
            raise
        except Exception as error:  # orbax raises errors of any type for foreign bytes
            errno = _find_errno(error)
            if errno is not None and errno not in LOST:
                raise make_read_error(folder, OSError(errno, os.strerror(errno))) from error
            if attempt == ATTEMPTS:
                reason = str(error).partition("\n")[0]
                raise DamagedError(f"{folder}: can't be read: {reason}") from error
    raise AssertionError("the last attempt returns or raises")


def _read_with_orbax(folder: Path) -> Mapping[str, np.ndarray]:
    import orbax.checkpoint as ocp

    _check_names(folder)
    with (
        _make_plain_path(folder) as plain,
        ocp.StandardCheckpointer(multiprocessing_options=_make_process_options()) as reader,
    ):
        shapes = reader.metadata(plain).item_metadata.tree.values()
        require_memory(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in shapes)
        arrays = reader.restore(plain)
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise ValueError("must hold only arrays")
    return arrays


def _find_errno(error: Exception) -> int | None:
    """Return the errno of an OSError, or in a message of tensorstore; None without one."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"os_error_code='(\d+)'", str(error))
    return int(match[1]) if match else None


def _show_unraisable(next_hook: Callable[[Any], object], unraisable: Any) -> None:
    """Pass an unraisable error to the next hook, unless its event loop was closed."""
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        next_hook(unraisable)


def _check_names(folder: Path) -> None:
    """Raise ValueError for names of arrays that orbax could use as paths outside the folder."""
    description = read_json(folder / DESCRIPTION)
    entries = description["tree_metadata"].values()
    names = [key["key"] for entry in entries for key in entry["key_metadata"]]
    if description["use_ocdbt"] is not True:
        raise ValueError("its arrays are not in the database that this program writes")
    for name in names:
        if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{show_name(str(name))} can't be the name of an array")
