"""The attacks on the images of an evaluation, the losses that they maximize, and the images that
they may return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from pipeline.data.random import uniforms
from pipeline.training.robustness.attack_specs import (
    ApgdAttack,
    BallAttack,
    FgsmAttack,
    NoiseAttack,
    Norm,
    PgdAttack,
    SquareAttack,
    compute_step_size,
)

Objective = Callable[[Array], Array]
"""(pixels (B, H, W, C)) -> what the attack maximizes, float32 (B,)."""
TINY = 1e-12
"""Lower bound of divisors that could be 0."""
ATTACK_OP = (1 << 30) + 2
"""First op number in the keys of an attack's draws. No map op has such a number."""


@dataclass(frozen=True)
class Ball:
    """The images within `radius` of `images`, pixels (B, H, W, C) from 0 to 1, in a norm."""

    norm: Norm
    radius: Any
    """A float, or an array, float32 ()."""
    images: Array

    def project(self, points: Array) -> Array:
        """Return images of the ball near `points`; with linf, the nearest ones."""
        if self.norm == "linf":
            changes = jnp.clip(points - self.images, -self.radius, self.radius)
        else:
            changes = jnp.clip(points, 0.0, 1.0) - self.images
            length = compute_l2(changes)
            changes = changes * jnp.minimum(1.0, self.radius / jnp.maximum(length, TINY))
        return jnp.clip(self.images + changes, 0.0, 1.0)

    def step(self, points: Array, gradients: Array, size: Any) -> Array:
        """Return the ends of steps of length `size`, in the norm, along gradients."""
        if self.norm == "linf":
            direction = jnp.sign(gradients)
        else:
            direction = gradients / jnp.maximum(compute_l2(gradients), TINY)
        return self.project(points + size * direction)

    def draw(self, draws: Array) -> Array:
        """Return random images in the ball from uniform numbers (B, H, W, C). With linf, changes
        are uniform before pixels are clipped. With l2, the direction is uniform, and the length is
        the radius: in many dimensions almost all of a ball is near its surface."""
        centred = 2 * draws - 1
        if self.norm == "linf":
            return self.project(self.images + self.radius * centred)
        normals = to_normals(draws)
        return self.project(self.images + self.radius * normals / compute_l2(normals))


def compute_l2(changes: Array) -> Array:
    """Return the L2 norm of each image's changes, (B, 1, 1, 1)."""
    return jnp.sqrt(jnp.square(changes).sum(axis=(1, 2, 3), keepdims=True))


def to_normals(draws: Array) -> Array:
    """Return standard normal numbers from uniform numbers, float32 of the same shape."""
    # The numbers are mapped to values between 0 and 1, whose normals are finite.
    normals: Array = jax.scipy.special.ndtri(draws * (1 - 2.0**-23) + 2.0**-25)
    return normals


def draw_uniforms(seed: Array, turn: Any, sample: Array, op: int, count: int) -> Array:
    """Return uniform numbers of an attack, float32 (B, count), a pure function of (seed, `turn`,
    sample, op). A turn is an epoch, a restart or a step."""
    return uniforms(jnp, seed, jnp.asarray(turn), sample, ATTACK_OP + op, count)  # type: ignore[no-any-return]


def maximize(objective: Objective, ball: Ball, start: Array, steps: int, size: Any) -> Array:
    """Return the images after projected gradient steps of length `size` from `start` (Madry et al.
    2018). The steps of an image depend only on its objective."""
    differentiate = jax.grad(lambda points: objective(points).sum())

    def move(_: Array, points: Array) -> Array:
        return ball.step(points, differentiate(points), size)

    return jax.lax.fori_loop(0, steps, move, start)


