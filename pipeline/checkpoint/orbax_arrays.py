"""Arrays on disk: written by orbax, read back from files that may be hostile."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pipeline.checkpoint.checkpoint_folder import LOST
from pipeline.checkpoint.manifest import DESCRIPTION, DamagedError, read_json, unreadable
from pipeline.core.errors import RunError
from pipeline.core.files.error_text import show_name

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

DATABASE = "manifest.ocdbt"
"""File that makes the written arrays one database, by which they are read."""

ATTEMPTS = 2
"""Readings of a checkpoint that orbax refuses, for reasons of any kind, before it is damaged: orbax
takes a file for missing if the process has no descriptor left."""

FILE_BYTES = 1 << 28
"""About the size of a file of arrays: several are hashed at once."""


def silence_orbax() -> None:
    """Silence the logs of orbax: it logs the errors that it raises, and files it does not need.

    If a write fails, Python would also warn of coroutines that were never awaited, asyncio log the
    errors of further arrays, and tensorstore print a message for each of these.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)
    undone = r"coroutine '\S+' was never awaited"
    warnings.filterwarnings("ignore", undone, category=RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _show:
        sys.unraisablehook = partial(_show, sys.unraisablehook)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio isn't about an array that orbax could not write."""
    text = record.getMessage()
    return not (text.startswith("Task exception was never retrieved") and "/orbax/" in text)


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays into a new folder, whole or not at all. Raises OSError or ValueError.

    Synchronous on purpose: orbax's asynchronous writers, CheckpointManager's among them, make
    folders in one thread and let others wait for it. If that one fails the others wait for ever,
    and the process can't end.
    """
    import orbax.checkpoint as ocp

    alone = _single_process_options()
    # Without copies of the arrays: they would double the memory, and nothing changes the arrays
    # while they are written.
    in_place = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    # Compression takes four times as long as all else, and leaves nine tenths of trained weights.
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False,
        multiprocessing_options=alone,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, in_place)
        ),
    )
    tree = {name: np.asarray(array) for name, array in arrays.items()}
    request = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=FILE_BYTES)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as writer:
        writer.save(folder.absolute(), args=request)
    if not (folder / DATABASE).exists():
        # If the folder can't be listed, orbax finds nothing to put together, without an error.
        raise ValueError(f"{folder}: its arrays were not put together; it can't be listed")


def _single_process_options() -> ocp.options.MultiprocessingOptions:
    """Return options by which this process reads or writes without waiting for others."""
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
    """Read arrays by path. Raises DamagedError, also if they exceed the memory, and RunError as
    `unreadable` does."""
    silence_orbax()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _read_with_orbax(folder)
        except (RunError, MemoryError):
            raise
        except Exception as error:  # for foreign bytes orbax raises errors of any type
            number = _error_number(error)
            if number is not None and number not in LOST:
                raise unreadable(folder, OSError(number, os.strerror(number))) from error
            if attempt == ATTEMPTS:
                reason = str(error).partition("\n")[0]
                raise DamagedError(f"{folder}: can't be read: {reason}") from error
    raise AssertionError("the last attempt returns or raises")


def _read_with_orbax(folder: Path) -> Mapping[str, np.ndarray]:
    import orbax.checkpoint as ocp

    _check_places(folder)
    with ocp.StandardCheckpointer(multiprocessing_options=_single_process_options()) as reader:
        _check_size(reader.metadata(folder.absolute()).item_metadata.tree)
        arrays = reader.restore(folder.absolute())
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise ValueError("holds other things than arrays")
    return arrays


def _error_number(error: Exception) -> int | None:
    """Return the errno of an error of the system, which tensorstore has in its text."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"os_error_code='(\d+)'", str(error))
    return int(match[1]) if match else None


def _show(next_hook: Callable[[Any], object], unraisable: Any) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        next_hook(unraisable)


def _check_places(folder: Path) -> None:
    """Raise ValueError for names of arrays that orbax would turn into paths elsewhere."""
    described = read_json(folder / DESCRIPTION)
    entries = described["tree_metadata"].values()
    names = [key["key"] for entry in entries for key in entry["key_metadata"]]
    if described["use_ocdbt"] is not True:
        raise ValueError("its arrays are not in the database that this program writes")
    for name in names:
        if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{show_name(str(name))} is the name of no array")


def _check_size(shapes: Mapping[str, Any]) -> None:
    """Raise ValueError for arrays larger than memory: a few bytes can claim any size."""
    claimed = sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in shapes.values())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if claimed > there:
        raise ValueError(f"claims {claimed:,} bytes of arrays; this machine has {there:,}")
