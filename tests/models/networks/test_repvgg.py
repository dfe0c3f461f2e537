from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.models.build import conf_model, count, parameters, shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"), [("repvgg_a0", 8_309_384), ("repvgg_a1", 12_789_864)]
)
def test_one_3x3_with_bias_for_each_block_is_what_the_authors_deploy(
    name: str, expected: int
) -> None:
    variables = shapes(conf_model(name).build(1000, "float32"), (224, 224, 3))
    convs = [leaf.shape for leaf in parameters(variables).values() if leaf.shape[:2] == (3, 3)]
    assert sum(9 * before * after + after for *_, before, after in convs) + 1281 * 1000 == expected


def test_blocks_that_keep_the_shape_add_their_normalised_input() -> None:
    blocks = {layer.scope: layer for layer in conf_model("repvgg_a0").layers_for(10) if layer.scope}
    assert [layer.name for layer in blocks["stage1_block0"].shortcut] == ["conv", "batch_norm"]
    kept = blocks["stage1_block1"]
    assert [layer.name for layer in kept.shortcut] == ["batch_norm"]
    (convs,) = kept.body
    assert (convs.body[0].kernel, convs.shortcut[0].kernel) == (3, 1)
    assert len(blocks) == 22


def test_all_branches_of_all_blocks_are_trained() -> None:
    small = {"stem": 4, "blocks": [2], "widths": [4]}
    block = 9 * 16 + 16 + 2 * 8
    expected = (9 * 12 + 12 + 2 * 8) + block + (block + 8) + 5 * 10
    module = conf_model("repvgg_a0", **small).build(10, "float32")
    assert count(shapes(module, (32, 32, 3))) == expected


def test_stages_need_blocks_and_widths() -> None:
    with pytest.raises(ValidationError, match="must have one entry per stage each"):
        conf_model("repvgg_a0", blocks=[1, 2])
