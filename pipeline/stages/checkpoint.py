"""Checkpoint: the state of a run on disk, whole or not at all, and back again.

orbax writes a step's folder under another name and renames it when it is complete, so a run that
is killed while saving keeps the checkpoint before. A checkpoint holds every array of `TrainState`
under its path and, as JSON, what the host knows: the state of the monitors that decide something.
The data position, the schedule and the random generator are functions of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from pipeline.config.recipe import CheckpointSpec
from pipeline.errors import DataError, RunError
from pipeline.training.spec import METRICS
from pipeline.training.state import TrainState

FOLDER = "checkpoints"
WEIGHTS = ("params", "batch_stats")
T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run: the newest `keep`, and the best when the recipe says by what."""

    def __init__(self, run_dir: Path, spec: CheckpointSpec) -> None:
        # Else orbax warns of every checkpoint that is saved between two evaluations.
        logging.getLogger("absl").setLevel(logging.ERROR)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(_kept(spec)),
            # The policy decides; this only has the metrics written, for a resumed run to compare.
            best_fn=(lambda metrics: metrics[spec.best]) if spec.best else None,
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager((run_dir / FOLDER).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        state: TrainState,
        host: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        """Save once per step; written in the background. Raises RunError when the disk refuses."""
        if self.latest == step:
            return
        # Copied: the device is given these buffers again while they are still being written.
        arrays = {path: np.array(leaf) for path, leaf in by_path(state).items()}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(dict(host))
        )
        try:
            self._manager.save(step, args=args, metrics=dict(metrics) if metrics else None)
        except (OSError, ValueError) as error:  # tensorstore makes a ValueError of a full disk
            raise RunError(f"{self._manager.directory}: can't save step {step}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all is on disk. Raises RunError when it can't be."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise RunError(f"{self._manager.directory}: can't save: {error}") from error
        finally:
            self._manager.close()


def restore_state(run_dir: Path, like: TrainState) -> tuple[TrainState, Mapping[str, Any]] | None:
    """Everything a run had saved last, state and host data; None when it had saved nothing.

    Raises DataError when the checkpoint can't be read or is of another network.
    """
    if not _steps(run_dir / FOLDER):
        return None
    where, arrays, host = _read(run_dir)
    return _fill(where, arrays, like), host


def restore_weights(folder: Path, like: TrainState) -> tuple[TrainState, int]:
    """`like` with parameters and batch statistics of a checkpoint, and the step it was made at.

    `folder` is a run directory, its `checkpoints` or one checkpoint in there; of several, the
    newest is taken. Of parameters that were averaged it is the average, which evaluations looked
    at. Raises DataError when there is none, or of another network.
    """
    where, weights, step = _read_weights(folder)
    wanted = {"params": like.params, "batch_stats": like.batch_stats}
    return replace(like, **_fill(where, weights, wanted)), step


def read_weights(folder: Path) -> tuple[dict[str, np.ndarray], int]:
    """Parameters and batch statistics of a checkpoint by path, and the step it was made at.

    `folder` is as in `restore_weights`. Raises DataError when there is none.
    """
    _, weights, step = _read_weights(folder)
    return weights, step


def _read_weights(folder: Path) -> tuple[Path, dict[str, np.ndarray], int]:
    where, arrays, _ = _read(folder)
    averages = {path.replace("average", "params", 1): path for path in arrays if _is_average(path)}
    weights = {
        path: arrays[averages.get(path, path)]
        for path in arrays
        if path.partition("/")[0] in WEIGHTS
    }
    return where, weights, int(arrays["step"])


def _is_average(path: str) -> bool:
    return path.startswith("average/")


def _read(folder: Path) -> tuple[Path, Mapping[str, np.ndarray], Mapping[str, Any]]:
    root, step = _find(folder)
    args = ocp.args.Composite(state=ocp.args.StandardRestore(), host=ocp.args.JsonRestore())
    with ocp.CheckpointManager(root.absolute()) as manager:
        try:
            restored = manager.restore(step, args=args)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{root / str(step)}: can't read this checkpoint: {reason}") from error
    return root / str(step), restored["state"], restored["host"]


def _kept(spec: CheckpointSpec) -> list[Any]:
    kept: list[Any] = [policies.LatestN(spec.keep)]
    if spec.best is not None:
        name = spec.best
        kept.append(
            policies.BestN(
                get_metric_fn=lambda metrics: metrics[name],
                reverse=METRICS[name] == "min",
                n=1,
                keep_checkpoints_without_metrics=False,
            )
        )
    return kept


def _find(folder: Path) -> tuple[Path, int]:
    """The folder of checkpoints and the step that a path means."""
    if folder.name.isdigit() and int(folder.name) in _steps(folder.parent):
        return folder.parent, int(folder.name)
    for root in (folder / FOLDER, folder):
        if steps := _steps(root):
            return root, max(steps)
    raise DataError(
        f"checkpoint.restore = {folder}: holds no checkpoint; name a run directory, its "
        f"{FOLDER} folder or one checkpoint in there"
    )


def _steps(root: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder."""
    return [int(p.name) for p in root.glob("*") if p.name.isdigit() and (p / "state").is_dir()]


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, such as "params/conv_0/kernel"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _fill(where: Path, arrays: Mapping[str, np.ndarray], like: T) -> T:
    """The arrays in the structure of `like`; every name and shape must agree."""
    wanted = by_path(like)
    problems = [f"{path} is missing" for path in wanted if path not in arrays]
    problems += [f"{path} is not in this network" for path in arrays if path not in wanted]
    problems += [
        f"{path} has shape {arrays[path].shape}, this network needs {leaf.shape}"
        for path, leaf in wanted.items()
        if path in arrays and arrays[path].shape != leaf.shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DataError(f"{where}: of another recipe: {'; '.join(problems[:5])}{more}")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in wanted])
