"""Changes of colours, against exact arithmetic."""

import numpy as np
import pytest

from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.color import RandomColorAdjust
from pipeline.data.ops.policies import RandAugment
from tests.data.ops.op_calls import BYTES, on_host, uniforms_for


def test_unit_color_factors_leave_pixels_unchanged():
    op = RandomColorAdjust(brightness=(1.0, 1.0), contrast=(1.0, 1.0), saturation=(1.0, 1.0))
    np.testing.assert_array_equal(on_host(op, BYTES), BYTES)


def test_image_whose_mean_overflows_is_refused():
    spec = ColumnSpec((3000, 3000, 3), "uint8")
    for op in (RandomColorAdjust(contrast=(0, 2)), RandAugment()):
        with pytest.raises(ValueError, match="can't average over images as large as 3000x3000"):
            op.output(spec)
    assert RandomColorAdjust(brightness=(0, 2), hue=(-0.1, 0.1)).output(spec) == spec


def test_drawn_factors_match_an_exact_blend():
    op = RandomColorAdjust(saturation=(0.5, 1.5))
    uniforms = uniforms_for(op)
    lumas = BYTES @ np.array([0.299, 0.587, 0.114])
    factors = 0.5 + uniforms[:, 2]
    expected = lumas[..., None] + (BYTES - lumas[..., None]) * factors[:, None, None, None]
    assert abs(on_host(op, BYTES, uniforms) - expected.clip(0, 255)).max() < 1.1
