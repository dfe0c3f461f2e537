from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pipeline.models.lowerings import lowered_layers as conv2d_module
from pipeline.models.lowerings.lowered_layers import conv2d
from tests.models.build import random

CANONICAL = "b01f_01io->b01f"


def native(
    images: jax.Array,
    kernel: jax.Array,
    *,
    strides: tuple[int, int],
    padding: str | Sequence[tuple[int, int]],
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> jax.Array:
    return lax.conv_general_dilated(
        images,
        kernel,
        strides,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def gradients(
    convolve: Callable[..., jax.Array], images: np.ndarray, kernel: np.ndarray, **how: Any
) -> tuple[jax.Array, jax.Array]:
    """Of a sum in which every result weighs differently."""

    def weighed(images: jax.Array, kernel: jax.Array) -> jax.Array:
        y = convolve(images, kernel, **how)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

    return jax.jit(jax.grad(weighed, argnums=(0, 1)))(images, kernel)


def assert_native_gradients(images: np.ndarray, kernel: np.ndarray, **how: Any) -> None:
    ours, jaxs = gradients(conv2d, images, kernel, **how), gradients(native, images, kernel, **how)
    for our, jax_ in zip(ours, jaxs, strict=True):
        np.testing.assert_allclose(our, jax_, rtol=1e-5, atol=1e-5 * np.abs(jax_).max())


def by_loops(
    images: np.ndarray,
    kernel: np.ndarray,
    stride: int,
    pads: tuple[tuple[int, int], tuple[int, int]],
    dilation: int,
    groups: int,
) -> np.ndarray:
    """Convolution as its definition reads."""
    padded = np.pad(images.astype(np.float64), ((0, 0), *pads, (0, 0)))
    k, channels, features = kernel.shape[0], kernel.shape[2], kernel.shape[3]
    span = (k - 1) * dilation + 1
    height = (padded.shape[1] - span) // stride + 1
    width = (padded.shape[2] - span) // stride + 1
    y = np.zeros((len(images), height, width, features))
    for row, column, feature in np.ndindex(height, width, features):
        first = feature // (features // groups) * channels
        seen = padded[
            :,
            row * stride : row * stride + span : dilation,
            column * stride : column * stride + span : dilation,
            first : first + channels,
        ]
        y[:, row, column, feature] = (seen * kernel[..., feature]).sum((1, 2, 3))
    return y


@pytest.mark.parametrize(
    ("stride", "pads", "dilation", "groups"),
    [
        (1, ((0, 0), (0, 0)), 1, 1),
        (2, ((0, 1), (1, 1)), 1, 1),
        (3, ((2, 0), (0, 1)), 2, 1),
        (1, ((1, 1), (1, 1)), 1, 2),
    ],
)
def test_conv2d_matches_its_definition(
    stride: int, pads: tuple[tuple[int, int], tuple[int, int]], dilation: int, groups: int
) -> None:
    images, kernel = random(2, 7, 6, 4), random(3, 3, 4 // groups, 6, seed=1)
    y = conv2d(
        images,
        kernel,
        strides=(stride, stride),
        padding=pads,
        dilation=(dilation, dilation),
        groups=groups,
    )
    expected = by_loops(images, kernel, stride, pads, dilation, groups)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


PADDINGS = ("SAME", "VALID", [[1, 0], [2, 3]])
"""In every pair with a size and with a stride."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stride", "padding"),
    [
        (size, stride, PADDINGS[(row + column + 1) % 3])
        for row, size in enumerate((1, 2, 3, 5, 7))
        for column, stride in enumerate((1, 2, 3))
    ],
)
def test_gradients_match_jax(size: int, stride: int, padding: Any) -> None:
    images, kernel = random(2, 9, 8, 3), random(size, size, 3, 5, seed=1)
    assert_native_gradients(images, kernel, strides=(stride, stride), padding=padding)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_and_dilated_gradients_match_jax(groups: int, padding: str) -> None:
    images, kernel = random(2, 9, 8, 4), random(3, 2, 4 // groups, 8, seed=1)
    assert_native_gradients(
        images, kernel, strides=(2, 1), padding=padding, dilation=(1, 2), groups=groups
    )


@pytest.mark.slow
def test_gradients_on_other_platforms_match_jax(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def elsewhere(*operands: jax.Array, cpu: Any, default: Callable[..., Any]) -> Any:
        return default(*operands)

    images, kernel = random(2, 6, 5, 4), random(3, 3, 2, 6, seed=1)
    how = {"strides": (2, 1), "padding": "SAME", "groups": 2}
    expected = gradients(native, images, kernel, **how)
    monkeypatch.setattr(conv2d_module.lax, "platform_dependent", elsewhere)
    for ours, derived in zip(gradients(conv2d, images, kernel, **how), expected, strict=True):
        np.testing.assert_array_equal(ours, derived)


def in_a_loop(convolve: Callable[..., jax.Array]) -> jax.stages.Traced:
    """Ten steps of descent on a kernel and its images, as one program."""

    def loss(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        images, kernel = operands
        images = jax.nn.relu(images)
        return (convolve(images, kernel, strides=(2, 2), padding="SAME") ** 2).sum()

    def step(_: int, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jax.tree.map(lambda x, g: x - 1e-3 * g, operands, jax.grad(loss)(operands))

    operands = random(4, 8, 8, 3), random(3, 3, 3, 5, seed=1)
    return jax.jit(lambda operands: lax.fori_loop(0, 10, step, operands)).trace(operands)


def orders(text: str) -> set[str]:
    """In which orders of dimensions a compiled program convolves."""
    return set(re.findall(r"dim_labels=(\w+->\w+)", text))


@pytest.mark.slow
def test_gradients_in_a_loop_use_the_fast_cpu_dimension_order() -> None:
    text = in_a_loop(conv2d).lower().compile().as_text()
    assert text is not None
    assert orders(text) == {CANONICAL}
    assert orders(in_a_loop(native).lower().compile().as_text() or "") > {CANONICAL}


@pytest.mark.medium
def test_kernel_gradient_is_an_unfused_call() -> None:
    text = in_a_loop(conv2d).lower().compile().as_text()
    assert text is not None
    assert len(re.findall(r" call\(.*_weight_grad", text)) == 1


def test_gradients_are_not_custom_when_lowered_for_gpu() -> None:
    traced = in_a_loop(conv2d)
    assert "jit(_compute_weight_grad)" in traced.lower().as_text(debug_info=True)
    elsewhere = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "jit(_compute_weight_grad)" not in elsewhere
