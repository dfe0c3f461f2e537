"""Ensembles of trained runs: their probabilities are averaged, or the numbers of a regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array, nn
from jax.scipy.special import logsumexp

from pipeline.core.errors import DataError
from pipeline.data.targets import Task
from pipeline.stages.data import drop_folds
from pipeline.stages.export.trained_run import Samples, TrainedRun, read_trained_run


def read_network(folders: Sequence[Path]) -> TrainedRun:
    """Return the trained run of a folder, or the ensemble of several folders' runs.

    Raises DataError as `read_trained_run` and `make_ensemble` do, and for a repeated folder.
    """
    if len(folders) == 1:
        return read_trained_run(folders[0])
    repeated = [folder for folder in folders if folders.count(folder) > 1]
    if repeated:
        raise DataError(f"{repeated[0]}: is named twice; must be another run")
    return make_ensemble({folder: read_trained_run(folder) for folder in folders})


def make_ensemble(runs: Mapping[Path, TrainedRun]) -> TrainedRun:
    """Return the ensemble of runs by folder. Names of weights begin with the member's number.

    Raises DataError if the runs' samples or targets differ.
    """
    first_folder, first = next(iter(runs.items()))
    for folder, run in runs.items():
        differing = [
            field.name
            for field in fields(Samples)
            if getattr(run.samples, field.name) != getattr(first.samples, field.name)
        ]
        if differing:
            problem = f"its samples differ from those of {first_folder} in {', '.join(differing)}"
            raise DataError(f"{folder}: {problem}; must be equal in an ensemble")
    members = tuple(runs.values())
    arrays = {
        f"{number}/{name}": array
        for number, member in enumerate(members)
        for name, array in member.arrays.items()
    }
    step = max(member.step for member in members)
    return TrainedRun(drop_folds(first.recipe), arrays, step, first.samples, members)


def select_weights(
    weights: Mapping[str, Array | np.ndarray], number: int
) -> dict[str, Array | np.ndarray]:
    """Return the weights of member `number`, by their names in the member's run."""
    prefix = f"{number}/"
    return {
        name.removeprefix(prefix): array
        for name, array in weights.items()
        if name.startswith(prefix)
    }


def average_outputs(outputs: Sequence[Array | np.ndarray], task: Task) -> Array:
    """Return the outputs (..., K) of an ensemble from the outputs of its members.

    Numbers of a regression are averaged. Otherwise the result has the logits of the mean
    probabilities: softmax over K, or a sigmoid for each label. Raises DataError for unequal shapes.
    """
    require_equal_shapes([array.shape[1:] for array in outputs])
    values = jnp.stack([jnp.asarray(array, jnp.float32) for array in outputs])
    if task == "regression":
        return values.mean(axis=0)
    if task == "multi_label":
        # The logit of the mean probability p is log p - log(1 - p); the number of members cancels.
        positive = logsumexp(nn.log_sigmoid(values), axis=0)
        return positive - logsumexp(nn.log_sigmoid(-values), axis=0)
    return logsumexp(nn.log_softmax(values), axis=0) - np.float32(np.log(len(outputs)))


def require_equal_shapes(shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise DataError unless the outputs of an ensemble's networks have equal shapes."""
    if len(set(shapes)) > 1:
        text = " and ".join(map(str, dict.fromkeys(shapes)))
        raise DataError(f"the networks have outputs of shape {text}; must be equal in an ensemble")
