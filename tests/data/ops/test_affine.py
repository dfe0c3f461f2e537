"""Random affine maps against matrices composed by hand, and against Pillow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from scipy import stats

from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.affine import MAPS, RandomAffine, RandomRotation, make_rotation
from tests.data.ops.op_calls import BYTES, GREY, on_host, spec_of

HEIGHT, WIDTH = 11, 14
PIXELS = np.random.default_rng(2).integers(1, 256, (6, HEIGHT, WIDTH, 3), np.uint8)
UNIFORMS = np.random.default_rng(3).random((6, 1), np.float32)


def by_hand(angle: float, right: float, down: float, scale: float, along: float, across: float):
    """Source to target in homogeneous coordinates, one elementary matrix after the other."""
    x, y = (WIDTH - 1) / 2, (HEIGHT - 1) / 2
    a = math.radians(angle)
    to_middle = np.array([[1, 0, -x], [0, 1, -y], [0, 0, 1]])
    shear = np.array(
        [[1, math.tan(math.radians(along)), 0], [math.tan(math.radians(across)), 1, 0], [0, 0, 1]]
    )
    grow = np.diag([scale, scale, 1])
    turn = np.array([[math.cos(a), math.sin(a), 0], [-math.sin(a), math.cos(a), 0], [0, 0, 1]])
    back = np.array([[1, 0, x + right * WIDTH], [0, 1, y + down * HEIGHT], [0, 0, 1]])
    return np.linalg.inv(back @ turn @ grow @ shear @ to_middle)[:2]


@pytest.mark.parametrize(
    "values",
    [
        (0, 0, 0, 1, 0, 0),
        (30, 0, 0, 1, 0, 0),
        (-75, 0.25, -0.5, 1.5, 0, 0),
        (20, 0.1, 0.2, 0.7, 35, -10),
    ],
)
def test_fixed_affine_map_is_the_product_of_its_parts(values: tuple[float, ...]) -> None:
    angle, right, down, scale, along, across = map(float, values)
    op = RandomAffine(
        degrees=(angle, angle),
        translate_x=(right, right),
        translate_y=(down, down),
        scale=(scale, scale),
        shear_x=(along, along),
        shear_y=(across, across),
    )
    maps = op.make_matrices(HEIGHT, WIDTH)
    assert maps.shape == (MAPS, 2, 3)
    np.testing.assert_allclose(maps, np.broadcast_to(by_hand(*values), maps.shape), atol=1e-9)


def test_affine_rotation_matches_random_rotation() -> None:
    op = RandomAffine(degrees=(25.0, 25.0))
    centre = (WIDTH - 1) / 2, (HEIGHT - 1) / 2
    expected = make_rotation(np.array([25.0]), centre)[0]
    np.testing.assert_allclose(op.make_matrices(HEIGHT, WIDTH)[0], expected, atol=1e-9)


def test_affine_pixels_match_pillow() -> None:
    """Pillow reads the place of a pixel's middle, half a pixel further in its coordinates."""
    op = RandomAffine(
        degrees=50.0, scale=(0.6, 1.4), shear_x=(-25.0, 25.0), translate_x=(-0.3, 0.3), fill=7
    )
    result = op(np, PIXELS, UNIFORMS)
    maps = op.make_matrices(HEIGHT, WIDTH)[np.floor(UNIFORMS[:, 0] * MAPS).astype(int)]
    same = 0
    for picture, (along, across), found in zip(PIXELS, maps, result, strict=True):
        a, b, c = along
        d, e, f = across
        moved = (a, b, c - (a + b) / 2 + 0.5, d, e, f - (d + e) / 2 + 0.5)
        expected = Image.fromarray(picture).transform(
            (WIDTH, HEIGHT), Image.Transform.AFFINE, moved, fillcolor=(7, 7, 7)
        )
        same += int((np.asarray(expected) == found).all(axis=-1).sum())
    # A place that is half way between two pixels may be read from either.
    assert same > 0.97 * len(PIXELS) * HEIGHT * WIDTH


def test_drawn_parameters_fill_their_ranges() -> None:
    op = RandomAffine(translate_x=(-0.5, 0.5), scale=(1.0, 1.0))
    shifts = -op.make_matrices(HEIGHT, WIDTH)[:, 0, 2] / WIDTH
    expected = -0.5 + (np.arange(MAPS) + 0.5) / MAPS
    np.testing.assert_allclose(np.sort(shifts), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": (0.0, 1.0)}, "scale = .*: must be 0.01 or more"),
        ({"shear_x": (0.0, 90.0)}, "shear_x = .*: must be within -90 and 90 degrees"),
        ({"shear_x": (0.0, 60.0), "shear_y": (-60.0, 0.0)}, "would be turned inside out"),
        ({"degrees": -1.0}, r"must be \[least, most\] in degrees, or one number from 0 up"),
        ({"translate_x": (1.0, 0.0)}, r"must be \[least, most\]"),
    ],
)
def test_invalid_affine_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RandomAffine(**fields)


@pytest.mark.parametrize(
    "op",
    [
        RandomAffine(translate_x=(1e9, 1e9), fill=7),
        RandomAffine(translate_y=(-1e30, -1e30), fill=7),
        RandomRotation(degrees=(30, 30), center=(1e9, 1e9), fill=7),
    ],
)
def test_image_moved_far_away_leaves_its_fill(op: RandomAffine | RandomRotation) -> None:
    assert op.output(spec_of(BYTES)) == spec_of(BYTES)
    assert (on_host(op, BYTES) == 7).all()


@pytest.mark.parametrize("fields", [{"shear_x": (89.9999, 89.9999)}, {"scale": (0.01, 0.01)}])
def test_source_beyond_fixed_point_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="shrinks or shears images of 6000x2 to parts"):
        RandomAffine(**fields).output(ColumnSpec((6000, 2, 3), "uint8"))


def test_floats_are_refused() -> None:
    with pytest.raises(ValueError, match="needs uint8 images, not float32; list it before rescale"):
        RandomAffine().output(ColumnSpec((4, 4, 3), "float32"))


def test_rotation_fill_must_match_channels():
    with pytest.raises(ValueError, match="fill has 3 values for images of 1 channels"):
        RandomRotation(degrees=5.0, fill=(1, 2, 3)).output(GREY)


def test_rotation_by_a_quarter_is_counter_clockwise():
    square = BYTES[:2, :7, :7]
    result = on_host(RandomRotation(degrees=(90.0, 90.0)), square)
    np.testing.assert_array_equal(result, np.rot90(square, axes=(1, 2)))


@pytest.mark.slow
def test_rotation_draws_evenly_from_its_range():
    marked = np.zeros((1, 41, 41, 1), np.uint8)
    marked[0, 20, 40] = 255  # Right of the centre, 20 pixels away.
    op = RandomRotation(degrees=(10.0, 50.0), interpolation="linear")
    rotated = on_host(op, marked.repeat(4000, axis=0))[..., 0].astype(float)
    row, column = ((rotated * place).sum(axis=(1, 2)) for place in np.mgrid[:41, :41] - 20)
    angles = np.degrees(np.arctan2(-row, column))
    assert stats.kstest(angles, stats.uniform(10, 40).cdf).pvalue > 1e-3
