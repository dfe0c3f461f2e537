from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.training.robustness.attacks import Ball, compute_l2, draw_uniforms

SHAPE = (3, 4, 4, 2)
PIXELS = arrays(np.float32, SHAPE, elements=st.floats(0, 1, width=32))
POINTS = arrays(np.float32, SHAPE, elements=st.floats(-100, 100, width=32))
RADIUS = st.floats(1e-3, 1.0)


@pytest.mark.medium
@settings(max_examples=40, deadline=None)
@given(PIXELS, POINTS, RADIUS, st.sampled_from(["linf", "l2"]))
def test_projection_is_in_the_ball_and_idempotent(
    images: np.ndarray, points: np.ndarray, radius: float, norm: str
) -> None:
    ball = Ball(norm, radius, jnp.asarray(images))  # type: ignore[arg-type]
    projected = ball.project(jnp.asarray(points))
    changes = projected - ball.images
    length = compute_l2(changes) if norm == "l2" else jnp.abs(changes)
    assert float(length.max()) <= radius * (1 + 1e-5) + 1e-6
    assert 0 <= float(projected.min()) <= float(projected.max()) <= 1
    np.testing.assert_allclose(ball.project(projected), projected, atol=1e-6)


@pytest.mark.medium
def test_step_has_its_length_in_the_norm() -> None:
    images = jnp.full(SHAPE, 0.5)
    gradients = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), jnp.float32) * 1e-5
    linf = Ball("linf", 0.4, images).step(images, gradients, 0.1) - images
    np.testing.assert_allclose(np.abs(linf), 0.1, rtol=1e-5)
    l2 = Ball("l2", 0.4, images).step(images, gradients, 0.1) - images
    np.testing.assert_allclose(compute_l2(l2), 0.1, rtol=1e-4)
    # An image without a gradient stays.
    np.testing.assert_array_equal(Ball("l2", 0.4, images).step(images, 0 * gradients, 0.1), images)


@pytest.mark.medium
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_random_images_fill_the_ball(norm: str) -> None:
    shape = (200, 8, 8, 1)
    images = jnp.full(shape, 0.5)
    draws = draw_uniforms(jnp.array([1, 0], jnp.uint32), 0, jnp.arange(200), 0, 64)
    drawn = Ball(norm, 0.3, images).draw(draws.reshape(shape)) - images  # type: ignore[arg-type]
    assert abs(float(drawn.mean())) < 0.01
    if norm == "l2":
        np.testing.assert_allclose(compute_l2(drawn), 0.3, rtol=1e-4)
    else:
        assert float(drawn.std()) == pytest.approx(0.3 / 3**0.5, rel=0.05)


@pytest.mark.medium
def test_draws_depend_only_on_seed_turn_op_and_sample() -> None:
    seed = jnp.array([1, 0], jnp.uint32)
    all_draws = np.asarray(draw_uniforms(seed, 3, jnp.arange(10), 0, 8))
    np.testing.assert_array_equal(draw_uniforms(seed, 3, jnp.arange(4, 7), 0, 8), all_draws[4:7])
    np.testing.assert_array_equal(draw_uniforms(seed, 3, jnp.arange(10), 0, 5), all_draws[:, :5])
    for turn, op in ((4, 0), (3, 1)):
        assert (np.asarray(draw_uniforms(seed, turn, jnp.arange(10), op, 8)) != all_draws).all()
