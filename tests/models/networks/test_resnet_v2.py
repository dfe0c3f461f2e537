from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, count, positions, shapes


@pytest.mark.slow
def test_wide_resnet28_10_has_the_parameters_that_are_published() -> None:
    module = conf_model("wide_resnet40_10", blocks=[4, 4, 4]).build(10, "float32")
    assert count(shapes(module, (32, 32, 3))) == 36_479_194


def test_wide_resnet40_10_has_six_blocks_in_each_stage() -> None:
    stem, head = 27 * 16, 2 * 640 + 641 * 10
    first = sum(
        9 * (before * width + width * width) + before * width + 2 * (before + width)
        for before, width in ((16, 160), (160, 320), (320, 640))
    )
    others = 5 * sum(18 * width * width + 4 * width for width in (160, 320, 640))
    module = conf_model("wide_resnet40_10").build(10, "float32")
    assert count(shapes(module, (32, 32, 3))) == stem + first + others + head == 55_841_754


@pytest.mark.slow
def test_resnetv2_101_has_as_many_as_keras_but_for_the_biases_of_its_convolutions() -> None:
    module = conf_model("resnetv2_50", blocks=[3, 4, 23, 3]).build(1000, "float32")
    biases = 64 + 4 * (64 + 128 + 256 + 512) + 4 * (3 * 64 + 4 * 128 + 23 * 256 + 3 * 512)
    assert count(shapes(module, (224, 224, 3))) == 44_577_896 - biases


def test_a_block_that_changes_the_shape_has_its_shortcut_behind_norm_and_relu() -> None:
    layers = conf_model("resnetv2_50").layers_for(10)
    blocks = {layer.scope: layer for layer in layers if layer.scope}
    norm, relu, residual = blocks["stage2_block0"].body
    assert (norm.name, relu.name, residual.name) == ("batch_norm", "relu", "residual")
    assert [layer.name for layer in residual.shortcut] == ["conv"]
    same = blocks["stage2_block1"]
    assert (same.name, same.shortcut) == ("residual", ())
    assert [layer.name for layer in same.body][:3] == ["batch_norm", "relu", "conv"]


def test_stages_but_the_first_halve_the_image() -> None:
    seen = positions(conf_model("resnetv2_50").build(10, "float32"), (224, 224, 3))
    assert seen["stage1_block2"] == (56, 56, 256)
    assert seen["stage4_block2"] == (7, 7, 2048)


@pytest.mark.parametrize(("blocks", "widths"), [([2, 2], [16]), ([], [])])
def test_stages_need_blocks_and_widths(blocks: list[int], widths: list[int]) -> None:
    with pytest.raises(ValidationError, match="must have one entry per stage each"):
        conf_model("resnetv2_50", blocks=blocks, widths=widths)
