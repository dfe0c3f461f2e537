"""The attacks on the images of an evaluation."""

from __future__ import annotations

from typing import assert_never

import jax.numpy as jnp
import optax
from jax import Array

from pipeline.training.robustness.apgd import search
from pipeline.training.robustness.attack_losses import LOSSES, AttackedNetwork
from pipeline.training.robustness.attack_specs import (
    ApgdAttack,
    BallAttack,
    FgsmAttack,
    NoiseAttack,
    PgdAttack,
    SquareAttack,
)
from pipeline.training.robustness.ball import Ball, draw_uniforms, maximize
from pipeline.training.robustness.square import search_squares

START_DRAW = 0
"""Number of the draws of random starts."""


def attack_images(
    attack: BallAttack,
    attacked: AttackedNetwork,
    pixels: Array,
    sample: Array,
    key: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Return attacked images, pixels (B, H, W, C), and whether their predictions are wrong (B,).
    `attack` must have a norm and a radius. `key` is the seed, uint32 (2,), and the number of the
    restart, int32 (). Random numbers are a pure function of `key` and `sample`, int32 (B,)."""
    assert attack.norm is not None, "complete_attacks sets it"
    assert attack.radius is not None, "complete_attacks sets it"
    ball = Ball(attack.norm, attack.radius, pixels)
    seed, restart = key

    def draw_start() -> Array:
        draws = draw_uniforms(seed, restart, sample, START_DRAW, pixels[0].size)
        return ball.draw(draws.reshape(pixels.shape))

    def ascend(start: Array, steps: int, size: float) -> Array:
        def objective(points: Array) -> Array:
            logits = attacked.predict(points)
            return optax.softmax_cross_entropy_with_integer_labels(logits, attacked.labels)

        return maximize(objective, ball, start, steps, size)

    match attack:
        case NoiseAttack():
            end = draw_start()
        case FgsmAttack():
            end = ascend(pixels, 1, attack.radius)
        case PgdAttack():
            size = attack.step or 2.5 * attack.radius / attack.steps
            end = ascend(draw_start(), attack.steps, size)
        case ApgdAttack():
            start = draw_start()
            results = [
                search(attacked, LOSSES[name], ball, start, attack.steps) for name in attack.losses
            ]
            end = results[0][0]
            for images, fooled in results[1:]:
                end = jnp.where(fooled[:, None, None, None], images, end)
        case SquareAttack():
            return search_squares(attacked, ball, seed, sample, attack.steps)
        case _:
            assert_never(attack)
    return end, attacked.is_fooled(end)
