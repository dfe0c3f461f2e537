"""Audit of a private run: a lower bound on its epsilon, from the losses of its canaries.

A canary is a training sample that all steps leave out with probability 1/2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from pipeline.data.batch import Batch, read_chunks
from pipeline.data.columns import Split
from pipeline.data.order_kinds import PoissonOrder
from pipeline.stages.runner.context import CompiledRun
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.losses import compute_losses
from pipeline.training.privacy.audit_bound import CONFIDENCE, bound_epsilon
from pipeline.training.state import TrainState
from pipeline.training.step import get_evaluated_weights, predict

CHUNK_SAMPLES = 256
"""Samples whose losses are computed at once."""


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
