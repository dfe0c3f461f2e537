"""An audit of a private run: canaries among its training samples, and a bound from their losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.data.batch import Batch
from pipeline.data.columns import Split
from pipeline.data.poisson_order import PoissonOrder
from pipeline.data.random import seed_words
from pipeline.stages.runner.context import CompiledRun
from pipeline.training.losses import sample_losses
from pipeline.training.privacy.audit_bound import CONFIDENCE, bound_epsilon
from pipeline.training.state import TrainState
from pipeline.training.step import get_evaluated_weights, map_batch

CHUNK_SAMPLES = 256


def audit(run: CompiledRun, state: TrainState) -> Mapping[str, Any]:
    """Return the lower bound on a trained run's epsilon, for summary.json, and print it."""
    order = run.dataset.train_order
    privacy = run.built.privacy
    assert isinstance(order, PoissonOrder), "an audit needs Poisson sampling"
    assert privacy is not None, "an audited run is private"
    losses = compute_sample_losses(run, state, run.dataset.train, order.canaries)
    bound = bound_epsilon(-losses, order.draw_members(), privacy.spec.delta)
    upper = privacy.compute_epsilon(int(state.step))
    line = (
        f"audit: epsilon is at least {bound:.4f}, with {CONFIDENCE:.0%} confidence from "
        f"{len(order.canaries):,} canaries, and at most {upper:.4f}"
    )
    run.context.reporter.stage("privacy", line)
    if bound > upper:
        run.context.reporter.warn(
            "privacy: the audit refutes the epsilon of this run; something reads samples without "
            "noise"
        )
    return {"epsilon_at_least": bound, "confidence": CONFIDENCE, "canaries": len(order.canaries)}


def compute_sample_losses(
    run: CompiledRun, state: TrainState, split: Split, rows: np.ndarray
) -> np.ndarray:
    """Return the loss of each of some samples, float32 (n,), as an evaluation computes it."""
    config = replace(run.built.step_config, shards=None)
    variables = jax.tree.map(np.asarray, get_evaluated_weights(config, state))
    apply = config.lower(partial(config.network.apply, train=False))

    @jax.jit
    def compute(variables: Any, batch: Batch) -> Any:
        images, labels = map_batch(config, config.eval_ops, batch)
        logits: Any = apply(variables, images)
        return sample_losses(config, logits, labels)

    seed = jnp.asarray(seed_words(run.context.recipe.seed))
    losses = []
    for first in range(0, len(rows), CHUNK_SAMPLES):
        # The last chunk repeats its first sample, so that one program computes all.
        chunk = np.resize(rows[first : first + CHUNK_SAMPLES], CHUNK_SAMPLES)
        columns = {name: jnp.asarray(column[chunk]) for name, column in split.columns.items()}
        batch = Batch(columns, seed, jnp.int32(0), jnp.asarray(chunk), jnp.int32(len(chunk)))
        losses.append(np.asarray(compute(variables, batch)))
    return np.concatenate(losses)[: len(rows)]
