"""P-02: what an overflow does to the scale, against MindSpore's own cell and its code in words."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from pipeline.config.recipe import Recipe
from pipeline.training.features.loss_scales import Auto, Dynamic, Fixed, LossScale, LossScaling

GOLDEN = Path(__file__).parents[2] / "golden" / "precision" / "loss_scale.json"
CASES = json.loads(GOLDEN.read_text())["cases"]
PARSER: TypeAdapter[LossScaling] = TypeAdapter(LossScale)


def scales(spec: LossScaling, overflows: list[bool]) -> list[float]:
    """The scale after each step."""
    next_ = jax.jit(spec.next)
    scale, good_steps, reported = np.float32(spec.initial), np.int32(0), []
    for overflow in overflows:
        scale, good_steps = next_(scale, good_steps, overflow)
        reported.append(float(scale))
    return reported


def as_mindspore(spec: Dynamic, overflows: list[bool]) -> list[float]:
    """`DynamicLossScaleUpdateCell.construct`, line by line in float32."""
    scale, iteration, last, reported = np.float32(spec.init), 1, 0, []
    factor = np.float32(spec.factor)
    for overflow in overflows:
        should_increase = spec.window <= iteration - last
        if overflow:
            scale = max(scale * (np.float32(1) / factor), np.float32(1))
        elif should_increase:
            scale = scale * factor
        if overflow or should_increase:
            last = iteration
        iteration += 1
        reported.append(float(scale))
    return reported


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['init']:g}-{case['window']}")
def test_dynamic_scale_parity_with_mindspore(case: dict) -> None:
    spec = Dynamic(init=case["init"], factor=case["factor"], window=case["window"])
    assert scales(spec, case["overflows"]) == case["scales"]
    assert len(set(case["scales"])) > 3


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.booleans(), max_size=40),
    st.sampled_from([1.0, 1.5, 64.0, 2.0**24]),
    st.sampled_from([2.0, 3.0, 1.25]),
    st.integers(1, 6),
)
def test_dynamic_scale_matches_mindspore_code(
    overflows: list[bool], init: float, factor: float, window: int
) -> None:
    spec = Dynamic(init=init, factor=factor, window=window)
    assert scales(spec, overflows) == as_mindspore(spec, overflows)


def test_fixed_scale_is_constant() -> None:
    assert scales(Fixed(scale=128.0), [True, False, True]) == [128.0] * 3


def test_defaults_equal_mindspore_defaults() -> None:
    assert (Dynamic().init, Dynamic().factor, Dynamic().window) == (16777216, 2, 2000)
    assert (Fixed().scale, Fixed().drop_overflow_update) == (128, True)


def test_auto_scale_follows_the_precision_level() -> None:
    """`_config_level` of mindspore/train/amp.py."""
    assert Auto().resolve("O2") == Dynamic()
    none = Fixed(scale=1.0, drop_overflow_update=False)
    assert [Auto().resolve(level) for level in ("O0", "O1", "O3", "bf16")] == [none] * 4
    assert Dynamic(init=4.0).resolve("O2") == Dynamic(init=4.0)


def test_number_is_a_fixed_scale_without_dropped_updates() -> None:
    assert PARSER.validate_python(512) == Fixed(scale=512.0, drop_overflow_update=False)
    assert PARSER.validate_python("dynamic") == Dynamic()
    assert PARSER.validate_python({"name": "fixed"}) == Fixed()


def test_scale_does_not_grow_to_infinity() -> None:
    """A scale of 1e38 grows no more, and falls at the next overflow."""
    spec = Dynamic(init=1.0, factor=1e38, window=1)
    assert scales(spec, [False, False, False, True]) == [np.float32(1e38)] * 3 + [1.0]


@pytest.mark.parametrize("scale", [1e-50, 1e-38])
def test_scale_that_is_0_in_float32_is_refused(scale: float) -> None:
    for typed in (scale, {"name": "fixed", "scale": scale}):
        with pytest.raises(ValidationError, match=r"from 1\.1754943|equal to 0\.0+11754"):
            PARSER.validate_python(typed)
    assert PARSER.validate_python(2.0**-126).initial == 2.0**-126
    keys = Recipe.model_json_schema()["$defs"]["TrainSpec"]["properties"]
    assert keys["loss_scale"]["anyOf"][0]["minimum"] == 2.0**-126


BAD = [0, -1.0, float("inf"), float("nan"), True, {"name": "dynamic", "factor": 1}]


@pytest.mark.parametrize("bad", BAD)
def test_invalid_scales_are_refused(bad: object) -> None:
    with pytest.raises(ValidationError):
        PARSER.validate_python(bad)
