"""Vendor names of kernels by the pattern list."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest
from pydantic import ValidationError

from pipeline.backends.ascend.chip.tasks import CostClass
from pipeline.backends.ascend.compiler.primitives import (
    Features,
    KernelPattern,
    load_patterns,
    match_pattern,
)
from tests.backends.ascend.steps import ROWS, WIDTH, gradient_step, of, types

PLAIN = Features(
    form="elementwise", phase="forward", primitives=("add",), calls=frozenset(),
    after=frozenset(), channels=False, maps=True, updates=False, results=1, random_mask=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("Add", "elementwise")),
        ({"primitives": ("convert_element_type",)}, ("Cast", "cast")),
        ({"primitives": ("broadcast_in_dim",)}, ("Tile", "fill")),
        ({"phase": "optimizer", "updates": True}, ("ApplyGradientDescent", "optimizer")),
        (
            {"phase": "optimizer", "updates": True, "results": 3, "primitives": ("sqrt", "div")},
            ("ApplyAdam", "optimizer"),
        ),
        ({"form": "reduce", "channels": True, "results": 2}, ("BNTrainingReduce", "bn_reduce")),
        ({"after": frozenset({"bn_reduce"})}, ("BNTrainingUpdate", "bn_update")),
        ({"form": "rows", "primitives": ("exp", "reduce_sum")}, ("SoftmaxV2", "rows")),
        (
            {"form": "reduce", "phase": "backward", "channels": True},
            ("BiasAddGrad", "bias_grad"),
        ),
        (
            {"form": "reduce", "phase": "backward", "channels": True, "maps": False},
            ("BiasAddGrad", "reduce"),
        ),
        (
            {"form": "reduce", "phase": "backward", "channels": True, "results": 2},
            ("BNTrainingUpdateGrad", "bn_reduce"),
        ),
        ({"primitives": ("mul", "erfc", "neg")}, ("Gelu", "elementwise")),
        (
            {"phase": "backward", "primitives": ("add_any", "mul", "erfc", "exp")},
            ("GeluGrad", "elementwise"),
        ),
        ({"random_mask": True}, ("DropOutDoMask", "elementwise")),
        (
            {"primitives": ("mul", "add", "tanh", "exp", "log")},
            ("FusionOp_Mul_Add_Tanh_Exp", "elementwise"),
        ),
    ],
)  # fmt: skip
def test_kernel_is_named_by_the_first_matching_pattern(changes: Any, expected: Any) -> None:
    assert match_pattern(replace(PLAIN, **changes), load_patterns()) == expected


def test_bias_gradient_of_tokens_is_a_reduction() -> None:
    """BiasAddGrad walks feature maps by image and channel; tokens are rows of a matrix."""

    def forward(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["w"] + p["b"])

    graph = gradient_step(
        forward, {"w": of(WIDTH, WIDTH), "b": of(WIDTH)}, of(4, ROWS, WIDTH)
    ).tasks("O2")
    sums = [task for task in graph.tasks if task.type == "BiasAddGrad"]
    assert [task.cost_class for task in sums] == ["reduce"]


def test_activations_are_recognised_by_name() -> None:
    def forward(p: Any, x: Any) -> Any:
        return jax.nn.silu(x @ p)

    graph = gradient_step(forward, of(WIDTH, WIDTH), of(ROWS, WIDTH)).tasks("O2")
    assert any("Swish" in name for name in types(graph))


def test_patterns_name_existing_classes() -> None:
    assert {pattern.cost_class for pattern in load_patterns().kernels} <= set(get_args(CostClass))


def test_pattern_of_an_unknown_class_is_refused() -> None:
    with pytest.raises(ValidationError, match="class"):
        KernelPattern.model_validate({"type": "Add", "class": "sums"})
