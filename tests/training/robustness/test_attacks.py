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

from pipeline.training.robustness.attack_specs import (
    ApgdAttack,
    BallAttack,
    FgsmAttack,
    NoiseAttack,
    Norm,
    PgdAttack,
    SquareAttack,
)
from pipeline.training.robustness.attacks import (
    LOSSES,
    AttackedNetwork,
    Ball,
    attack_images,
    compute_l2,
    compute_logits_ratio,
    compute_margin,
    list_sides,
    list_windows,
    maximize,
    search,
    search_squares,
)

FILE = Path(__file__).parents[2] / "golden" / "attacks" / "art.npz"
RADII: dict[Norm, float] = {"linf": 0.15, "l2": 0.8}
TOLERANCES = {"linf": 2e-6, "l2": 1e-3}
"""The toolbox adds 1e-7 to the l2 norm of a gradient, which may be 1e-4."""
NORMS = pytest.mark.parametrize("norm", list(RADII))
SEED = jnp.array([3, 0], jnp.uint32)
LOGITS = jnp.array([[3.0, 1.0, 0.5, -2.0], [0.0, 4.0, 1.0, 3.0], [1.0, 2.0, 5.0, 4.0]])
LABELS = jnp.array([0, 3, 2])


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


@pytest.mark.parametrize("steps", [1, 2, 5, 40, 100, 333])
def test_windows_match_the_paper(steps: int) -> None:
    """The reference implementation counts up to the window, which then becomes shorter."""
    window = max(int(0.22 * steps), 1)
    counter = 0
    for number, listed in enumerate(list_windows(steps).tolist()):
        counter += 1
        assert listed == (window if counter == window else 0), number
        if listed:
            window = max(window - max(int(0.03 * steps), 1), max(int(0.06 * steps), 1))
            counter = 0


@pytest.mark.medium
def test_search_climbs_a_narrow_ridge_further_than_fixed_steps() -> None:
    """The loss has a maximum inside the ball, past which steps of the radius jump."""
    target = np.full((4, 2, 2, 1), 0.5, np.float32) + np.linspace(0, 0.1, 16).reshape(4, 2, 2, 1)
    labels = jnp.zeros(4, jnp.int32)

    def predict(pixels: jax.Array) -> jax.Array:
        distance = jnp.square(pixels - target).sum(axis=(1, 2, 3))
        return jnp.stack([10 * distance, -20 * distance, jnp.full_like(distance, -5.0)], axis=-1)

    attacked = AttackedNetwork(predict, labels)
    images = jnp.full((4, 2, 2, 1), 0.3)
    ball = Ball("linf", 0.4, images)
    found, fooled = search(attacked, LOSSES["ce"], ball, images, 60)
    assert not fooled.any()

    def objective(points: jax.Array) -> jax.Array:
        return LOSSES["ce"](predict(points), labels)

    fixed = maximize(objective, ball, images, 60, 0.15)
    assert (objective(found) >= objective(fixed) - 1e-6).all()
    np.testing.assert_allclose(found, target, atol=0.03)


def test_square_sides_match_the_paper() -> None:
    sides = list_sides(10_000, 32, 32)
    shares = {0: 0.8, 30: 0.4, 100: 0.2, 300: 0.1, 800: 0.05, 1500: 0.025, 9000: 0.8 / 512}
    for step, share in shares.items():
        assert sides[step] == max(1, round((share * 1024) ** 0.5)), step
    # Fewer steps have the same course.
    np.testing.assert_array_equal(list_sides(100, 32, 32), sides[::100])
    assert list_sides(3, 2, 9).max() <= 2


@pytest.mark.medium
def test_square_search_succeeds_without_gradients() -> None:
    """The prediction changes with the sign of the mean change, and has no gradient."""
    images = jnp.full((6, 8, 8, 2), 0.5)

    def predict(pixels: jax.Array) -> jax.Array:
        change = jnp.round(100 * (pixels.mean(axis=(1, 2, 3)) - 0.57)) / 100
        return jnp.stack([-change, change, jnp.full_like(change, -9.0)], axis=-1)

    attacked = AttackedNetwork(predict, jnp.zeros(6, jnp.int32))
    assert not jax.grad(lambda p: predict(p).sum())(images).any()
    seed = jnp.array([0, 0], jnp.uint32)
    end, fooled = search_squares(attacked, Ball("linf", 0.1, images), seed, jnp.arange(6), 200)
    assert fooled.sum() >= 5
    np.testing.assert_allclose(np.abs(end - images), 0.1, atol=1e-6)


@pytest.mark.medium
def test_losses_match_hand_computed_values() -> None:
    np.testing.assert_allclose(compute_margin(LOGITS, LABELS), [-2, 1, -1])
    np.testing.assert_allclose(
        compute_logits_ratio(LOGITS, LABELS), [-2 / 2.5, 1 / 3, -1 / 3], rtol=1e-6
    )
    expected = np.log(np.exp(np.asarray(LOGITS)).sum(1)) - np.asarray(LOGITS)[range(3), LABELS]
    np.testing.assert_allclose(LOSSES["ce"](LOGITS, LABELS), expected, rtol=1e-6)


@pytest.mark.medium
def test_ratio_does_not_depend_on_scale_and_shift() -> None:
    expected = compute_logits_ratio(LOGITS, LABELS)
    np.testing.assert_allclose(compute_logits_ratio(100 * LOGITS + 7, LABELS), expected, rtol=1e-5)


@pytest.mark.medium
def test_gradients_are_per_image() -> None:
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
    attacked = AttackedNetwork(lambda p: p.reshape(len(p), -1) @ weights, jnp.array([0, 1]))
    pixels = jnp.asarray(np.random.default_rng(2).random((2, 2, 2, 1)), jnp.float32)
    losses, fooled, gradients = attacked.differentiate(LOSSES["ce"], pixels)
    logits = np.asarray(pixels.reshape(2, 4) @ weights)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = (shares - np.eye(3)[[0, 1]]) @ np.asarray(weights).T
    np.testing.assert_allclose(gradients.reshape(2, 4), expected, atol=1e-5)
    np.testing.assert_array_equal(fooled, logits.argmax(1) != [0, 1])
    assert losses.shape == (2,)
