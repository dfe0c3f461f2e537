"""Shardings of parameters that don't fit are refused with what would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest

from pipeline.backends.planner.dimension_groups import Mesh
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from pipeline.training.parallel.parallel_spec import AXES, MeshSpec

SHARED = (
    "model=mlp",
    "model.hidden=[12]",
    "parallel.mode=semi_auto",
    "parallel.reproducible=layout",
    "parallel.mesh={data: 1, model: 8}",
)
REFUSED = {
    "[{pattern: dense_7, axes: [model]}]": "parallel.specs: pattern 'dense_7' matches none of the "
    "4 parameters in dense_0 (2), dense_1 (2), such as dense_0/bias; did you mean dense_1?",
    "[{pattern: dense_0/kernel, axes: [null, model]}]": "parallel.specs: dense_0/kernel: dimension "
    "1 of size 12 can't be divided among the 8 devices of axis model; 8 or 16 would",
    "[{pattern: dense_0, axes: [null, model]}]": "parallel.specs: dense_0/bias has 1 dimensions, "
    "[12], but axes has 2 entries",
    "[]": "parallel.specs: nothing is sharded along the axis model of 8 devices",
}


@pytest.mark.medium
@pytest.mark.parametrize("specs", REFUSED)
def test_unsuitable_shardings_are_refused(tiny: Callable[..., Recipe], specs: str) -> None:
    recipe, reporter = tiny(*SHARED, f"parallel.specs={specs}"), Reporter()
    with pytest.raises(RecipeError) as refused:
        build(recipe, load_data(recipe, reporter), reporter)
    assert REFUSED[specs] in str(refused.value)


CONSTRAINED = {
    "[{pattern: dense_7, axes: [data, model]}]": "parallel.constraints: pattern 'dense_7' matches "
    "none of the 2 layers, such as dense_0; did you mean dense_1?",
    "[{pattern: dense_0/kernel, axes: [data, model]}]": "parallel.constraints: pattern "
    "'dense_0/kernel' matches none of the 2 layers, such as dense_0",
    "[{pattern: dense_0, axes: [data, null, model]}]": "parallel.constraints: dense_0 computes "
    "arrays of 2 dimensions, but axes has 3 entries",
}


@pytest.mark.medium
@pytest.mark.parametrize("constraints", CONSTRAINED)
def test_constraints_without_effect_are_refused(
    tiny: Callable[..., Recipe], constraints: str
) -> None:
    recipe, reporter = tiny(*SHARED, f"parallel.constraints={constraints}"), Reporter()
    with pytest.raises(RecipeError) as refused:
        build(recipe, load_data(recipe, reporter), reporter)
    assert CONSTRAINED[constraints] in str(refused.value)


@pytest.mark.medium
def test_constraint_on_some_layers_is_accepted(tiny: Callable[..., Recipe]) -> None:
    constraints = "parallel.constraints=[{pattern: dense_*, axes: [model, null]}]"
    recipe, reporter = tiny(*SHARED, constraints), Reporter()
    step = build(recipe, load_data(recipe, reporter), reporter)
    (rule,) = recipe.parallel.constraints
    assert (rule.pattern, rule.axes) == ("dense_*", ("model", None))
    assert step.parameters > 0, "the network was traced and nothing was refused"


def test_mesh_axis_names_agree() -> None:
    assert tuple(MeshSpec.model_fields) == tuple(field.name for field in fields(Mesh)) == AXES
