from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from tests.models.build import QUICK, conf_model, count, draw_variables, positions, shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"features": 384, "hidden": 1536, "heads": 6}, 22_050_664),
        ({"features": 1024, "hidden": 4096, "heads": 16, "blocks": 24}, 304_326_632),
    ],
)
def test_vit_small_and_large_have_reference_parameter_counts(
    changes: dict[str, Any], expected: int
) -> None:
    module = conf_model("vit_b_16", **changes).build(1000, "float32")
    assert count(shapes(module, (224, 224, 3))) == expected


@pytest.mark.slow
def test_bert_large_parameter_count_matches_without_segments() -> None:
    changes = {"features": 1024, "hidden": 4096, "heads": 16, "blocks": 24}
    module = conf_model("bert_base", **changes).build(2, "float32")
    assert count(shapes(module, (512, 1, 1))) == 335_141_888 - 2 * 1024 + 2 * 1025


@pytest.mark.slow
def test_vit_patches_are_tokens_after_the_class_token() -> None:
    seen = positions(conf_model("vit_tiny").build(10, "float32"), (224, 224, 3))
    assert seen["conv_0"] == (14, 14, 192)
    assert seen["class_token_0"] == seen["block11"] == (197, 192)


@pytest.mark.slow
def test_gpt2_medium_parameter_count_matches_transformers() -> None:
    changes = {"features": 1024, "hidden": 4096, "heads": 16, "blocks": 24}
    module = conf_model("gpt2", **changes).build(50257, "float32")
    assert count(shapes(module, (1024, 1, 1))) == 354_823_168


@pytest.mark.slow
def test_gpt_scores_do_not_depend_on_later_tokens() -> None:
    changes = {"features": 8, "hidden": 16, "heads": 2, "blocks": 2}
    module = conf_model("gpt2", **changes).build(50, "float32")
    numbers = np.arange(6, dtype=np.float32).reshape(1, 6, 1, 1)
    variables = draw_variables(shapes(module, numbers.shape[1:]))
    changed = numbers.copy()
    changed[0, 3] = 40
    compute = jax.jit(lambda x: module.apply(variables, x, train=False), compiler_options=QUICK)
    before, after = compute(numbers), compute(changed)
    assert before.shape == (1, 6, 50)
    differs = np.abs(after - before).max((0, 2)) > 0
    assert differs.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("name", ["vit_tiny", "bert_base", "gpt2"])
def test_features_must_be_a_multiple_of_heads(name: str) -> None:
    with pytest.raises(ValidationError, match="features 100 is not a multiple of heads 3"):
        conf_model(name, features=100, heads=3)
