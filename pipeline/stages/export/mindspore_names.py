"""Names of MindSpore's checkpoints: of the files, and of the arrays in them.

Files are `{prefix}-{epoch}_{step}.ckpt` as of MindSpore's ModelCheckpoint: the epoch is a
sink where the run has sinks, else a pass, and the step is counted within it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeline.checkpoint.restore import Checkpoint

SUFFIX = ".ckpt"
STATE = "opt_state/"
MOMENTS = {"trace": "moments", "mu": "moment1", "nu": "moment2"}
"""MindSpore's names of the optimizers' arrays: Momentum and SGD, Adam's first and second."""
GLOBAL_STEP = "global_step"


def file_name(prefix: str, steps_per_epoch: int, step: int) -> str:
    """The name of the checkpoint of a step, `{prefix}-{epoch}_{step}.ckpt`."""
    epoch, epoch_step = divmod(step - 1, steps_per_epoch)
    return f"{prefix}-{epoch + 1}_{epoch_step + 1}{SUFFIX}"


def free_prefix(folder: Path, prefix: str) -> str:
    """The prefix, or with the first of `_1`, `_2`, ... of which the folder has no file."""
    names = [file.name for file in folder.iterdir()]
    tried, number = prefix, 0
    while any(re.fullmatch(rf"{re.escape(tried)}-\d+_\d+\.ckpt", name) for name in names):
        number += 1
        tried = f"{prefix}_{number}"
    return tried


def weight_arrays(saved: Checkpoint, *, optimizer: bool) -> Mapping[str, np.ndarray]:
    """The parameters of a checkpoint by path; with `optimizer` the state of the optimizer too."""
    arrays = {path.removeprefix("params/"): array for path, array in saved.weights().items()}
    if not optimizer:
        return arrays
    state = {
        _state_name(path): array for path, array in saved.arrays.items() if path.startswith(STATE)
    }
    return {**arrays, **state, GLOBAL_STEP: np.array([saved.step], np.int32)}


def _state_name(path: str) -> str:
    """The name of an array of the optimizer's state: `moments.conv_0/kernel` for its momentum."""
    parts = path.removeprefix(STATE).split("/")
    kinds = [place for place, part in enumerate(parts) if part in MOMENTS]
    if not kinds:
        return f"optimizer.{'/'.join(parts)}"
    kind = kinds[0]
    return f"{MOMENTS[parts[kind]]}.{'/'.join(parts[kind + 1 :])}"
