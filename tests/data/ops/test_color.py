"""Changes of colours, against exact arithmetic."""

import numpy as np

from pipeline.data.ops.color import RandomColorAdjust
from tests.data.ops.op_calls import BYTES, on_host, uniforms_for


def test_unit_color_factors_leave_pixels_unchanged():
    op = RandomColorAdjust(brightness=(1.0, 1.0), contrast=(1.0, 1.0), saturation=(1.0, 1.0))
    np.testing.assert_array_equal(on_host(op, BYTES), BYTES)


def test_drawn_factors_match_an_exact_blend():
    op = RandomColorAdjust(saturation=(0.5, 1.5))
    uniforms = uniforms_for(op)
    lumas = BYTES @ np.array([0.299, 0.587, 0.114])
    factors = 0.5 + uniforms[:, 2]
    expected = lumas[..., None] + (BYTES - lumas[..., None]) * factors[:, None, None, None]
    assert abs(on_host(op, BYTES, uniforms) - expected.clip(0, 255)).max() < 1.1
