"""MindSpore's keep_batchnorm_fp32: float32 maps for batch normalisation, float16 for the rest."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import pytest

from pipeline.backends.ascend import price
from pipeline.backends.ascend.chip.options import OptionError
from tests.backends.ascend.compiler.test_fusion import convolutional
from tests.backends.ascend.steps import gradient_step, macs, nbytes, of


def test_normalisation_is_float32_and_products_are_float16() -> None:
    traced = convolutional()
    kept = traced.tasks("O2", keep_batchnorm_fp32=True)
    plain = traced.tasks("O2")
    assert nbytes(kept) > nbytes(plain)
    assert macs(kept) == macs(plain)
    for task in kept.tasks:
        maps = [i for i in task.reads if len(kept.buffers[i].shape) == 4]
        if task.type in ("BNTrainingReduce", "BNTrainingUpdateGrad"):
            assert {kept.buffers[i].dtype for i in maps} == {"float32"}
        if task.cost_class == "conv":
            assert {kept.buffers[i].dtype for i in maps} == {"float16"}
    written = {index for task in kept.tasks for index in task.writes}
    added = range(len(convolutional().tasks("O0").buffers), len(kept.buffers))
    assert written.issuperset(added)


def test_norm_gradients_are_cast_at_input_and_output() -> None:
    graph = convolutional().tasks("O2", keep_batchnorm_fp32=True)
    backward = Counter(task.type for task in graph.tasks if task.phase == "backward")
    assert backward["Cast"] == 4
    assert backward["FusedDbnDw"] == 0


def test_layer_norm_is_computed_in_float32() -> None:
    def forward(weights: Any, x: Any) -> Any:
        hidden = x @ weights
        centred = hidden - hidden.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return (centred * scale) @ weights

    traced = gradient_step(forward, of(256, 256), of(512, 256))
    graph = traced.tasks("O2", keep_batchnorm_fp32=True)
    norms = [task for task in graph.tasks if task.type.startswith("LayerNorm")]
    assert {task.phase for task in norms} == {"forward", "backward"}
    for task in norms:
        maps = [graph.buffers[i] for i in (*task.reads, *task.writes)]
        assert {buffer.dtype for buffer in maps if buffer.shape == (512, 256)} == {"float32"}
    assert len(graph.tasks) > len(traced.tasks("O2").tasks)


def test_keep_batchnorm_fp32_must_be_boolean() -> None:
    with pytest.raises(OptionError, match="keep_batchnorm_fp32 = 'yes': must be True or False"):
        price(len, {}, {}, keep_batchnorm_fp32="yes")  # type: ignore[arg-type]
