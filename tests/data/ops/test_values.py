"""Ops on values and labels, against hand-worked numbers (D-05)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.data.columns import ColumnSpec, Targets
from pipeline.data.ops.values import (
    ConstantLabels,
    Hwc2Chw,
    Normalize,
    OneHot,
    Rescale,
    TypeCast,
    Whiten,
)
from tests.data.ops.op_calls import BYTES, CIFAR, FLOATS, IMAGE, LABEL, LABELS, on_host

NONE = np.zeros((3, 0), np.float32)


def test_whiten_uses_mean_and_deviation_of_each_image() -> None:
    images = np.random.default_rng(1).integers(0, 256, (3, 6, 5, 3), np.uint8)
    images[1] //= 9
    result = Whiten()(np, images, NONE)
    for image, found in zip(images.astype(np.float64), result, strict=True):
        expected = (image - image.mean()) / max(image.std(), 1 / np.sqrt(image.size))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert result.dtype == np.float32


def test_whitened_constant_image_is_zero() -> None:
    images = np.full((3, 4, 4, 1), 200, np.uint8)
    np.testing.assert_array_equal(Whiten()(np, images, NONE), 0)


def test_rescale_multiplies_then_adds():
    result = on_host(Rescale(factor=0.5, shift=-1), np.array([[0, 1, 255]], np.uint8))
    assert result.dtype == np.float32
    assert result.tolist() == [[-1, -0.5, 126.5]]


def test_two_rescales_equal_mnist_normalisation():
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)  # D-06
    scaled = on_host(Rescale(factor=1 / 255, shift=0), pixels)
    twice = on_host(Rescale(factor=1 / 0.3081, shift=-0.1307 / 0.3081), scaled)
    once = on_host(Normalize(mean=(0.1307,), std=(0.3081,)), scaled)
    np.testing.assert_allclose(twice, once, atol=1e-6)


def test_normalize_works_channel_by_channel():
    result = on_host(Normalize(**CIFAR), FLOATS)
    for channel, (mean, std) in enumerate(zip(*CIFAR.values(), strict=True)):
        expected = (FLOATS[..., channel].astype(np.float64) - mean) / std
        np.testing.assert_allclose(result[..., channel], expected, rtol=1e-6, atol=1e-6)


def test_normalize_refuses_another_number_of_channels():
    with pytest.raises(ValueError, match="have 1 values for images of 3 channels"):
        Normalize(mean=(0.5,), std=(0.5,)).output(IMAGE)


def test_normalize_refuses_mean_and_std_of_different_length():
    with pytest.raises(ValidationError, match="mean has 3 values and std has 1"):
        Normalize(mean=(0.5, 0.5, 0.5), std=(0.5,))


def test_hwc2chw_moves_the_channels_first():
    reported, result = Hwc2Chw().output(IMAGE), on_host(Hwc2Chw(), BYTES)
    assert (reported.shape, reported.layout) == ((3, 7, 9), "chw")
    for channel in range(3):
        np.testing.assert_array_equal(result[:, channel], BYTES[..., channel])


def test_type_cast_applies_to_the_label_by_default():
    assert TypeCast(dtype="int32").column == "label"
    assert TypeCast(dtype="int32").output(ColumnSpec((), "uint8")) == LABEL
    assert on_host(TypeCast(dtype="int32"), LABELS.astype(np.uint8)).dtype == np.int32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
@pytest.mark.parametrize("xp", [np, jnp])
def test_one_hot_has_a_single_one_at_the_label(xp, dtype):
    op = OneHot(classes=10)
    result = op(xp, xp.asarray(LABELS.astype(dtype)), None)
    np.testing.assert_array_equal(result, np.eye(10, dtype=np.float32)[LABELS])
    assert result.dtype == np.float32
    assert op.column == "label"
    assert op.output(LABEL) == ColumnSpec((10,), "float32")


def test_one_hot_of_a_label_out_of_range_is_all_zeros():
    assert not on_host(OneHot(classes=4), np.array([-1, 4])).any()


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_one_hot_refuses_non_integer_labels(dtype):
    with pytest.raises(ValueError, match=f"needs integer labels, not {dtype}"):
        OneHot(classes=10).output(ColumnSpec((), dtype))


def test_one_hot_smoothing_is_spread_over_all_classes():
    result = on_host(OneHot(classes=4, smoothing=0.2), np.array([1, 7]))
    np.testing.assert_allclose(result, [[0.05, 0.85, 0.05, 0.05], [0, 0, 0, 0]], rtol=1e-6)


def test_constant_labels_replace_the_classes() -> None:
    op = ConstantLabels(values={"real": 1, "generated": 0.25})
    assert op.output(ColumnSpec((), "int32")) == ColumnSpec((2,), "float32")
    for xp in (np, jnp):
        np.testing.assert_array_equal(op(xp, xp.arange(3), NONE), [[1, 0.25]] * 3)
    targets = op.replace_targets(Targets(("a", "b", "c")))
    assert (targets.names, targets.task) == (("real", "generated"), "multi_label")
