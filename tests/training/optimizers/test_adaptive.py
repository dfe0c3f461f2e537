"""Adam's successors against float64 loops written from the papers (L-03)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.component_specs import OptimizerSpec
from pipeline.training.optimizers.adaptive import (
    AdaBelief,
    Adafactor,
    Adagrad,
    AdaMax,
    AmsGrad,
    Lion,
    NAdam,
    RAdam,
    RmsProp,
)

LR, DECAY, STEPS = 0.05, 0.1, 12
COMMON = {"lr": LR, "weight_decay": DECAY, "decay_rules": ()}
MOMENTS = {"b1": 0.9, "b2": 0.8, "eps": 1e-4}
B1, B2, EPS = MOMENTS.values()

Directions = Callable[[Iterator[np.ndarray], np.ndarray], Iterator[np.ndarray]]


def gradient_at(p: np.ndarray) -> np.ndarray:
    """Changes its sign in between."""
    return np.sin(3 * p) + 0.2


def expected(rule: Callable[..., Iterator[np.ndarray]]) -> list[np.ndarray]:
    """Parameters after each step; the rule is sent parameters and gives directions."""
    p = start()
    directions = rule()
    next(directions)
    result = []
    for _ in range(STEPS):
        p = p - LR * directions.send(p)
        result.append(p)
    return result


def start() -> np.ndarray:
    return np.linspace(-1.5, 1.7, 9)


def nadam() -> Iterator[np.ndarray]:
    m = v = t = 0
    p = yield
    while True:
        t, g = t + 1, gradient_at(p) + DECAY * p
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        ahead = B1 * m / (1 - B1 ** (t + 1)) + (1 - B1) * g / (1 - B1**t)
        p = yield ahead / (np.sqrt(v / (1 - B2**t)) + EPS)


def radam() -> Iterator[np.ndarray]:
    m = v = t = 0
    longest = 2 / (1 - B2) - 1
    p = yield
    while True:
        t, g = t + 1, gradient_at(p) + DECAY * p
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        length = longest - 2 * t * B2**t / (1 - B2**t)
        direction = m / (1 - B1**t)
        if length >= 5:
            top, bottom = (length - 4) * (length - 2), (longest - 4) * (longest - 2)
            rectified = np.sqrt(top * longest / (bottom * length))
            direction = rectified * direction / (np.sqrt(v / (1 - B2**t)) + EPS)
        p = yield direction


def adamax() -> Iterator[np.ndarray]:
    m, u, t = 0, 0 * start(), 0
    p = yield
    while True:
        t, g = t + 1, gradient_at(p) + DECAY * p
        m, u = B1 * m + (1 - B1) * g, np.maximum(B2 * u, np.abs(g) + EPS)
        p = yield m / (1 - B1**t) / u


def amsgrad() -> Iterator[np.ndarray]:
    m, v, most, t = 0, 0, 0 * start(), 0
    p = yield
    while True:
        t, g = t + 1, gradient_at(p) + DECAY * p
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        most = np.maximum(most, v / (1 - B2**t))
        p = yield m / (1 - B1**t) / (np.sqrt(most) + EPS)


def adabelief() -> Iterator[np.ndarray]:
    m = s = t = 0
    p = yield
    while True:
        t, g = t + 1, gradient_at(p)
        m = B1 * m + (1 - B1) * g
        s = B2 * s + (1 - B2) * (g - m) ** 2 + EPS
        p = yield m / (1 - B1**t) / (np.sqrt(s / (1 - B2**t)) + EPS) + DECAY * p


def lion() -> Iterator[np.ndarray]:
    m = 0
    p = yield
    while True:
        g = gradient_at(p)
        direction = np.sign(B1 * m + (1 - B1) * g) + DECAY * p
        m = B2 * m + (1 - B2) * g
        p = yield direction


def adagrad() -> Iterator[np.ndarray]:
    total = 0.1
    p = yield
    while True:
        g = gradient_at(p) + DECAY * p
        total = total + g * g
        p = yield g / np.sqrt(total + EPS)


def rmsprop(centered: bool) -> Iterator[np.ndarray]:
    mean, square, velocity = 0, 0.5, 0
    p = yield
    while True:
        g = gradient_at(p) + DECAY * p
        mean, square = 0.8 * mean + 0.2 * g, 0.8 * square + 0.2 * g * g
        spread = square - mean**2 if centered else square
        velocity = 0.5 * velocity + g / np.sqrt(spread + EPS)
        p = yield velocity


def rms(*, centered: bool) -> RmsProp:
    return RmsProp(
        **COMMON, decay=0.8, momentum=0.5, eps=EPS, initial_mean_square=0.5, centered=centered
    )


OPTIMIZERS: dict[str, tuple[OptimizerSpec, Callable[[], Iterator[np.ndarray]]]] = {
    "nadam": (NAdam(**COMMON, **MOMENTS), nadam),
    "radam": (RAdam(**COMMON, **MOMENTS), radam),
    "adamax": (AdaMax(**COMMON, **MOMENTS), adamax),
    "amsgrad": (AmsGrad(**COMMON, **MOMENTS), amsgrad),
    "adabelief": (AdaBelief(**COMMON, **MOMENTS), adabelief),
    "lion": (Lion(**COMMON, b1=B1, b2=B2), lion),
    "adagrad": (Adagrad(**COMMON, initial_accumulator=0.1, eps=EPS), adagrad),
    "rmsprop": (rms(centered=False), lambda: rmsprop(False)),
    "rmsprop centered": (rms(centered=True), lambda: rmsprop(True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twelve_steps_match_a_float64_loop(name: str) -> None:
    spec, rule = OPTIMIZERS[name]
    optimizer, params = spec.build(), {"p": jnp.float32(start())}
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    for wanted in expected(rule):
        gradients = {"p": jnp.sin(3 * params["p"]) + 0.2}
        direction, state = step(gradients, state, params)
        params = jax.tree.map(lambda p, d: p - LR * d, params, direction)
        np.testing.assert_allclose(params["p"], wanted, rtol=2e-4, atol=2e-5)


def adafactor(
    p: np.ndarray, clip: float | None, scale: float | None, *, factored: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The gradient of each update, and the parameters after it, by algorithms 4 and 5 of the paper,
    with weight decay."""
    rows, columns, v = np.zeros(p.shape[0]), np.zeros(p.shape[1]), np.zeros_like(p)
    for t in range(1, 51):
        g = gradient_at(p)
        share, squares = 1 - t**-0.8, g * g + 1e-30
        v = share * v + (1 - share) * squares
        if factored:
            rows = share * rows + (1 - share) * squares.mean(axis=1)
            columns = share * columns + (1 - share) * squares.mean(axis=0)
            v = np.outer(rows, columns) / rows.mean()
        u = g / np.sqrt(v)
        if clip is not None:
            u = u / max(1, np.sqrt((u * u).mean()) / clip)
        if scale is not None:
            u = u * max(scale, np.sqrt((p * p).mean()))
        p = p - LR * (u + DECAY * p)
        yield g, p


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "clip", "scale"), [(6, 0.7, 1e-3), (6, None, None), (7, 1.0, 1.5), (1, 1.0, None)]
)
def test_fifty_steps_of_adafactor_match_the_paper(
    size: int, clip: float | None, scale: float | None
) -> None:
    """A matrix of 6 rows and 9 columns is factored from the size 6 on. The gradients are the
    same, since near 0 roundings would grow into other directions."""
    p = np.random.default_rng(5).normal(size=(6, 9))
    spec = Adafactor(
        **COMMON, decay_power=0.8, eps=1e-30, clip_rms=clip, min_scale=scale, factored_size=size
    )
    optimizer, params = spec.build(), {"p": jnp.float32(p)}
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    for gradient, wanted in adafactor(p, clip, scale, factored=size <= 6):
        direction, state = step({"p": jnp.float32(gradient)}, state, params)
        params = jax.tree.map(lambda p, d: p - LR * d, params, direction)
        np.testing.assert_allclose(params["p"], wanted, rtol=2e-5, atol=2e-6)
