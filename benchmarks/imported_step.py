"""A training step of an imported network, written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from pipeline.models.torch_graph.computation.torch_network import TorchNetwork


def make_step(
    network: TorchNetwork, optimizer: optax.GradientTransformation
) -> Callable[[Any, Any, Any, Any, Any], Any]:
    """Return a function of parameters, statistics, optimizer state, samples and labels int (B,).

    It returns the next parameters, statistics and optimizer state, and the mean cross entropy.
    """

    def step(params: Any, stats: Any, state: Any, x: Any, labels: Any) -> Any:
        def compute_loss(params: Any) -> Any:
            logits, changed = network.apply(
                {"params": params, "batch_stats": stats},
                x,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.key(0)},
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), changed.get("batch_stats", {})

        (loss, stats), gradients = jax.value_and_grad(compute_loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), stats, state, loss

    return step
