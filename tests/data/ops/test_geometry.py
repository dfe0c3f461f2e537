"""Crops, pads, flips and holes against plain loops and hand-worked numbers (D-05)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.ops.geometry import (
    CenterCrop,
    Cutout,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
)
from tests.data.ops.op_calls import (
    BYTES,
    FLOATS,
    IMAGE,
    images,
    on_host,
    spec_of,
    uniforms_for,
    units,
)


def test_random_crop_cuts_each_padded_image_at_its_uniforms():
    op = RandomCrop(size=(6, 5), padding=(1, 2, 3, 4))
    uniforms = uniforms_for(op)
    result = on_host(op, BYTES, uniforms)
    for image, (v, h), got in zip(BYTES, uniforms, result, strict=True):
        padded = np.zeros((10, 16, 3), np.uint8)
        padded[1:8, 3:12] = image
        top, left = int(v * 5), int(h * 12)  # 10 - 6 + 1 and 16 - 5 + 1 places
        np.testing.assert_array_equal(got, padded[top : top + 6, left : left + 5])


def test_random_crop_reaches_every_offset():
    op = RandomCrop(size=(2, 2), padding=(1, 0, 0, 1))
    values = np.arange(1, 10, dtype=np.uint8).reshape(1, 3, 3, 1).repeat(400, axis=0)
    corners = {tuple(crop.ravel()) for crop in on_host(op, values)}
    padded = np.pad(values[0, :, :, 0], ((1, 0), (0, 1)))
    assert corners == {
        tuple(padded[y : y + 2, x : x + 2].ravel()) for y in range(3) for x in range(3)
    }


@pytest.mark.slow
@given(values=images, uniforms=units)
def test_full_size_random_crop_without_padding_changes_nothing(values, uniforms):
    op = RandomCrop(size=values.shape[1:3])
    np.testing.assert_array_equal(on_host(op, values, uniforms), values)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        (RandomCrop(size=(8, 9)), "8x9 from 7x9"),
        (RandomCrop(size=(9, 12), padding=(1, 1, 1, 1)), "9x12 from 9x11"),
        (CenterCrop(size=(7, 10)), "7x10 from 7x9"),
    ],
)
def test_crop_larger_than_the_image_is_refused(op, sizes):
    with pytest.raises(ValueError, match=f"can't crop {sizes}, padding included"):
        op.output(IMAGE)


@pytest.mark.parametrize(
    ("size", "rows", "columns"), [((7, 9), (0, 7), (0, 9)), ((4, 4), (1, 5), (2, 6))]
)
def test_center_crop_keeps_the_middle(size, rows, columns):
    expected = BYTES[:, slice(*rows), slice(*columns)]
    np.testing.assert_array_equal(on_host(CenterCrop(size=size), BYTES), expected)


def test_pad_surrounds_with_the_fill():
    values = np.array([[[[1], [2]]]], np.uint8)
    result = on_host(Pad(padding=(1, 0, 0, 2), fill=9), values)
    assert result[0, :, :, 0].tolist() == [[9, 9, 9, 9], [1, 2, 9, 9]]


@pytest.mark.slow
@given(
    values=images, padding=st.tuples(*[st.integers(0, 3)] * 4), fill=st.sampled_from([0, 7, 255])
)
def test_cropping_the_padding_restores_the_image(values, padding, fill):
    padded = on_host(Pad(padding=padding, fill=fill), values)
    top, _, left, _ = padding
    _, height, width, _ = values.shape
    np.testing.assert_array_equal(padded[:, top : top + height, left : left + width], values)
    assert padded.sum() == values.sum() + fill * (padded.size - values.size)


@pytest.mark.parametrize("fill", [-1, 256, 0.5])
def test_non_byte_fill_is_refused(fill):
    with pytest.raises(ValueError, match=rf"uint8 images with {float(fill)}; .* from 0 to 255"):
        Pad(padding=(1, 1, 1, 1), fill=fill).output(IMAGE)


def test_float_images_take_any_fill():
    op = Pad(padding=(1, 0, 0, 0), fill=-0.5)
    assert op.output(spec_of(FLOATS)).shape == (8, 9, 3)
    assert (on_host(op, FLOATS)[:, 0] == -0.5).all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("edge", [1, 1, 1, 2, 3, 3]),
        ("reflect", [3, 2, 1, 2, 3, 2]),
        ("symmetric", [2, 1, 1, 2, 3, 3]),
    ],
)
def test_pad_repeats_or_mirrors_the_image(mode, expected):
    values = np.array([1, 2, 3], np.uint8).reshape(1, 1, 3, 1)
    result = on_host(Pad(padding=(0, 0, 2, 1), mode=mode), values)
    assert result.ravel().tolist() == expected


def test_pad_refuses_reflection_beyond_the_image():
    with pytest.raises(ValueError, match="of 7x9; reflect allows at most 6 rows and 8 columns"):
        Pad(padding=(7, 0, 0, 0), mode="reflect").output(IMAGE)


@pytest.mark.slow
@given(values=images, uniforms=units, prob=st.floats(0, 1), vertical=st.booleans())
def test_flipping_twice_with_the_same_uniforms_changes_nothing(values, uniforms, prob, vertical):
    op = (RandomVerticalFlip if vertical else RandomHorizontalFlip)(prob=prob)
    once = on_host(op, values, uniforms)
    np.testing.assert_array_equal(on_host(op, once, uniforms), values)


def test_flip_mirrors_the_images_whose_uniform_is_below_prob():
    uniforms = np.array([[0.0], [0.29], [0.31], [0.99]], np.float32)
    result = on_host(RandomHorizontalFlip(prob=0.3), BYTES[:4], uniforms)
    mirrored = np.array([[list(reversed(row)) for row in image] for image in BYTES[:2]])
    np.testing.assert_array_equal(result, np.concatenate([mirrored, BYTES[2:4]]))


@pytest.mark.parametrize("prob", [0.0, 1.0])
def test_flip_is_deterministic_at_prob_zero_and_one(prob):
    extremes = np.array([[0.0], [1 - 2**-24]], np.float32)
    expected = BYTES[:2, :, ::-1] if prob else BYTES[:2]
    result = on_host(RandomHorizontalFlip(prob=prob), BYTES[:2], extremes)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("holes", [1, 3])
def test_cutout_blanks_squares_clipped_at_the_edges(size, holes):
    op = Cutout(size=size, holes=holes)
    uniforms = uniforms_for(op)
    expected = FLOATS.copy()
    for image, drawn in zip(expected, uniforms, strict=True):
        for v, h in zip(drawn[:holes], drawn[holes:], strict=True):
            top, left = int(v * 7) - size // 2, int(h * 9) - size // 2
            image[max(top, 0) : top + size, max(left, 0) : left + size] = 0
    np.testing.assert_array_equal(on_host(op, FLOATS, uniforms), expected)


def test_hole_larger_than_the_image_is_refused():
    with pytest.raises(ValueError, match="a hole of 8x8 is larger than the image of 7x9"):
        Cutout(size=8).output(IMAGE)
