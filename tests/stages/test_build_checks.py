"""Impossible layers, parameters and types are refused when the network is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import run
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError

REFUSED = {
    "freezes nothing": (
        ["train.freeze=[convolution]"],
        "train.freeze: pattern 'convolution' matches none of the 8 parameters in conv_0, "
        "conv_1, dense_0 (2), dense_1 (2), dense_2 (2), such as conv_0/kernel",
    ),
    "freezes all": (
        ["train.freeze=['*']"],
        "train.freeze: * freezes all 8 parameters; nothing is left to train",
    ),
    "rate of nothing": (
        ["train.lr_rules=[{pattern: head, factor: 2.0}]"],
        "train.lr_rules: pattern 'head' matches none of the 8 parameters",
    ),
    "initialiser of nothing": (
        ["model.init={rules: [{pattern: head, init: zeros}]}"],
        "model lenet5: init.rules: pattern 'head' matches none of the 8 parameters",
    ),
    "microbatches of different sizes": (
        ["train.accumulate_steps=3"],
        "train.accumulate_steps = 3: must divide train.batch_size = 16",
    ),
    "two settings of types": (
        ["train.precision=O2", "train.to_float=[{pattern: conv_0, dtype: float16}]"],
        "train.to_float: conflicts with train.precision = O2, which is O2 on cpu",
    ),
    "a pattern that matches nothing": (
        ["train.to_float=[{pattern: convolution_7, dtype: float16}]"],
        "train.to_float: pattern 'convolution_7' matches none of the 12 layers in conv_0, ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_recipes_are_refused_before_compiling(
    overrides: list[str], message: str, tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        run(tiny(*overrides), tmp_path)
    assert message in str(caught.value)