START_DRAW = 0
"""Number of the draws of random starts."""
MOMENTUM = 0.75
"""Weight of the gradient step in a change of the image. The previous change has 1 - MOMENTUM."""
PROGRESS = 0.75
"""The step length is halved if at most this share of a window's steps has increased the loss."""
FIRST_SHARE = 0.8
"""Share of the image's pixels that are in the square of the first step."""
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Steps after which the share is halved in a search of 10,000 steps; scaled for other lengths."""
# Values of the argument `op` of `draw_uniforms`.
STRIPES_DRAW = 1
SQUARES_DRAW = 2

AttackLoss = Callable[[Array, Array], Array]
"""(logits (B, C), classes (B,)) -> float32 (B,), large for a wrong prediction."""


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
            size = attack.step or compute_step_size(attack.radius, attack.steps)
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


class _Search(NamedTuple):
    """The state of each image's search. Images and gradients are (B, H, W, C), other arrays
    (B,)."""

    points: Array
    """The images after the last step."""
    previous: Array
    """The images before the last step."""
    losses: Array
    gradients: Array
    best: Array
    """The images with the largest loss so far."""
    best_losses: Array
    best_gradients: Array
    fooling: Array
    """The last image with a wrong prediction; the start if there was none."""
    fooled: Array
    """Whether there was a wrong prediction, bool."""
    size: Array
    """Length of a step."""
    increases: Array
    """Steps since the last checkpoint that have increased the loss."""
    checked_losses: Array
    """The best loss at the last checkpoint."""
    was_halved: Array
    """Whether the last checkpoint has halved the length."""


def list_windows(steps: int) -> np.ndarray:
    """Return for each step the length of the window that ends with it, int32 (steps,); 0 if none
    does. A window ends at a checkpoint of the paper. The first window has 22 % of the steps. Each
    later one is shorter by 3 % of the steps, but has at least 6 %."""
    lengths = np.zeros(steps, np.int32)
    decrease = max(int(0.03 * steps), 1)
    least_length = max(int(0.06 * steps), 1)
    length = max(int(0.22 * steps), 1)
    end = length
    while end <= steps:
        lengths[end - 1] = length
        length = max(length - decrease, least_length)
        end += length
    return lengths


def search(
    attacked: AttackedNetwork, loss: AttackLoss, ball: Ball, start: Array, steps: int
) -> tuple[Array, Array]:
    """Return images of the ball, and whether their predictions are wrong, bool (B,). If the search
    finds no wrong prediction, the image is the one with the largest loss."""
    losses, fooled, gradients = attacked.differentiate(loss, start)
    size = jnp.full(losses.shape, 2.0 * ball.radius, jnp.float32)
    first = _Search(
        points=start,
        previous=start,
        losses=losses,
        gradients=gradients,
        best=start,
        best_losses=losses,
        best_gradients=gradients,
        fooling=start,
        fooled=fooled,
        size=size,
        increases=jnp.zeros(losses.shape, jnp.int32),
        checked_losses=losses,
        was_halved=jnp.ones(losses.shape, bool),
    )
    windows = jnp.asarray(list_windows(steps))

    def move(number: Array, state: _Search) -> _Search:
        momentum = jnp.where(number > 0, MOMENTUM, 1.0)
        stepped = ball.step(state.points, state.gradients, state.size[:, None, None, None])
        step = stepped - state.points
        change = momentum * step + (1 - momentum) * (state.points - state.previous)
        points = ball.project(state.points + change)
        losses, fooled, gradients = attacked.differentiate(loss, points)
        is_best = losses > state.best_losses
        moved = state._replace(
            points=points,
            previous=state.points,
            losses=losses,
            gradients=gradients,
            best=_choose(is_best, points, state.best),
            best_losses=jnp.where(is_best, losses, state.best_losses),
            best_gradients=_choose(is_best, gradients, state.best_gradients),
            fooling=_choose(fooled, points, state.fooling),
            fooled=state.fooled | fooled,
            increases=state.increases + (losses > state.losses),
        )
        window = windows[number]
        return jax.lax.cond(window > 0, _halve_slow, lambda state, _: state, moved, window)

    end = jax.lax.fori_loop(0, steps, move, first)
    return _choose(end.fooled, end.fooling, end.best), end.fooled


def _halve_slow(state: _Search, window: Array) -> _Search:
    """Halve the step length of searches that are slow or stuck, and continue them from their best
    image. `window` is the number of steps since the last checkpoint."""
    is_slow = state.increases <= PROGRESS * window
    is_stuck = ~state.was_halved & (state.checked_losses >= state.best_losses)
    is_halved = is_slow | is_stuck
    return state._replace(
        points=_choose(is_halved, state.best, state.points),
        gradients=_choose(is_halved, state.best_gradients, state.gradients),
        size=jnp.where(is_halved, state.size / 2, state.size),
        increases=jnp.zeros_like(state.increases),
        checked_losses=state.best_losses,
        was_halved=is_halved,
    )


def _choose(condition: Array, images: Array, others: Array) -> Array:
    return jnp.where(condition[:, None, None, None], images, others)


def list_sides(steps: int, height: int, width: int) -> np.ndarray:
    """Return the side of the square of each step in pixels, int32 (steps,)."""
    scaled = np.arange(steps) * 10_000 // steps
    halvings = (scaled[:, None] > np.array(HALVINGS)).sum(axis=1)
    sides = np.sqrt(FIRST_SHARE / 2.0**halvings * height * width).round()
    return np.clip(sides, 1, min(height, width)).astype(np.int32)


def search_squares(
    attacked: AttackedNetwork, ball: Ball, seed: Array, sample: Array, steps: int
) -> tuple[Array, Array]:
    """Return images of the linf ball, and whether their predictions are wrong, bool (B,). Random
    numbers are a pure function of `seed`, uint32 (2,), and the samples' numbers, int32 (B,). The
    start has vertical stripes: the radius is added to or subtracted from a column of a channel."""
    shape = ball.images.shape[1:]
    height, width, channels = shape
    sides = jnp.asarray(list_sides(steps, height, width))
    stripes = draw_uniforms(seed, 0, sample, STRIPES_DRAW, width * channels)
    signs = jnp.where(stripes < 0.5, -1.0, 1.0).reshape(-1, 1, width, channels)
    start = ball.project(ball.images + ball.radius * jnp.broadcast_to(signs, (len(signs), *shape)))
    rows = jnp.arange(height)[:, None, None]
    columns = jnp.arange(width)[:, None]

    def paint(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        points, margins = carry
        side = sides[step]
        draws = draw_uniforms(seed, step, sample, SQUARES_DRAW, 2 + channels)
        num_places = jnp.array([height, width]) - side + 1
        top_left = jnp.floor(draws[:, :2] * num_places).astype(jnp.int32)
        # Offsets of the pixels from the top left corner of the square.
        down = rows - top_left[:, 0, None, None, None]
        right = columns - top_left[:, 1, None, None, None]
        is_inside = (down >= 0) & (down < side) & (right >= 0) & (right < side)
        sign = jnp.where(draws[:, 2:] < 0.5, -1.0, 1.0)[:, None, None, :]
        painted = ball.project(jnp.where(is_inside, ball.images + ball.radius * sign, points))
        new_margins = compute_margin(attacked.predict(painted), attacked.labels)
        # A prediction with a margin above 0 is wrong, and its image doesn't change any more.
        is_better = (new_margins > margins) & (margins <= 0)
        points = jnp.where(is_better[:, None, None, None], painted, points)
        return points, jnp.where(is_better, new_margins, margins)

    margins = compute_margin(attacked.predict(start), attacked.labels)
    end, _ = jax.lax.fori_loop(0, steps, paint, (start, margins))
    return end, attacked.is_fooled(end)


@dataclass(frozen=True)
class AttackedNetwork:
    """The network that is attacked, with the classes of a batch."""

    predict: Callable[[Array], Array]
    """(pixels (B, H, W, C)) -> logits (B, classes) float32."""
    labels: Array
    """int32 (B,)."""

    def is_fooled(self, pixels: Array) -> Array:
        """Return whether each prediction is wrong, bool (B,)."""
        return self.predict(pixels).argmax(axis=-1) != self.labels

    def differentiate(self, loss: AttackLoss, pixels: Array) -> tuple[Array, Array, Array]:
        """Return losses (B,), whether predictions are wrong, and gradients (B, H, W, C)."""

        def sum_losses(pixels: Array) -> tuple[Array, tuple[Array, Array]]:
            logits = self.predict(pixels)
            losses = loss(logits, self.labels)
            return losses.sum(), (losses, logits.argmax(axis=-1) != self.labels)

        (_, (losses, fooled)), gradients = jax.value_and_grad(sum_losses, has_aux=True)(pixels)
        return losses, fooled, gradients


def compute_margin(logits: Array, labels: Array) -> Array:
    """Return the largest other logit minus the logit of the class, (B,). It is above 0 for a wrong
    prediction, and the negative of `ledger.Readings.margin`."""
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    others = jnp.where(is_label, -jnp.inf, logits).max(axis=-1)
    return others - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]


def compute_logits_ratio(logits: Array, labels: Array) -> Array:
    """Return `compute_margin` divided by the difference between the largest and the third largest
    logit (Croce and Hein 2020, eq. 6). The ratio doesn't change if logits are scaled. It needs at
    least three classes."""
    ordered = jnp.sort(logits, axis=-1)
    return compute_margin(logits, labels) / (ordered[:, -1] - ordered[:, -3] + TINY)


LOSSES: Mapping[str, Any] = {
    "ce": optax.softmax_cross_entropy_with_integer_labels,
    "dlr": compute_logits_ratio,
}
"""Losses by their name in `ApgdAttack.losses`."""
