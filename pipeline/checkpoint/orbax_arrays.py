"""Writing and reading of arrays by orbax. Files that are read may come from a stranger."""

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

from pipeline.checkpoint.checkpoint_folder import LOST
from pipeline.checkpoint.manifest import DESCRIPTION, DamagedError, make_read_error, read_json
from pipeline.core.errors import RunError
from pipeline.core.files.error_text import show_name

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

DATABASE = "manifest.ocdbt"
"""File with which orbax joins the written arrays into one database."""
ATTEMPTS = 2
"""Attempts to read arrays before DamagedError is raised. Orbax also reports a file as missing if
the process has no descriptor left."""
PLAIN = re.compile(r"[^*?\[\]\\\ud800-\udfff]*", re.DOTALL)
"""Paths that orbax takes as they are. Bytes that aren't UTF-8 are surrogates in Python's texts."""
FILE_BYTES = 1 << 28
"""Approximate size of a file of arrays. Arrays are in several files, which are hashed at once."""


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


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays into a new folder, whole or not at all. Raises OSError or ValueError.

    Orbax's asynchronous writers, such as CheckpointManager's, aren't used: they make folders in a
    thread for which other threads wait. If that thread fails, the others wait for ever, and the
    process can't end.
    """
    import orbax.checkpoint as ocp

    process_options = _make_process_options()
    # Copies would double the memory, and nothing changes the arrays while they are written.
    array_handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    # Compression would take four times as long as writing, and save a tenth of trained weights.
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False,
        multiprocessing_options=process_options,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, array_handler)
        ),
    )
    tree = {name: np.asarray(array) for name, array in arrays.items()}
    request = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=FILE_BYTES)
    with (
        _make_plain_path(folder) as plain,
        ocp.Checkpointer(handler, multiprocessing_options=process_options) as writer,
    ):
        writer.save(plain, args=request)
    if not (folder / DATABASE).exists():
        # If the folder can't be listed, orbax joins no arrays and raises no error.
        raise ValueError(f"{folder}: can't be listed, so its arrays were not joined")


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
            return _read_with_orbax(folder)
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
        _check_size(reader.metadata(plain).item_metadata.tree)
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


def _check_size(shapes: Mapping[str, Any]) -> None:
    """Raise ValueError if the shapes in a description need more bytes than the memory has."""
    claimed_bytes = sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in shapes.values())
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if claimed_bytes > memory_bytes:
        limit = f"this machine has {memory_bytes:,}"
        raise ValueError(f"claims {claimed_bytes:,} bytes of arrays; {limit}")
