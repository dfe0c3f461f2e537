"""Restore: find, verify and read the checkpoints of a run.

Arrays are read by orbax if it wrote them.

All files of a checkpoint are verified before any is parsed. If the newest checkpoint of a run is
damaged, the user is warned and the previous one is read.

A checkpoint with a valid manifest may still come from a stranger, so values that this program
doesn't write are refused. Unknown keys are ignored. The parser isn't in `host_state`, since the
engine uses the types there without importing pydantic.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from pydantic import TypeAdapter, ValidationError

from pipeline.checkpoint.array_database import read_database, require_memory
from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    HOST,
    LOST,
    MANIFEST,
    META,
    RECIPE,
    STATE,
    find_strangers,
    list_saved_steps,
    make_checkpoint_path,
    parse_checkpoint_step,
    rename_aside,
)
from pipeline.checkpoint.host_state import MAX_DIGITS, HostState
from pipeline.checkpoint.manifest import (
    DESCRIPTION,
    DamagedError,
    make_read_error,
    read_json,
    verify_files,
)
from pipeline.core.errors import DataError, RunError, printable_lines
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import join_first, show
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.training.step_feature import AVERAGE, EVALUATED

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

MAX_LISTED = 5
"""Most problems that a message lists."""
T = TypeVar("T")
Warn = Callable[[str], None]
ATTEMPTS = 2
"""Attempts to read arrays before DamagedError is raised. Orbax also reports a file as missing if
the process has no descriptor left."""
PLAIN = re.compile(r"[^*?\[\]\\\ud800-\udfff]*", re.DOTALL)
"""Paths that orbax takes as they are. Bytes that aren't UTF-8 are surrogates in Python's texts."""


def warn_on_stderr(text: str) -> None:
    """Warn on stderr, for commands without a run log."""
    print(printable_lines(f"warning: {text}"), file=sys.stderr)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read from disk."""

    folder: Path
    arrays: Mapping[str, np.ndarray]
    host: HostState
    recipe: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The number of steps done when it was saved."""
        return int(self.arrays["step"])

    @property
    def has_former_layout(self) -> bool:
        """Whether the arrays have the names of versions without `train.features`."""
        return "loss_scale" in self.arrays

    def select_weights(self) -> dict[str, np.ndarray]:
        """Return the weights that an evaluation uses, by path: parameters, such as
        `params/conv_0/kernel`, and collections, such as `batch_stats/batch_norm_0/mean`.

        If parameters are averaged, their averages are returned.
        """
        weights = {f"params/{name}": array for name, array in self.select_part("params").items()}
        former = self.has_former_layout
        averages = self.select_part("average" if former else f"features/{AVERAGE}")
        features = sorted({path.split("/")[0] for path in self.select_part("features")})
        for feature in features:
            if feature != AVERAGE:
                averages |= self.select_part(f"features/{feature}/{EVALUATED}")
        weights |= {f"params/{name}": array for name, array in averages.items()}
        if former:
            statistics = self.select_part("batch_stats")
            return weights | {f"batch_stats/{name}": array for name, array in statistics.items()}
        return weights | self.select_part("collections")

    def select_part(self, part: str) -> dict[str, np.ndarray]:
        """Return the arrays of a part of the state by their path in it; {} if it is empty."""
        prefix = f"{part}/"
        return {
            path.removeprefix(prefix): array
            for path, array in self.arrays.items()
            if path.startswith(prefix)
        }


def read_to_resume(run_dir: Path, warn: Warn) -> Checkpoint | None:
    """Read the newest sound checkpoint of a run; None if it has no checkpoint.

    Warns of newer checkpoints, which are damaged. Raises DamagedError if all are damaged, and
    RunError as in `make_read_error`.
    """
    root = run_dir / FOLDER
    if not list_saved_steps(root):
        return None
    try:
        return _read_newest(root, warn)
    except DamagedError as error:
        raise DamagedError(f"{error}; to start over, move that folder elsewhere") from error


def set_others_aside(run_dir: Path, step: int, warn: Warn) -> None:
    """Rename damaged checkpoints after `step`, and strangers (see `checkpoint_folder`).

    The run will write checkpoints with these names. Warns of each renamed entry.
    """
    root = run_dir / FOLDER
    for saved_step in list_saved_steps(root):
        if saved_step > step:
            path = make_checkpoint_path(root, saved_step)
            new_name = rename_aside(path, "damaged").name
            warn(f"{path}: set aside as {new_name}")
    for path in find_strangers(root):
        new_name = rename_aside(path, "foreign").name
        warn(f"{path}: isn't a checkpoint; set aside as {new_name}")


def read_saved(folder: Path, warn: Warn = warn_on_stderr) -> Checkpoint:
    """Read a checkpoint, or the newest sound checkpoint of a run.

    `folder` is a checkpoint, a run directory or its folder `checkpoints`, or a link to one of them.
    Warns of newer checkpoints, which are damaged. Raises DataError without a sound checkpoint, and
    RunError as in `make_read_error`.
    """
    try:
        # The path may be `.` or a link, whose last part isn't the step.
        for path in (folder, Path(os.path.realpath(folder))):
            if parse_checkpoint_step(path) in list_saved_steps(path.parent):
                return read_checkpoint(path)
        for root in (folder / FOLDER, folder):
            if list_saved_steps(root):
                return _read_newest(root, warn)
    except OSError as error:
        raise make_read_error(Path(error.filename or folder), error) from error
    raise _make_absence_error(folder)


def _make_absence_error(folder: Path) -> DataError:
    return DataError(
        f"{folder}: holds no checkpoint; name a run directory, its {FOLDER} folder or one "
        "checkpoint in there"
    )


def read_weights_alone(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights of a checkpoint, or of a run's newest one, by their paths.

    Neither recipe nor host state is parsed, which another version may have written differently.
    Raises DataError if there is none or it is damaged, RunError as in `make_read_error`.
    """
    root = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    try:
        steps = list_saved_steps(root)
    except OSError as error:
        raise make_read_error(Path(error.filename or root), error) from error
    is_checkpoint = (folder / MANIFEST).exists() or parse_checkpoint_step(folder) is not None
    if not steps and not is_checkpoint:
        raise _make_absence_error(folder)
    newest = make_checkpoint_path(root, steps[-1]) if steps else folder
    verify_files(newest)
    return Checkpoint(newest, read_arrays(newest / STATE), HostState(), {}).select_weights()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify and read one checkpoint. Raises DamagedError if a byte has changed, and RunError as in
    `make_read_error`."""
    verify_files(folder)
    recipe = read_json(folder / RECIPE / META)
    if not isinstance(recipe, dict):
        raise DamagedError(f"{folder / RECIPE / META}: must be a JSON object")
    file = folder / HOST / META
    try:
        host = parse_host_state(read_json(file))
    except ValueError as error:
        raise DamagedError(f"{file}: must be the state of a run: {error}") from error
    saved = Checkpoint(folder, read_arrays(folder / STATE), host, recipe)
    step = saved.arrays.get("step")
    if step is None or step.shape != () or not np.issubdtype(step.dtype, np.integer):
        raise DamagedError(f"{folder / STATE}: has no step")
    if saved.step != parse_checkpoint_step(folder):
        raise DamagedError(f"{folder / STATE}: was made at step {saved.step}")
    return saved


def arrange_arrays(source: Path, arrays: Mapping[str, np.ndarray], like: T) -> T:
    """Arrange arrays, which are by path, in the tree structure of `like`. Raises DataError if a
    path, shape or dtype differs. The message begins with `source`."""
    expected = flatten_by_path(like)
    problems = [f"{path} is missing" for path in expected if path not in arrays]
    problems += [f"{path} is not in this network" for path in arrays if path not in expected]
    problems += [
        f"{path} is {_format_type(arrays[path])}, this network needs {_format_type(leaf)}"
        for path, leaf in expected.items()
        if path in arrays and _format_type(arrays[path]) != _format_type(leaf)
    ]
    if problems:
        raise DataError(f"{source}: of another recipe: {join_problems(problems)}")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in expected])


def read_state(run_dir: Path, step: int, like: T) -> T:
    """Read the state of a saved step of a run, with the structure of `like`. Raises DataError if
    the checkpoint is damaged, or if its arrays don't fit `like`."""
    saved = read_checkpoint(make_checkpoint_path(run_dir / FOLDER, step))
    return arrange_arrays(saved.folder, saved.arrays, like)


