"""Software stacks by framework and version, and one message for those that aren't known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.backends.ascend import price
from pipeline.backends.ascend.chip.options import (
    OptionError,
    check_count,
    choose_mode,
    find_stack,
    load_stacks,
)
from pipeline.backends.ascend.compiler.primitives import load_patterns
from pipeline.backends.ascend.compiler.tasks_from_kernels import ADAM_FUSION
from pipeline.core.errors import RecipeError
from tests.backends.ascend.dense_step import BATCH, WEIGHTS, step

MESSAGES = {
    "mindspore_grph": "must be None (MindSpore) or one of mindspore_graph, mindcv_graph, "
    "mindspore_eager, pytorch_eager, or one with @VERSION; did you mean mindspore_graph?",
    "mindspore_graph@1.4": "this version isn't known; the nearest is mindspore_graph@1.5, of ",
    "mindspore_graph@9.9.9": "this version isn't known; the nearest is mindspore_graph@2.0, of ",
    "mindspore_graph@0.1": "this version isn't known; the nearest is mindspore_graph@0.3, of ",
    "pytorch_eager@2.1": "this version isn't known; the nearest is pytorch_eager@1.8, of 1.5, 1.8",
    "pytorch_eager@": "must be pytorch_eager@VERSION, such as pytorch_eager@1.8",
    "pytorch_eager@newest": "must be pytorch_eager@VERSION, such as pytorch_eager@1.8",
    "pytorch_eager@" + "9" * 5000: "must be pytorch_eager@VERSION, such as pytorch_eager@1.8",
}


@pytest.mark.parametrize(("software", "message"), MESSAGES.items(), ids=range(len(MESSAGES)))
def test_unknown_version_is_refused_with_a_suggestion(software: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        price(step, WEIGHTS, BATCH, software=software)
    assert caught.value.exit_status == 2
    assert str(caught.value).startswith(f"software = {software!r:.80}: {message}")


@pytest.mark.medium
def test_unknown_version_in_a_recipe_is_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_digits", ["device=ascend910", "device.software=mindspore_graph@1.4"])
    (problem,) = caught.value.problems
    assert "device.software" in problem
    assert "the nearest is mindspore_graph@1.5" in problem
    assert caught.value.exit_status == 2
    recipe = load_recipe("lenet5_digits", ["device=atlas_a2", "device.software=pytorch_eager@1.8"])
    assert recipe.device.software == "pytorch_eager@1.8"  # type: ignore[attr-defined]


def test_versions_omit_only_existing_fusions() -> None:
    names = {fusion.name for fusion in load_patterns().fusions} | {
        "matmul_confusiontranspose",
        ADAM_FUSION,
    }
    for versions in load_stacks().values():
        assert all(names.issuperset(missing) for missing in versions.values())


@pytest.mark.parametrize(
    ("software", "has_one_pool"),
    [
        ("mindspore_graph", False),
        ("mindspore_graph@0.3", False),
        ("mindspore_graph@1.5", True),
        ("mindspore_graph@1.10", True),
        ("mindcv_graph", True),
        ("mindspore_eager", True),
        ("pytorch_eager@1.8", True),
    ],
)
def test_stacks_with_one_pool_of_memory(software: str, has_one_pool: bool) -> None:
    assert find_stack(software).has_one_pool == has_one_pool


def test_patch_release_matches_its_minor_version() -> None:
    assert find_stack("mindspore_graph@1.10.1") == find_stack("mindspore_graph@1.10")
    assert find_stack("mindspore_graph").missing_fusions == frozenset()


def test_version_without_fusions_is_never_faster() -> None:
    newest = price(step, WEIGHTS, BATCH).step_ms
    steps = [
        price(step, WEIGHTS, BATCH, software=f"mindspore_graph@{version}").step_ms
        for version in load_stacks()["mindspore_graph"]
    ]
    assert min(steps) >= newest
    eager = [
        price(step, WEIGHTS, BATCH, software=software).step_ms
        for software in ("pytorch_eager", "pytorch_eager@1.5", "pytorch_eager@1.8.1")
    ]
    assert len(set(eager)) == 1


def test_unknown_mode_of_a_named_stack_is_refused() -> None:
    with pytest.raises(OptionError, match="mode = 'fast': must be one of op_by_op, graph_sink, "):
        choose_mode("mindspore_graph", "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [np.array([1, 2]), np.array(1.5), 1.5, True])
def test_count_must_be_a_whole_number(count: Any) -> None:
    with pytest.raises(OptionError, match=r"^devices = .*: must be a whole number$"):
        check_count("devices", count)
