"""The secret of a private run, from which noise and batches are drawn. Only checkpoints hold it."""

from __future__ import annotations

import os
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from pipeline.checkpoint.restore import read_to_resume
from pipeline.core.errors import RecipeError
from pipeline.data.dataset import Dataset
from pipeline.data.poisson_order import PoissonOrder
from pipeline.stages.runner.context import RunContext
from pipeline.training.privacy.budget import Budget
from pipeline.training.privacy.private_gradients import PRIVACY, get_privacy
from pipeline.training.state import TrainState

SECRET_PATH = f"features/{PRIVACY}/key"
"""Path of the secret in a checkpoint."""


def open_secret(context: RunContext) -> np.ndarray | None:
    """Return the secret of a run, uint32 (4,), equal in all processes; None if it isn't private.

    A new secret is drawn, unless the recipe has a seed or the run to resume has a checkpoint.
    """
    privacy = context.recipe.privacy
    if privacy is None:
        return None
    if privacy.seed != "secret":
        context.reporter.warn(
            f"privacy.seed = {privacy.seed}: anyone can compute the noise again, so this run is "
            "not private"
        )
        numbers = np.random.Philox(key=privacy.seed).random_raw(4)
        return (numbers >> np.uint64(32)).astype(np.uint32)

    def draw() -> list[int]:
        words = np.frombuffer(os.urandom(16), np.uint32)
        if context.resuming:
            saved = read_to_resume(context.run_dir, context.reporter.warn)
            words = words if saved is None else saved.arrays[SECRET_PATH]
        return [int(word) for word in words]

    return np.array(context.ranks.agree(draw), np.uint32)


def share_secret(dataset: Dataset, secret: np.ndarray | None) -> Dataset:
    """Return the dataset with the last two words of the secret as the key of a Poisson order."""
    order = dataset.train_order
    if secret is None or not isinstance(order, PoissonOrder):
        return dataset
    return replace(dataset, train_order=replace(order, key=(int(secret[2]), int(secret[3]))))


def set_secret(state: TrainState, secret: np.ndarray, budget: Budget) -> TrainState:
    """Return the initial state of a run with its secret and the noise of its budget."""
    noise = jnp.float32(budget.noise)
    part = replace(get_privacy(state), key=jnp.asarray(secret), noise=noise)
    return state.replace_part(PRIVACY, part)


def require_same_noise(state: TrainState, budget: Budget) -> None:
    """Raise RecipeError if the noise of a resumed run differs from that in its checkpoint."""
    noise_before = float(get_privacy(state).noise)
    if not np.isclose(noise_before, budget.noise, rtol=1e-6, atol=0):
        raise RecipeError(
            f"privacy.epsilon = {budget.spec.epsilon}: needs noise {budget.noise:.6f} for "
            f"{budget.steps:,} steps, and the run to resume has {noise_before:.6f}; keep its length"
        )
