from __future__ import annotations

import re

import pytest

from pipeline.models.blocks.layered_model import plan_blocks
from tests.models.build import conf_model


def test_planned_blocks_have_the_input_channels_of_the_previous() -> None:
    blocks = list(plan_blocks((1, 2), (8, 16), 4, expansion=4))
    assert [block.scope for block in blocks] == ["stage1_block0", "stage2_block0", "stage2_block1"]
    assert [(block.channels, block.width) for block in blocks] == [(4, 8), (32, 16), (64, 16)]


@pytest.mark.parametrize(("halve_first", "strides"), [(True, [2, 1, 2]), (False, [1, 1, 2])])
def test_first_block_of_a_stage_has_stride_2(halve_first: bool, strides: list[int]) -> None:
    blocks = plan_blocks((2, 1), (8, 8), 8, halve_first=halve_first)
    assert [block.stride for block in blocks] == strides


@pytest.mark.parametrize(
    "lists", [{"blocks": [1], "widths": [8, 16]}, {"blocks": [], "widths": []}]
)
def test_lists_must_have_one_entry_per_stage(lists: dict[str, list[int]]) -> None:
    text = f"blocks {lists['blocks']} and widths {lists['widths']} must have one entry per stage"
    with pytest.raises(ValueError, match=re.escape(text)):
        conf_model("repvgg_a0", **lists)
