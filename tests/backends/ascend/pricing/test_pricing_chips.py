"""Prices of a step on chips with joined and with split cores, by figures alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline import load_recipe
from pipeline.backends.ascend import chipset, price
from pipeline.backends.ascend.chip.chip_files import DEVICES
from pipeline.backends.ascend.chip.options import OptionError
from pipeline.core.errors import RecipeError
from tests.backends.ascend.dense_step import ALIGNED, BATCH, WEIGHTS, step
from tests.backends.ascend.steps import of

A2 = chipset("atlas_a2")
JOINED = replace(A2, core="joined")


def test_formulas_are_independent_of_the_chip_name() -> None:
    names = {yaml.safe_load(file.read_text()).get("chip") for file in DEVICES.glob("a*.yaml")}
    renamed = replace(A2, name="Another chip")
    assert None not in names
    assert price(step, WEIGHTS, BATCH, hardware=renamed).step_ms == (
        price(step, WEIGHTS, BATCH, hardware=A2).step_ms
    )
    room = Path(DEVICES).parents[1] / "pipeline" / "backends" / "ascend"
    for folder in ("compiler", "cost", "memory", "simulate", "tune"):
        for file in (room / folder).glob("*.py"):
            code = re.sub(r'"""(.|\n)*?"""|#.*', "", file.read_text())
            assert not re.search(r"910|atlas", code, re.IGNORECASE), file.name


@pytest.mark.parametrize("software", ["mindspore_graph", "pytorch_eager"])
def test_split_core_needs_no_matrix_conversions(software: str) -> None:
    split, joined = (
        price(step, WEIGHTS, BATCH, hardware=chip, software=software) for chip in (A2, JOINED)
    )
    assert not [cost for cost in split.tasks if cost.task.type == "TransData"]
    assert [cost for cost in joined.tasks if cost.task.type == "TransData"]
    assert {buffer.layout for buffer in split.graph.buffers} == {"ND"}
    assert split.device_ms < joined.device_ms


def _bias_and_relu(weights: Any, batch: Any) -> Any:
    def loss(weights: Any) -> Any:
        hidden = jax.nn.relu(batch @ weights["up"] + weights["bias"])
        return jnp.mean((hidden * batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), value


def test_split_core_fuses_only_bias_into_a_product() -> None:
    weights = {**WEIGHTS, "bias": of(512)}
    split, joined = (
        price(_bias_and_relu, weights, ALIGNED, hardware=chip).graph for chip in (A2, JOINED)
    )
    fused = [task.type for task in split.tasks if "fixpipe" in task.fused]
    assert fused == ["FusionOp_MatMul_Add"]
    assert len(split.tasks) <= len(joined.tasks) + 4


@pytest.mark.parametrize("precision", ["O0", None])
def test_cube_with_float32_needs_no_casts(precision: Any) -> None:
    float32 = price(step, WEIGHTS, ALIGNED, hardware=A2, precision=precision)
    float16 = price(step, WEIGHTS, ALIGNED, hardware=A2, precision="O2")
    products = [
        [task for task in report.graph.tasks if task.cube is not None]
        for report in (float32, float16)
    ]
    assert {task.cube.dtype for task in products[0] if task.cube} == {"float32"}
    assert not [cost for cost in float32.tasks if cost.task.type == "Cast"]
    us = [
        sum(t.us for t in report.tasks if t.task.engine == "cube") for report in (float32, float16)
    ]
    assert 1.5 < us[0] / us[1] < 6
    roof_us = sum(cost.roofline_us for cost in float32.tasks if cost.task.engine == "cube")
    macs = sum(task.cube.macs for task in products[0] if task.cube)
    assert roof_us >= 4 * macs / A2.hardware.peak_fp16_macs_per_us


@pytest.mark.medium
def test_bfloat16_is_supported_only_by_atlas_a2() -> None:
    weights = {"up": of(512, 512, dtype=jnp.bfloat16)}
    batch = of(64, 48, 512, dtype=jnp.bfloat16)
    report = price(step, weights, batch, hardware=A2, precision=None)
    assert "bfloat16" in {buffer.dtype for buffer in report.graph.buffers}
    mixed = price(step, weights, of(64, 48, 512), hardware=A2)
    assert "float16" not in {buffer.dtype for buffer in mixed.graph.buffers}
    half = {"up": of(512, 512, dtype=jnp.float16)}
    again = price(step, half, of(64, 48, 512, dtype=jnp.float16), hardware=A2, precision=None)
    assert report.step_ms >= again.step_ms
    with pytest.raises(OptionError, match="bfloat16 is not a type of Ascend 910A"):
        price(step, weights, batch, hardware="ascend910", precision=None)
    bf16 = ["train.precision=bf16"]
    assert load_recipe("lenet5_digits", ["device=atlas_a2", *bf16]).train.precision == "bf16"
    with pytest.raises(RecipeError, match="not bfloat16"):
        load_recipe("lenet5_digits", ["device=ascend910", *bf16])


FASTER = ["ai_core_clock_mhz", "hbm_sustained_gb_per_s", "vector_cores_count", "ai_cores_count"]


@given(st.sampled_from(FASTER), st.integers(2, 4))
def test_chip_with_a_larger_figure_is_never_slower(figure: str, factor: int) -> None:
    hardware = replace(A2.hardware, **{figure: factor * getattr(A2.hardware, figure)})
    faster = price(step, WEIGHTS, BATCH, hardware=replace(A2, hardware=hardware))
    assert faster.device_ms <= price(step, WEIGHTS, BATCH, hardware=A2).device_ms * (1 + 1e-9)
    assert all(task.us >= task.roofline_us for task in faster.tasks)
