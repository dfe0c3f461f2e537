"""The directory of a custom loop: the identity of its run, its logs and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from pipeline.checkpoint.checkpoint_folder import FOLDER, HOST, META, list_saved_steps
from pipeline.checkpoint.host_state import HostState
from pipeline.checkpoint.manifest import read_json as read_checkpoint_json
from pipeline.checkpoint.restore import Warn, arrange_arrays, read_saved
from pipeline.core.errors import DataError, RunError
from pipeline.core.files.atomic_write import (
    LOCK,
    Lock,
    convert_write_errors,
    try_lock_folder,
    write_whole,
)
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.trusted_files import require_real, require_real_trees
from pipeline.engine.step_checks import ADDRESS, describe
from pipeline.engine.user_step import CustomState, UserStep
from pipeline.models.lowerings.tune.tuner import LoweringChoice

RECORD = "sink.json"
"""Name of the file with the identity of a run, and the lowerings and size chosen at its start."""
LOG_FILES = ("metrics.jsonl", "evals.jsonl")
DATA = "data"
"""Key in a checkpoint for the position in the data."""
INFINITE = "infinite"
"""Key in a checkpoint for the metrics of its step that are infinite, by name: "inf" or "-inf". The
log, in strict JSON, has null for them."""


@dataclass(frozen=True)
class SinkIdentity:
    """Everything that determines the numbers of a run, except the values of its state."""

    step: str
    """Digest of the step's computation."""
    state: Mapping[str, str]
    """Dtype and shape of the state's arrays by path."""
    batch: Mapping[str, str]
    """Dtype and shape of a batch's arrays by path."""
    data: Mapping[str, Any]
    """Identity of the data, as `BatchSource.describe` returns it."""
    jax: str
    """Version of jax that traced the step."""


@dataclass(frozen=True)
class SinkRecord:
    """The content of `RECORD`."""

    identity: SinkIdentity
    choice: LoweringChoice
    """Lowerings of the step's convolutions and matrix products."""
    size: int
    """Number of steps of a sink."""


@dataclass(frozen=True)
class SavedSink:
    """The newest checkpoint of a run."""

    state: CustomState
    host: HostState
    position: Mapping[str, Any]
    """Position in the data, as `BatchSource.position` returned it."""
    infinite: Mapping[str, float]
    """Metrics of the last step that are infinite."""


def identify(step: UserStep, state: CustomState, data: Mapping[str, Any]) -> SinkIdentity:
    """Return the identity of a run; `data` is the identity of its data."""
    batch = {
        jax.tree_util.keystr(path) or "batch": describe(leaf)
        for path, leaf in jax.tree.leaves_with_path(step.batch_spec)
    }
    leaves = {path: describe(leaf) for path, leaf in state.state.items()}
    # Paths don't distinguish a list from a tuple.
    leaves["structure"] = ADDRESS.sub("", str(step.state_layout.structure))
    return SinkIdentity(step.signature.digest, leaves, batch, data, version("jax"))


@contextmanager
def hold_folder(folder: Path) -> Iterator[Lock]:
    """Create a run's directory if it is missing, and hold its lock.

    Raises RunError if it can't be created or another process holds the lock, DataError if it has
    files but no run of a custom step.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_real(folder, (LOCK, RECORD, *LOG_FILES), LOG_FILES)
        require_real_trees(folder, (FOLDER,))
    except OSError as error:
        raise RunError(f"save = {folder}: can't make it: {error.strerror}") from error
    with try_lock_folder(folder) as lock:
        if lock is None:
            raise RunError(f"save = {folder}: another process is writing this run")
        names = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
        if names and RECORD not in names:
            content = "a run of a recipe" if "recipe.yaml" in names else f"no run ({names[0]})"
            raise DataError(
                f"save = {folder}: holds {content}; must be an empty directory or a new one"
            )
        yield lock


def read_record(folder: Path) -> SinkRecord | None:
    """Return the record of a directory; None before its first run. Raises DataError if it can't
    be read."""
    file = folder / RECORD
    if not file.exists():
        return None
    try:
        tree = read_json(file)
        choice = LoweringChoice.from_document(tree["lowerings"])
        identity = SinkIdentity(**{name: tree[name] for name in SinkIdentity.__dataclass_fields__})
        size = tree["size"]
        parts = identity.state, identity.batch, identity.data
        if type(size) is not int or size < 1 or not all(isinstance(part, dict) for part in parts):
            raise ValueError("isn't a record of a custom loop")
        return SinkRecord(identity, choice, size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: can't be read: {type(error).__name__}: {error}") from error


def write_record(folder: Path, record: SinkRecord) -> None:
    """Write the record of a new run. Raises RunError if it can't be written."""
    choices = {"lowerings": record.choice.to_document(), "size": record.size}
    with convert_write_errors(folder / RECORD):
        write_whole(folder / RECORD, json.dumps(asdict(record.identity) | choices, indent=1) + "\n")


def require_same(folder: Path, before: SinkIdentity, now: SinkIdentity) -> None:
    """Raise DataError with the differences if a directory has another run."""
    problems = [*_list_changes("state", before.state, now.state)]
    problems += _list_changes("batch", before.batch, now.batch)
    problems += _list_changes("data", before.data, now.data)
    if not problems and before.step != now.step and before.jax == now.jax:
        # With another version of jax, the digest of the same step may differ.
        problems = ["the step function computes something else, or with other constants"]
    if problems:
        raise DataError(
            f"save = {folder}: holds another run: {'; '.join(problems[:3])}; name another "
            "directory, or run the step that it was saved with"
        )


def _list_changes(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each value that differs from the saved run's."""
    for key in sorted({*before, *now}):
        if before.get(key) == now.get(key):
            continue
        if key == "sha256":
            yield "the examples have other values"
        else:
            yield f"{name} {key} is {now.get(key, 'missing')}, was {before.get(key, 'missing')}"


def restore_sink(folder: Path, state: CustomState, warn: Warn) -> SavedSink | None:
    """Return the newest intact checkpoint; None before any. Raises DataError if all are bad."""
    if not list_saved_steps(folder / FOLDER):
        return None
    saved = read_saved(folder, warn)
    tree = read_checkpoint_json(saved.folder / HOST / META)
    position = tree.get(DATA) if isinstance(tree, dict) else None
    if not isinstance(position, dict):
        raise DataError(f"{saved.folder}: doesn't hold the position in the data")
    texts = tree.get(INFINITE)
    texts = texts if isinstance(texts, dict) else {}
    infinite = {name: float(text) for name, text in texts.items() if text in ("inf", "-inf")}
    arrays = arrange_arrays(saved.folder, saved.arrays, state)
    return SavedSink(arrays, saved.host, position, infinite)