def _format_type(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def join_problems(problems: Sequence[str]) -> str:
    """Join the first `MAX_LISTED` problems on one line, with the number of further problems."""
    return join_first(problems, MAX_LISTED, "; ")


def _read_newest(root: Path, warn: Warn) -> Checkpoint:
    """Read a folder's newest sound checkpoint, and warn of newer ones. Raises DamagedError if all
    are damaged."""
    faults = []
    for step in reversed(list_saved_steps(root)):
        try:
            saved = read_checkpoint(make_checkpoint_path(root, step))
        except DamagedError as error:
            faults.append(str(error))
            continue
        for fault in faults:
            warn(f"{fault}; using the checkpoint of step {saved.step}")
        return saved
    raise DamagedError(f"{root}: none of its checkpoints can be read: {join_problems(faults)}")


@contextmanager
def _silence_orbax() -> Iterator[None]:
    """Silence what orbax logs in the body: harmless messages, and messages of errors that it also
    raises.

    After an error, tensorstore's threads may call an event loop that is closed. Python shows that
    when the body has ended, so a hook for it stays.
    """
    if getattr(sys.unraisablehook, "func", None) is not _show_unraisable:
        sys.unraisablehook = partial(_show_unraisable, sys.unraisablehook)
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        absl.setLevel(level)


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
    """Return options for reading without waiting for other processes."""
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
    memory, MemoryError if it is full, and RunError as in `make_read_error`."""
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
        _silence_orbax(),
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


def parse_host_state(data: Any) -> HostState:
    """Make a host state of the JSON in a checkpoint. Raises ValueError with the first wrong key."""
    try:
        # Integers are replaced while a text is parsed, and only JSON is validated strictly.
        tree = json.loads(json.dumps(data), parse_int=_parse_integer)
        return TypeAdapter(HostState).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            raise ValueError(f"{key} is missing") from error
        raise ValueError(f"{key or 'all'} = {show(problem['input'])}") from error


def _parse_integer(digits: str) -> int | str:
    """Return an integer. One that is too long stays a text, which validation refuses."""
    return int(digits) if len(digits.lstrip("-")) <= MAX_DIGITS else digits
