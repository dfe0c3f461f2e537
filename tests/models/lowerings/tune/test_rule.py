"""The rule for shapes that no bank knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.models.lowerings.candidates import can_compute, list_candidates
from pipeline.models.lowerings.lowered_layers import FEW_FEATURES
from pipeline.models.lowerings.problem import DEFAULT, ROLES, DenseProblem, Engine, Lowering, Role
from pipeline.models.lowerings.tune.rule import LARGE_FLOPS, choose_by_rule
from tests.models.lowerings.tune.made_up import BOTH, XLA, convolution


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("stride", [1, 2])
def test_rule_chooses_only_candidates(role: Role, stride: int) -> None:
    for channels, size in ((3, 32), (16, 32), (64, 32), (64, 4)):
        problem = convolution(role, channels, size, stride=stride, batch=64)
        for engines in (XLA, BOTH):
            lowering = choose_by_rule(problem, engines)
            assert lowering == DEFAULT or lowering in list_candidates(problem, engines)


@pytest.mark.parametrize("role", ROLES)
def test_onednn_is_chosen_for_large_problems_with_many_channels(role: Role) -> None:
    large = convolution(role, channels=32, size=32, batch=16)
    small = convolution(role, channels=32, size=4, batch=1)
    narrow = convolution(role, channels=8, size=64, batch=64)
    assert small.flops < LARGE_FLOPS < min(large.flops, narrow.flops)
    assert choose_by_rule(large, BOTH).engine == "onednn"
    assert choose_by_rule(large, XLA) == DEFAULT
    assert choose_by_rule(small, BOTH) == choose_by_rule(narrow, BOTH) == DEFAULT


@pytest.mark.parametrize("role", ROLES)
def test_winograd_is_chosen_for_3x3_kernels_with_full_tiles(role: Role) -> None:
    full, half_empty = convolution(role, 64, 32, batch=32), convolution(role, 256, 4, batch=32)
    strided = convolution(role, 64, 32, stride=2, batch=32)
    assert choose_by_rule(full, BOTH).family == "winograd4"
    assert choose_by_rule(half_empty, BOTH).family == "convolution"
    assert choose_by_rule(strided, BOTH).family in ("convolution", "phases")


def test_winograd_in_bfloat16_is_chosen_only_for_kernel_gradients() -> None:
    """The gradient of the kernel, which is summed in float32 in any case, excepted."""
    families = {
        role: choose_by_rule(convolution(role, 64, 32, batch=32, dtype="bfloat16"), BOTH).family
        for role in ROLES
    }
    assert families == {
        "forward": "convolution",
        "input_grad": "convolution",
        "weight_grad": "winograd4",
    }


def test_strided_input_gradient_uses_phases() -> None:
    problem = convolution("input_grad", 64, 32, stride=2, batch=32)
    assert choose_by_rule(problem, BOTH).family == "phases"


@pytest.mark.parametrize(("stride", "family"), [(1, "winograd4"), (2, "convolution")])
def test_kernel_gradient_chunks_fit_the_cache(stride: int, family: str) -> None:
    """32x32 of 64 features are 256 KiB: four images make up half of a core's cache."""
    problem = convolution("weight_grad", 64, 32 * stride, stride=stride, batch=64)
    assert str(choose_by_rule(problem, BOTH)) == f"{family}/onednn/4"


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_1x1_kernels_are_matrix_products(stride: int) -> None:
    """oneDNN's convolution takes 5 to 40 times as long for the kernel's."""
    families = {
        role: str(choose_by_rule(convolution(role, 64, 56, 1, stride, batch=32), BOTH))
        for role in ROLES
    }
    assert families == {
        "forward": "convolution/onednn",
        "input_grad": "pixels/onednn",
        "weight_grad": "positions/onednn",
    }


@pytest.mark.parametrize("role", ["forward", "weight_grad"])
def test_onednn_is_chosen_for_the_7x7_stem(role: Role) -> None:
    wide, narrow = (
        replace(convolution(role, 3, 224, kernel, stride=2), features=64) for kernel in (7, 3)
    )
    assert choose_by_rule(wide, BOTH).engine == "onednn"
    assert choose_by_rule(narrow, BOTH) == DEFAULT


@pytest.mark.parametrize(("groups", "images"), [(32, 1), (8, 4)])
def test_onednn_is_chosen_for_grouped_convolutions(groups: int, images: int) -> None:
    lowerings = {
        role: str(choose_by_rule(convolution(role, 32, 16, batch=16, groups=groups), BOTH))
        for role in ROLES
    }
    assert lowerings == {
        "forward": "convolution/onednn",
        "input_grad": "convolution/onednn",
        "weight_grad": f"convolution/onednn/{images}",
    }


@pytest.mark.parametrize("groups", [2, 8, 32])
@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("role", ROLES)
def test_grouped_choices_can_be_computed(role: Role, batch: int, groups: int) -> None:
    for size in (4, 32):
        problem = convolution(role, 32, size, batch=batch, groups=groups)
        for engines in (XLA, BOTH):
            lowering = choose_by_rule(problem, engines)
            assert lowering == DEFAULT or can_compute(problem, lowering, engines)


def test_depthwise_convolutions_use_multiply_adds_without_onednn() -> None:
    lowerings = {
        role: str(choose_by_rule(convolution(role, 32, 16, batch=8, groups=32), XLA))
        for role in ROLES
    }
    assert lowerings == {
        "forward": "multiply_adds/xla",
        "input_grad": "multiply_adds/xla",
        "weight_grad": "blocks/xla/1",
    }
    assert choose_by_rule(convolution("forward", 32, 16, batch=8, groups=4), XLA) == DEFAULT


def test_onednn_is_chosen_for_large_dense_products() -> None:
    def usual(role: Role, rows: int, dtype: str, engines: frozenset[Engine] = BOTH) -> Lowering:
        return choose_by_rule(DenseProblem(role, rows, 256, 256, dtype), engines)

    onednn = Lowering("product", "onednn")
    assert usual("weight_grad", 2048, "float32") == onednn
    assert usual("forward", 2048, "float32") == DEFAULT
    assert usual("input_grad", 2048, "float32") == DEFAULT
    assert {usual(role, 2048, "bfloat16") for role in ROLES} == {onednn}
    assert {usual(role, 64, "float32") for role in ROLES} == {DEFAULT}


def test_bfloat16_dense_kernel_gradient_is_not_transposed() -> None:
    def usual(role: Role, features: int, dtype: str = "bfloat16") -> Lowering:
        return choose_by_rule(DenseProblem(role, 2048, 256, features, dtype), XLA)

    assert usual("weight_grad", 256) == Lowering("product")
    assert usual("weight_grad", 256, "float32") == DEFAULT
    assert usual("forward", 256) == usual("input_grad", 256) == DEFAULT
    # With few features the default computes it transposed.
    assert usual("weight_grad", FEW_FEATURES) == DEFAULT
