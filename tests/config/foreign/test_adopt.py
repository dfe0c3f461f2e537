"""Recipes from settings: all of them have a row, and a recipe is valid before it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.foreign.adopt import adopt, make_recipe_text, read_setting
from pipeline.config.foreign.mindcv import RULES
from pipeline.core.errors import RecipeError
from tests.config.foreign.files import SMALL

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
)


@pytest.mark.medium
@given(st.dictionaries(st.sampled_from([*SMALL, "unknown", "x\ny", "mixup", "ema"]), VALUES))
@settings(max_examples=100, deadline=None)
def test_accepted_file_has_one_row_per_setting(changes: dict[str, Any]) -> None:
    values = {**SMALL, **changes}
    try:
        adoption = adopt("mindcv", "a file", values, RULES)
    except RecipeError:
        return
    names = [row.setting for row in adoption.rows]
    assert len(names) == len(set(names))
    assert set(values) <= set(names)
    assert all(row.keys or row.note for row in adoption.rows)


@pytest.mark.medium
def test_setting_cannot_inject_recipe_lines() -> None:
    hostile = "a\ntrain: {steps: 9}\n# @package hydra"
    adoption = adopt(
        "mindcv", hostile, {**SMALL, hostile: hostile, "warmup_factor": hostile}, RULES
    )
    text = make_recipe_text(adoption, Path("mine\nseed: 3.yaml"))
    tree = yaml.safe_load(text)
    assert tree["train"]["epochs"] == 2
    assert "steps" not in tree["train"]
    assert "seed" not in tree


@pytest.mark.parametrize("root", ["${oc.env:HOME}", "???", "${hydra:job.name}"])
def test_setting_cannot_read_the_environment(root: str) -> None:
    adoption = adopt("mindcv", "a file", {**SMALL, "data_dir": root}, RULES)
    with pytest.raises(RecipeError, match=r"dataset\.root") as caught:
        make_recipe_text(adoption, Path("mine.yaml"))
    assert "adopted.yaml" not in str(caught.value)


def test_file_without_a_length_trains_one_epoch() -> None:
    values = {key: value for key, value in SMALL.items() if key != "epoch_size"}
    adoption = adopt("mindcv", "a file", values, RULES)
    row = adoption.rows[-1]
    assert (row.setting, row.keys) == ("length of training", {"train.epochs": 1})


def test_error_lists_all_problems() -> None:
    values = {**SMALL, "model": "cait_s24", "opt": "adan", "dataset": "voc"}
    with pytest.raises(RecipeError) as caught:
        adopt("mindcv", "a file", values, RULES)
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == [
        "model",
        "opt",
        "dataset",
    ]


@pytest.mark.parametrize("value", [True, "3", [3], float("inf")])
def test_non_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(RecipeError, match=r"lr = .*: must be (a number|finite)"):
        read_setting({"lr": value}, "lr", 0.1)


def test_integer_beyond_floats_is_read() -> None:
    assert read_setting({"epochs": 10**400}, "epochs", 1) == 10**400


def test_integer_beyond_floats_is_no_length_of_training() -> None:
    with pytest.raises(RecipeError, match="must have at most 100"):
        make_recipe_text(adopt("mindcv", "a file", {**SMALL, "epoch_size": 10**400}, RULES), Path())
