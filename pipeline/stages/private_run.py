"""A private run: its secret, from which noise and batches are drawn, its epsilon, and its audit.

Only checkpoints hold the secret. The audit is a lower bound on epsilon, from the losses of
canaries: training samples that all steps leave out with probability 1/2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.checkpoint.restore import read_to_resume
from pipeline.core.errors import RecipeError
from pipeline.data.batch import Batch, read_chunks
from pipeline.data.columns import Split
from pipeline.data.inputs import Dataset
from pipeline.data.poisson_order import PoissonOrder
from pipeline.engine.history import History
from pipeline.stages.runner.context import CompiledRun, RunContext
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.losses import compute_losses
from pipeline.training.privacy.budget import CONFIDENCE, Budget, bound_epsilon
from pipeline.training.privacy.private_gradients import PRIVACY, get_privacy
from pipeline.training.state import TrainState
from pipeline.training.step import get_evaluated_weights, predict

SECRET_PATH = f"features/{PRIVACY}/key"
"""Path of the secret in a checkpoint."""
CHUNK_SAMPLES = 256
"""Samples whose losses are computed at once."""


def open_secret(context: RunContext) -> np.ndarray:
    """Return the secret of a private run, uint32 (4,), equal in all processes.

    A new secret is drawn, unless the recipe has a seed or the run to resume has a checkpoint.
    """
    privacy = context.recipe.privacy
    assert privacy is not None, "the run is private"
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


class PrivateRun(RunFeature):
    """The secret of a run with `privacy`, and its epsilon beside every evaluation."""

    _secret: np.ndarray

    def change_data(self, context: RunContext, dataset: Dataset) -> Dataset:
        """Draw or read the secret, and draw batches from it."""
        self._secret = open_secret(context)
        return share_secret(dataset, self._secret)

    def start_state(self, run: CompiledRun, state: TrainState, *, resumed: bool) -> TrainState:
        """Put the secret into a new state. Raises RecipeError for a resumed one of other noise."""
        budget = run.built.privacy
        assert budget is not None, "the run is private"
        if resumed:
            require_same_noise(state, budget)
            return state
        return run.executable.put(set_secret(state, self._secret, budget))

    def measure(self, run: CompiledRun, state: TrainState) -> Mapping[str, float]:
        """Return the epsilon that the steps of a state have spent."""
        assert run.built.privacy is not None, "the run is private"
        return {"epsilon": run.built.privacy.compute_epsilon(int(state.step))}

    def record(self, run: CompiledRun, history: History) -> None:
        """Record the budget that training has spent."""
        assert run.built.privacy is not None, "the run is private"
        summary = run.context.summary
        summary.privacy = dict(run.built.privacy.summarize(history.step))
        summary.metrics["epsilon"] = summary.privacy["epsilon"]


def audit(run: CompiledRun, state: TrainState) -> Mapping[str, Any]:
    """Print a lower bound on the epsilon of a trained run; return it for summary.json."""
    order = run.dataset.train_order
    privacy = run.built.privacy
    assert isinstance(order, PoissonOrder), "an audit needs Poisson sampling"
    assert privacy is not None, "an audited run is private"
    # A canary with a lower loss was more probably trained on.
    losses = compute_sample_losses(run, state, run.dataset.train, order.canaries)
    lower_bound = bound_epsilon(-losses, order.draw_members(), privacy.spec.delta)
    upper_bound = privacy.compute_epsilon(int(state.step))
    num_canaries = len(order.canaries)
    line = (
        f"audit: epsilon is at least {lower_bound:.4f}, with {CONFIDENCE:.0%} confidence from "
        f"{num_canaries:,} canaries, and at most {upper_bound:.4f}"
    )
    run.context.reporter.print_stage("privacy", line)
    if lower_bound > upper_bound:
        run.context.reporter.warn(
            "privacy: the audit refutes the epsilon of this run; something reads samples without "
            "noise"
        )
    return {"epsilon_at_least": lower_bound, "confidence": CONFIDENCE, "canaries": num_canaries}


def compute_sample_losses(
    run: CompiledRun, state: TrainState, split: Split, rows: np.ndarray
) -> np.ndarray:
    """Return the losses that an evaluation computes for the samples at `rows`, float32 (n,)."""
    config = replace(run.built.step_config, shards=None)
    variables = jax.tree.map(np.asarray, get_evaluated_weights(config, state))

    @jax.jit
    def compute(variables: Any, batch: Batch) -> Any:
        return compute_losses(config, *predict(config, variables, batch))

    chunks = read_chunks(split, rows, run.context.recipe.seed, CHUNK_SAMPLES)
    return np.concatenate([np.asarray(compute(variables, batch))[:num] for batch, num in chunks])


class CanaryAudit(RunFeature):
    """The audit of a run with `privacy.audit`, after its training."""

    def conclude(self, run: CompiledRun, state: TrainState) -> None:
        """Audit the final state, and record the bound."""
        if "train" in run.context.recipe.stages:
            run.context.summary.privacy["audit"] = audit(run, state)
