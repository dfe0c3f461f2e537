"""Gradients of one's own: SAM against a step with two passes that is written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.training.features.gradient_rules import (
    PlainGradients,
    ScaledGradients,
    SharpnessAware,
)
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]


def quadratic(parameters: Any) -> tuple[Any, Any]:
    """Gradients of sum(w^4)/4 + sum(b^2)/2, and the loss."""
    loss = (parameters["w"] ** 4).sum() / 4 + (parameters["b"] ** 2).sum() / 2
    return {"w": parameters["w"] ** 3, "b": parameters["b"]}, loss


PARAMETERS = {"w": np.array([1.0, -2.0], np.float32), "b": np.array([0.5], np.float32)}


def test_plain_gradients_take_one_pass() -> None:
    gradients, loss = PlainGradients().build()(quadratic, PARAMETERS, jax.random.key(0))
    np.testing.assert_array_equal(gradients["w"], [1.0, -8.0])
    assert loss == 17 / 4 + 0.125


def test_scaled_gradients_leave_the_loss() -> None:
    rule = ScaledGradients(factor=3.0).build()
    gradients, loss = rule(quadratic, PARAMETERS, jax.random.key(0))
    np.testing.assert_array_equal(gradients["w"], [3.0, -24.0])
    np.testing.assert_array_equal(gradients["b"], [1.5])
    assert loss == 17 / 4 + 0.125


@pytest.mark.medium
@pytest.mark.parametrize("rho", [0.05, 2.0])
def test_sharpness_aware_gradients_match_the_paper(rho: float) -> None:
    """Foret et al. 2021, eq. 2 with p = 2: e = rho g / |g|, then the gradients at w + e."""
    gradients, loss = SharpnessAware(rho=rho).build()(quadratic, PARAMETERS, jax.random.key(0))
    w, b = PARAMETERS["w"].astype(np.float64), PARAMETERS["b"].astype(np.float64)
    norm = np.sqrt((w**6).sum() + (b**2).sum())
    np.testing.assert_allclose(gradients["w"], (w + rho * w**3 / norm) ** 3, rtol=1e-6)
    np.testing.assert_allclose(gradients["b"], b + rho * b / norm, rtol=1e-6)
    assert loss == 17 / 4 + 0.125


def test_sharpness_aware_gradients_at_zero_slope_are_zero() -> None:
    zero = jax.tree.map(np.zeros_like, PARAMETERS)
    gradients, _ = SharpnessAware().build()(quadratic, zero, jax.random.key(0))
    assert all(np.array_equal(leaf, np.zeros_like(leaf)) for leaf in jax.tree.leaves(gradients))


def test_loss_scale_only_scales_sharpness_aware_gradients() -> None:
    """The distance is that of the direction alone."""

    def scaled(parameters: Any) -> tuple[Any, Any]:
        gradients, loss = quadratic(parameters)
        return jax.tree.map(lambda g: 1024 * g, gradients), loss

    rule = SharpnessAware(rho=0.5).build()
    gradients, _ = rule(quadratic, PARAMETERS, jax.random.key(0))
    larger, _ = rule(scaled, PARAMETERS, jax.random.key(0))
    np.testing.assert_allclose(larger["w"], 1024 * gradients["w"], rtol=1e-6)


MLP = ("model=mlp", "model.hidden=[8]", "train.steps=6", "checkpoint.every_steps=1")


@pytest.mark.slow
def test_sam_run_matches_hand_computed_steps(tiny: Compose, tmp_path: Path) -> None:
    """Two passes by hand over the batches that training saw, with plain gradient descent."""
    from pipeline import Trainer

    recipe = tiny(
        *MLP,
        "train.gradients={name: sam, rho: 0.5}",
        "optimizer=sgd",
        "train.optimizer.lr=0.5",
        "checkpoint.keep=10",
    )
    run(recipe, tmp_path / "run")
    batches = list(Trainer(recipe).tuples())

    def loss(parameters: dict[str, Any], images: Any, labels: Any) -> Any:
        hidden = images.reshape(len(images), -1) @ parameters["dense_0/kernel"]
        hidden = jnp.maximum(hidden + parameters["dense_0/bias"], 0)
        logits = hidden @ parameters["dense_1/kernel"] + parameters["dense_1/bias"]
        log = jax.nn.log_softmax(logits)
        return -log[jnp.arange(len(labels)), labels].mean()

    lines = outcome.metrics(tmp_path / "run")
    for step in range(1, 6):
        before, after = (
            {
                path.removeprefix("params/"): array
                for path, array in outcome.arrays(tmp_path / "run", number).items()
                if path.startswith("params/")
            }
            for number in (step, step + 1)
        )
        images, labels = batches[step]
        first = jax.grad(loss)(before, images, labels)
        norm = np.sqrt(sum(float((g**2).sum()) for g in first.values()))
        moved = {path: before[path] + 0.5 * first[path] / norm for path in before}
        second = jax.grad(loss)(moved, images, labels)
        for path in before:
            np.testing.assert_allclose(
                after[path], before[path] - 0.5 * second[path], rtol=1e-3, atol=1e-5
            )
        # The loss of the parameters themselves, not of the point above them.
        np.testing.assert_allclose(lines[step]["loss"], loss(before, images, labels), rtol=1e-4)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["plain", "sam"])
def test_sharded_gradients_do_not_depend_on_the_devices(
    rule: str, tiny: Compose, tmp_path: Path
) -> None:
    for devices in (1, 4):
        on = ("parallel.mode=data", f"parallel.devices={devices}")
        run(tiny(*MLP, *on, f"train.gradients={rule}"), tmp_path / str(devices))
    outcome.assert_same_run(tmp_path / "1", tmp_path / "4")


@pytest.mark.slow
def test_sam_is_refused_with_thor(tiny: Compose) -> None:
    with pytest.raises(RecipeError, match=r"train.gradients = sam: must be plain with thor"):
        tiny(*MLP, "optimizer=thor", "train.gradients=sam")
