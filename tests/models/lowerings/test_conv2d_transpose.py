"""The transpose of a convolution is jax's, and so are its gradients, by whatever lowering."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from pipeline.models.lowerings.candidates import list_candidates
from pipeline.models.lowerings.conv2d_transpose import Padding, conv2d_transpose, transpose_window
from pipeline.models.lowerings.problem import (
    DEFAULTS,
    Axis,
    ConvWindow,
    Lowering,
    LoweringPolicy,
    Lowerings,
    Problem,
    RecordingPolicy,
)
from tests.models.build import QUICK

RNG = np.random.default_rng(0)


def operands(size: int = 5, kernel: int = 3) -> tuple[Array, Array]:
    x = RNG.normal(size=(2, size, size + 1, 4))
    return jnp.asarray(x, jnp.float32), jnp.asarray(
        RNG.normal(size=(kernel, kernel, 4, 3)), jnp.float32
    )


def by_jax(x: Array, kernel: Array, stride: int, padding: Padding) -> Array:
    return lax.conv_transpose(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def with_gradients(function: Any, *args: Array) -> Any:
    def compute(*args: Array) -> Any:
        y, backward = jax.vjp(function, *args)
        return y, backward(jnp.cos(y))

    return jax.jit(compute, compiler_options=QUICK)(*args)


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


OTHER_KERNELS = [(1, 1), (1, 2), (2, 2), (3, 1), (5, 3)]


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(
    ("kernel", "stride"),
    [(3, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_KERNELS)],
)
def test_results_and_gradients_match_jax(kernel: int, stride: int, padding: Padding) -> None:
    x, weights = operands(kernel=kernel)

    def ours(x: Array, weights: Array) -> Array:
        return conv2d_transpose(x, weights, strides=(stride, stride), padding=padding)

    expected = with_gradients(lambda x, w: by_jax(x, w, stride, padding), x, weights)
    found = with_gradients(ours, x, weights)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected
    )
    np.testing.assert_array_equal(found[0], expected[0])


@dataclass(frozen=True)
class LastCandidate:
    """A policy that never chooses the default: each problem's last formula by XLA."""

    def choose(self, problem: Problem) -> Lowering:
        return list_candidates(problem, frozenset(("xla",)))[-1]


@pytest.mark.medium
@pytest.mark.parametrize("policy", [DEFAULTS, LastCandidate()], ids=["defaults", "chosen"])
def test_grouped_windows_with_unreached_rows_match_jax(policy: LoweringPolicy) -> None:
    """Stride 3 and 2, dilation 1 and 3, pads, and rows after the last that a kernel reaches."""
    x, weights = operands()
    weights = weights[:, :, :2].repeat(2, -1)
    axes = Axis(14, 3, 3, 1, (1, 1)), Axis(17, 3, 2, 3, (1, -1))
    window = ConvWindow(*axes, 2)
    assert window.output_size == x.shape[1:3]

    def native(x: Array, weights: Array) -> Array:
        return lax.conv_general_dilated(
            x,
            weights,
            (1, 1),
            ((1, 2), (5, 7)),
            lhs_dilation=(3, 2),
            rhs_dilation=(1, 3),
            feature_group_count=2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    found = with_gradients(lambda x, w: transpose_window(window, x, w, policy), x, weights)
    expected = with_gradients(native, x, weights)
    assert found[0].shape == (2, 14, 17, 6)
    assert_close(found, expected)


@pytest.mark.medium
def test_chosen_lowerings_match_the_default() -> None:
    x, weights = operands(kernel=2)
    recording = RecordingPolicy()
    jax.eval_shape(partial(conv2d_transpose, strides=(2, 2), policy=recording), x, weights)
    families = {"input_grad": "phases", "weight_grad": "per_tap_matmul"}
    chosen = Lowerings(
        tuple(
            (str(problem), Lowering(families[problem.role]))
            for problem in recording.problems
            if problem.role in families
        )
    )
    assert len(recording.problems) == 3

    def ours(x: Array, weights: Array) -> Array:
        return conv2d_transpose(x, weights, strides=(2, 2), policy=chosen)

    expected = with_gradients(lambda x, w: by_jax(x, w, 2, "SAME"), x, weights)
    found = with_gradients(ours, x, weights)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected
    )
