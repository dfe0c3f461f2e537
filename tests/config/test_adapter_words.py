"""Switches of the adapters for TensorFlow and PyTorch (S-13, P-04)."""

from __future__ import annotations

import re

import pytest

from pipeline import load_recipe
from pipeline.core.errors import RecipeError

STEPS = "train.steps=200"


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("precision_mode=must_keep_origin_dtype", "precision", "O0"),
        pytest.param(
            "precision_mode=allow_fp32_to_fp16", "precision", "O1", marks=pytest.mark.slow
        ),
        pytest.param(
            "precision_mode=allow_mix_precision", "precision", "O2", marks=pytest.mark.slow
        ),
        pytest.param("precision_mode=force_fp16", "precision", "O3", marks=pytest.mark.slow),
        pytest.param("opt_level=O1", "precision", "O1", marks=pytest.mark.slow),
        ("iterations_per_loop=100", "sink_size", 100),
        pytest.param("enable_data_pre_proc=false", "sink", False, marks=pytest.mark.slow),
        ("mix_compile_mode=true", "mode", "eager"),
    ],
)
def test_adapter_word_stands_for_a_key(word: str, key: str, value: object) -> None:
    """The recipe that a run keeps has the key alone."""
    keys = [STEPS, "train.sink_size=-1", f"train.{word}"]
    kept = load_recipe("lenet5_digits", keys).model_dump(mode="json")["train"]
    assert kept[key] == value
    assert word.partition("=")[0] not in kept


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["precision_mode=mixed"],
            "train.precision_mode = mixed: must be 'must_keep_origin_dtype'",
        ),
        (["opt_level=02"], "train.opt_level = '02': must be 'O0', 'O1', 'O2' or 'O3'"),
        (["iterations_per_loop=0"], "train.iterations_per_loop = 0: must be"),
        (
            ["iterations_per_loop=150"],
            "train.iterations_per_loop = 150: must divide the 200 steps of training; train 150 "
            "steps or 300",
        ),
        (
            ["iterations_per_loop=100", "mix_compile_mode=true"],
            "train.iterations_per_loop = 100: must be 1 with train.mode = eager (mix_compile_mode)",
        ),
        (
            ["iterations_per_loop=100", "enable_data_pre_proc=false"],
            "train.iterations_per_loop = 100: must be 1 with train.sink = false "
            "(enable_data_pre_proc)",
        ),
        (
            ["iterations_per_loop=100", "sink_size=50"],
            "iterations_per_loop = 100 conflicts with sink_size = 50; they are two words for one "
            "thing: give one of them",
        ),
        (
            ["precision_mode=force_fp16", "opt_level=O1"],
            "opt_level = O1 conflicts with precision_mode = force_fp16; they are two words for one "
            "thing: give one of them",
        ),
        (
            ["precision=O2", "opt_level=O1"],
            "opt_level = O1 conflicts with precision = O2; they are two words for one thing",
        ),
    ],
)
def test_adapter_rules_are_enforced(overrides: list[str], problem: str) -> None:
    keys = ["train.sink_size=-1", STEPS, *(f"train.{one}" for one in overrides)]
    with pytest.raises(RecipeError, match=re.escape(problem)):
        load_recipe("lenet5_digits", keys)


@pytest.mark.slow
def test_loop_size_must_divide_steps_of_all_epochs() -> None:
    """The 1,438 digits are 44 batches of 32 an epoch."""
    keys = ["train.sink_size=-1", "train.epochs=5"]
    assert load_recipe("lenet5_digits", [*keys, "train.iterations_per_loop=20"]).train.epochs == 5
    with pytest.raises(RecipeError, match="must divide the 220 steps of training"):
        load_recipe("lenet5_digits", [*keys, "train.iterations_per_loop=50"])


def test_mixed_compute_mode_accepts_one_step_per_loop() -> None:
    keys = ["train.sink_size=-1", STEPS, "train.mix_compile_mode=true"]
    assert load_recipe("lenet5_digits", [*keys, "train.iterations_per_loop=1"]).train.sink_size == 1
