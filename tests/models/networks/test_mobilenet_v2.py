from __future__ import annotations

import pytest

from tests.models.build import conf_model, positions


def test_blocks_that_keep_the_shape_are_residual() -> None:
    blocks = [layer for layer in conf_model("mobilenet_v2").layers_for(10) if layer.scope]
    residual = [layer.scope for layer in blocks if layer.name == "residual"]
    assert len(blocks) == 17
    assert residual == [
        *("stage1_block1",),
        *(f"stage2_block{index}" for index in (1, 2)),
        *(f"stage3_block{index}" for index in (1, 2, 3)),
        *(f"stage4_block{index}" for index in (1, 2)),
        *(f"stage5_block{index}" for index in (1, 2)),
    ]


@pytest.mark.slow
def test_narrow_ones_keep_the_last_convolution() -> None:
    seen = positions(conf_model("mobilenet_v2", width=0.75).build(10, "float32"), (224, 224, 3))
    assert seen["conv_0"] == (112, 112, 24)
    assert seen["stage6_block0"] == (7, 7, 240)
    assert seen["conv_1"] == (7, 7, 1280)
    wide = positions(conf_model("mobilenet_v2", width=1.4).build(10, "float32"), (64, 64, 3))
    assert wide["conv_1"] == (2, 2, 1792)
