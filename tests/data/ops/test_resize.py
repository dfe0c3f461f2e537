"""Resizes and resized crops against plain loops and hand-worked numbers (D-05)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.resize import BoundingBoxCrop, RandomResizedCrop, Resize
from tests.data.ops.op_calls import BYTES, FLOATS, images, on_host, spec_of, uniforms_for


def bilinear(image, size):
    """Bilinear interpolation as its definition has it: a hat function over every source pixel."""
    height, width, _ = image.shape
    result = np.zeros((*size, image.shape[2]))
    for y in range(size[0]):
        for x in range(size[1]):
            row = min(max((y + 0.5) * height / size[0] - 0.5, 0), height - 1)
            column = min(max((x + 0.5) * width / size[1] - 0.5, 0), width - 1)
            for i in range(height):
                for j in range(width):
                    weight = max(0, 1 - abs(row - i)) * max(0, 1 - abs(column - j))
                    result[y, x] += weight * image[i, j]
    return result


SIZES = [(3, 4), (14, 18), (5, 20), (1, 1), (7, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_linear_resize_of_floats_is_bilinear(size):
    expected = [bilinear(image.astype(np.float64), size) for image in FLOATS[:2]]
    np.testing.assert_allclose(on_host(Resize(size=size), FLOATS[:2]), expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_linear_resize_of_bytes_is_bilinear_to_within_a_level(size):
    expected = np.array([bilinear(image, size) for image in BYTES[:2]])
    error = on_host(Resize(size=size), BYTES[:2]) - expected
    # Half a level of rounding, half from cutting products off at quarters, and weights of 11 bits.
    assert abs(error).max() < 1.125
    assert abs(error).mean() < 0.35


def test_linear_resize_has_half_pixel_centres_and_clamps_the_edges():
    row = np.array([0, 100], np.uint8).reshape(1, 1, 2, 1)
    assert on_host(Resize(size=(1, 4)), row).ravel().tolist() == [0, 25, 75, 100]
    assert on_host(Resize(size=(1, 1)), row).ravel().tolist() == [50]


def test_nearest_resize_uses_the_pixel_at_the_floor():
    row = np.array([10, 20, 30, 40, 50], np.uint8).reshape(1, 1, 5, 1)
    wide, narrow = (Resize(size=(1, n), interpolation="nearest") for n in (10, 2))
    assert on_host(wide, row).ravel().tolist() == [10, 10, 20, 20, 30, 30, 40, 40, 50, 50]
    assert on_host(narrow, row).ravel().tolist() == [10, 30]


@pytest.mark.slow
@given(values=images, interpolation=st.sampled_from(["linear", "nearest"]))
def test_resize_to_the_same_size_changes_nothing(values, interpolation):
    op = Resize(size=values.shape[1:3], interpolation=interpolation)
    np.testing.assert_array_equal(on_host(op, values), values)
    floats = values.astype(np.float32) / 7
    np.testing.assert_array_equal(on_host(op, floats), floats)


@pytest.mark.slow
@given(level=st.integers(0, 255), height=st.integers(1, 300), width=st.integers(1, 300))
def test_resize_keeps_a_constant_image_constant(level, height, width):
    values = np.full((1, 3, 5, 1), level, np.uint8)
    assert (on_host(Resize(size=(height, width)), values) == level).all()


def test_resize_keeps_half_precision():
    assert on_host(Resize(size=(4, 4)), FLOATS.astype(np.float16)).dtype == np.float16


@pytest.mark.parametrize(
    ("size", "image", "expected"),
    [(4, (7, 9), (4, 5)), (4, (9, 7), (5, 4)), (20, (5, 5), (20, 20)), (3, (100, 7), (42, 3))],
)
def test_resize_to_one_number_keeps_the_aspect_ratio(size, image, expected):
    assert Resize(size=size).output(ColumnSpec((*image, 3), "uint8")).shape == (*expected, 3)


def test_pillow_kernels_accept_only_bytes():
    with pytest.raises(ValueError, match="antialias needs uint8 images, not float32; resize befor"):
        Resize(size=(4, 4), interpolation="antialias").output(spec_of(FLOATS))


def test_area_refuses_sums_beyond_int32():
    with pytest.raises(ValueError, match="average over images as large as 3000x3000; crop first"):
        Resize(size=4, interpolation="area").output(ColumnSpec((3000, 3000, 3), "uint8"))


def test_resize_refuses_integers_other_than_bytes():
    with pytest.raises(ValueError, match="needs uint8, float16 or float32 images, not int32"):
        Resize(size=(4, 4)).output(ColumnSpec((7, 9, 3), "int32"))


@pytest.mark.parametrize("scale", [(0.5, 1), (1e30, 1e30)])
@pytest.mark.parametrize("ratio", [(1e-12, 1e-12), (10, 20), (1e12, 1e12), (1e-30, 1e30)])
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (4, 1), (7, 9)])
def test_box_of_any_scale_and_ratio_is_within_the_image(scale, ratio, size):
    op = RandomResizedCrop(size=(4, 4), scale=scale, ratio=ratio)
    box = op.draw_box(np, uniforms_for(op), *size)
    for first, length, limit in ((box.top, box.height, size[0]), (box.left, box.width, size[1])):
        assert (first >= 0).all()
        assert (length >= 1).all()
        assert (first + length <= limit).all()


def test_unfit_random_resized_crop_is_the_largest_central_crop():
    op = RandomResizedCrop(size=(4, 4), scale=(1.0, 1.0), ratio=(3.0, 3.0), max_attempts=3)
    box = op.draw_box(np, uniforms_for(op), 7, 9)
    assert [part[0] for part in (box.top, box.left, box.height, box.width)] == [2, 0, 3, 9]


@pytest.mark.slow
@given(uniforms=arrays(np.float32, (4, 22), elements=st.floats(0, 1, exclude_max=True, width=32)))
def test_resized_crop_is_within_the_image(uniforms):
    box = RandomResizedCrop(size=(4, 4), scale=(0.01, 1.0), ratio=(0.1, 10.0)).draw_box(
        np, uniforms, 7, 9
    )
    for first, length, side in ((box.top, box.height, 7), (box.left, box.width, 9)):
        assert ((first >= 0) & (length >= 1) & (first + length <= side)).all()


@pytest.mark.parametrize("interpolation", ["linear", "nearest", "cubic"])
def test_random_resized_crop_equals_crop_then_resize(interpolation):
    op = RandomResizedCrop(size=(8, 5), interpolation=interpolation)
    uniforms = uniforms_for(op)
    box = op.draw_box(np, uniforms, 7, 9)
    resize = Resize(size=(8, 5), interpolation=interpolation)
    for n, got in enumerate(on_host(op, BYTES, uniforms)):
        top, left, height, width = (
            int(part[n]) for part in (box.top, box.left, box.height, box.width)
        )
        crop = BYTES[n : n + 1, top : top + height, left : left + width]
        np.testing.assert_array_equal(got, on_host(resize, crop)[0])


HEIGHT, WIDTH = 40, 60
BOUNDING_BOXES = np.array(
    [
        [[0.1, 0.2, 0.5, 0.6], [0, 0, 0, 0]],
        [[0.0, 0.0, 0.2, 0.2], [0.7, 0.7, 0.9, 0.95]],
        [[0, 0, 0, 0], [0.4, 0.4, 0.4, 0.9]],
        [[0.0, 0.0, 1.0, 1.0], [0, 0, 0, 0]],
    ],
    np.float32,
)
"""One box, two, none with an area, and the whole image."""


def share_covered(crop, box):
    """The share of a box, in shares of the image, that a crop (top, left, bottom, right) covers."""
    top, left, bottom, right = (float(edge) for edge in box)
    top, bottom, left, right = top * HEIGHT, bottom * HEIGHT, left * WIDTH, right * WIDTH
    rows = max(0.0, min(crop[2], bottom) - max(crop[0], top))
    columns = max(0.0, min(crop[3], right) - max(crop[1], left))
    return rows * columns / ((bottom - top) * (right - left))


def take_first(op, boxes, uniforms):
    """The crop of a sample by a loop over the draws (top, left, height, width)."""
    count = op.max_attempts
    sides = RandomResizedCrop(size=op.size, scale=op.scale, ratio=op.ratio, max_attempts=count)
    rows, columns = sides.draw_sides(np, uniforms[None], HEIGHT, WIDTH)
    objects = [box for box in boxes if (box[2] - box[0]) * (box[3] - box[1]) > 0] or [(0, 0, 1, 1)]
    for number in range(count):
        height, width = int(rows[0, number]), int(columns[0, number])
        if height > HEIGHT or width > WIDTH:
            continue
        top = int(uniforms[2 * count + number] * np.float32(HEIGHT - height + 1))
        left = int(uniforms[3 * count + number] * np.float32(WIDTH - width + 1))
        crop = (top, left, top + height, left + width)
        if max(share_covered(crop, box) for box in objects) >= op.min_covered:
            return top, left, height, width
    return 0, 0, HEIGHT, WIDTH


@pytest.mark.parametrize("min_covered", [0.0, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("attempts", [1, 3, 20])
def test_bounding_box_crop_is_the_first_draw_that_covers_enough(min_covered, attempts):
    op = BoundingBoxCrop(size=(8, 8), min_covered=min_covered, max_attempts=attempts)
    boxes = np.tile(BOUNDING_BOXES, (25, 1, 1))
    uniforms = np.random.default_rng(3).random((100, op.draws), np.float32)
    drawn = op.draw_box(np, boxes, uniforms, HEIGHT, WIDTH)
    got = np.stack([drawn.top, drawn.left, drawn.height, drawn.width], axis=1)
    expected = [take_first(op, *sample) for sample in zip(boxes, uniforms, strict=True)]
    np.testing.assert_array_equal(got, expected)
    if attempts == 20 and min_covered == 0.5:
        assert len({tuple(row) for row in got.tolist()}) > 50


def test_crop_that_must_cover_everything_is_the_whole_image():
    op = BoundingBoxCrop(size=(8, 8), min_covered=1, scale=(0.05, 0.5), max_attempts=4)
    uniforms = np.random.default_rng(0).random((4, op.draws), np.float32)
    drawn = op.draw_box(np, BOUNDING_BOXES[[2, 3, 2, 3]], uniforms, HEIGHT, WIDTH)
    assert (drawn.height.tolist(), drawn.width.tolist()) == ([HEIGHT] * 4, [WIDTH] * 4)


@pytest.mark.medium
def test_bounding_box_crop_is_equal_on_host_and_device():
    op = BoundingBoxCrop(size=(8, 12), max_attempts=5)
    pixels = np.random.default_rng(1).integers(0, 256, (4, HEIGHT, WIDTH, 3), np.uint8)
    uniforms = np.random.default_rng(2).random((4, op.draws), np.float32)
    host, boxes = op.map(np, (pixels, BOUNDING_BOXES), uniforms)
    device, moved = jax.jit(lambda *arrays: op.map(jnp, arrays[:2], arrays[2]))(
        pixels, BOUNDING_BOXES, uniforms
    )
    np.testing.assert_array_equal(device, host)
    np.testing.assert_allclose(moved, boxes, atol=1e-6)
    crop = op.draw_box(np, BOUNDING_BOXES, uniforms, HEIGHT, WIDTH)
    origin = np.stack([crop.top, crop.left] * 2, -1)[:, None].astype(np.float64)
    sides = np.stack([crop.height, crop.width] * 2, -1)[:, None]
    edges = ((BOUNDING_BOXES * np.array([HEIGHT, WIDTH, HEIGHT, WIDTH]) - origin) / sides).clip(
        0, 1
    )
    has_area = (edges[..., 2:] > edges[..., :2]).all(-1, keepdims=True)
    np.testing.assert_allclose(boxes, np.where(has_area, edges, 0), atol=1e-6)
    specs = (ColumnSpec((HEIGHT, WIDTH, 3), "uint8"), ColumnSpec((2, 4), "float32"))
    image, same = op.outputs(specs)
    assert (image.shape, image.dtype) == (host.shape[1:], host.dtype.name)
    assert same == specs[1]
