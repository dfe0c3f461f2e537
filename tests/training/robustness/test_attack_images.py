"""Attacks against the Adversarial Robustness Toolbox, on a network of two dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.robustness.attack_images import attack_images
from pipeline.training.robustness.attack_losses import LOSSES, AttackedNetwork
from pipeline.training.robustness.attack_specs import (
    ApgdAttack,
    BallAttack,
    FgsmAttack,
    NoiseAttack,
    Norm,
    PgdAttack,
    SquareAttack,
)
from pipeline.training.robustness.ball import Ball, compute_l2, maximize

FILE = Path(__file__).parents[2] / "golden" / "attacks" / "art.npz"
RADII: dict[Norm, float] = {"linf": 0.15, "l2": 0.8}
TOLERANCES = {"linf": 2e-6, "l2": 1e-3}
"""The toolbox adds 1e-7 to the l2 norm of a gradient, which may be 1e-4."""
NORMS = pytest.mark.parametrize("norm", list(RADII))
SEED = jnp.array([3, 0], jnp.uint32)


@cache
def golden() -> Mapping[str, np.ndarray]:
    with np.load(FILE) as arrays:
        return dict(arrays)


def predict(pixels: jax.Array) -> jax.Array:
    weights = [jnp.asarray(golden()[f"weight_{n}"]) for n in range(4)]
    hidden = jax.nn.relu(pixels.reshape(len(pixels), -1) @ weights[0] + weights[1])
    return hidden @ weights[2] + weights[3]


def attacked_network(rows: slice = slice(None)) -> AttackedNetwork:
    return AttackedNetwork(predict, jnp.asarray(golden()["labels"][rows]))


def run_attack(
    attack: BallAttack, restart: int = 0, rows: slice = slice(None)
) -> tuple[np.ndarray, np.ndarray]:
    pixels = jnp.asarray(golden()["images"][rows])
    sample = jnp.arange(len(golden()["images"]))[rows]
    call = partial(attack_images, attack, attacked_network(rows))
    images, fooled = jax.jit(call)(pixels, sample, (SEED, jnp.int32(restart)))
    return np.asarray(images), np.asarray(fooled)


def make(kind: Any, norm: Norm, **changed: Any) -> Any:
    name = kind.model_fields["attack"].annotation.__args__[0]
    return kind(attack=name, norm=norm, radius=RADII[norm], **changed)


@pytest.mark.medium
@NORMS
def test_fgsm_matches_golden_images(norm: Norm) -> None:
    images, _ = run_attack(make(FgsmAttack, norm))
    np.testing.assert_allclose(images, golden()[f"fgsm_{norm}"], atol=TOLERANCES[norm])


@pytest.mark.medium
@NORMS
def test_pgd_matches_golden_images(norm: Norm) -> None:
    radius = RADII[norm]
    images = jnp.asarray(golden()["images"])
    network = attacked_network()

    def objective(points: jax.Array) -> jax.Array:
        return LOSSES["ce"](network.predict(points), network.labels)

    end = maximize(objective, Ball(norm, radius, images), images, 10, radius / 4)
    np.testing.assert_allclose(end, golden()[f"pgd_{norm}"], atol=TOLERANCES[norm])


@pytest.mark.medium
@NORMS
@pytest.mark.parametrize("losses", [("ce",), ("dlr",)])
def test_apgd_fools_images_that_golden_fools(norm: Norm, losses: tuple[str, ...]) -> None:
    """The toolbox counts the maxima of a window, and here as in the paper the increases count."""
    _, fooled = run_attack(make(ApgdAttack, norm, steps=40, losses=losses))
    expected = golden()[f"apgd_{norm}"]
    assert (fooled | ~expected).mean() >= (1 if losses == ("ce",) else 0.95)
    assert fooled.mean() >= expected.mean() - 0.05


@pytest.mark.medium
def test_square_fools_as_many_as_golden() -> None:
    _, fooled = run_attack(make(SquareAttack, "linf", steps=300))
    # The toolbox draws one square for all images of a step.
    assert fooled.mean() >= golden()["square_linf"].mean()


ALL = [
    make(NoiseAttack, "linf"),
    make(NoiseAttack, "l2"),
    make(FgsmAttack, "l2"),
    make(PgdAttack, "linf", steps=5),
    make(PgdAttack, "l2", steps=5),
    make(ApgdAttack, "l2", steps=20),
    make(SquareAttack, "linf", steps=20),
]


@pytest.mark.medium
@pytest.mark.parametrize("attack", ALL, ids=lambda a: f"{a.attack}_{a.norm}")
def test_images_are_within_the_radius_in_any_batch(attack: BallAttack) -> None:
    images, fooled = run_attack(attack)
    clean = golden()["images"]
    assert images.min() >= 0
    assert images.max() <= 1
    changes = images - clean
    length = np.abs(changes).max(axis=(1, 2, 3))
    if attack.norm == "l2":
        length = np.asarray(compute_l2(jnp.asarray(changes)))[:, 0, 0, 0]
    assert length.max() <= RADII[attack.norm or "linf"] * (1 + 1e-5)
    # Draws belong to samples, not to places in a batch.
    part, part_fooled = run_attack(attack, rows=slice(7, 20))
    np.testing.assert_array_equal(part_fooled, fooled[7:20])
    np.testing.assert_allclose(part, images[7:20], atol=1e-4)


@pytest.mark.medium
def test_restart_draws_another_start() -> None:
    attack = make(PgdAttack, "linf", steps=10, restarts=4)
    assert attack.restarts == 4
    assert make(FgsmAttack, "linf").restarts == 1
    first, _ = run_attack(attack, 0)
    second, _ = run_attack(attack, 1)
    assert (first != second).mean() > 0.05
