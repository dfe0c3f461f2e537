"""Ensembles: averages against their formulas in float64, and runs that can't be averaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.data.columns import ColumnSpec, Targets
from pipeline.stages.export.prediction import (
    average_outputs,
    make_ensemble,
    make_predict,
    read_network,
    select_weights,
)
from tests.conftest import MLP, compose_tiny
from tests.models.build import QUICK
from tests.stages.export.ensembles import make_run

average_compiled = jax.jit(average_outputs, static_argnums=1, compiler_options=QUICK)
"""The averages as `predict` computes them: one program for outputs of one shape."""

CONVOLUTION = (
    "model=layers",
    "model.blocks={}",
    "model.layers=[{name: conv, features: 2, kernel: 3}, flatten,"
    "{name: dense, features: $classes}]",
)


@pytest.mark.slow
@given(st.integers(1, 5), st.sampled_from([(3, 4), (2, 5, 5, 3)]), st.floats(0.1, 30))
def test_probabilities_are_averaged(count: int, shape: tuple[int, ...], scale: float) -> None:
    outputs = scale * np.random.default_rng(count).normal(size=(count, *shape))
    powers = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
    expected = (powers / powers.sum(axis=-1, keepdims=True)).mean(axis=0)
    found = np.exp(np.asarray(average_compiled(list(outputs), "classification"), np.float64))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-30)
    np.testing.assert_allclose(found.sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.slow
@given(st.integers(1, 5), st.floats(0.1, 10))
def test_label_probabilities_are_averaged(count: int, scale: float) -> None:
    outputs = scale * np.random.default_rng(count).normal(size=(count, 3, 4))
    expected = (1 / (1 + np.exp(-outputs))).mean(axis=0)
    found = np.asarray(average_compiled(list(outputs), "multi_label"), np.float64)
    np.testing.assert_allclose(1 / (1 + np.exp(-found)), expected, rtol=2e-5)


def test_regression_outputs_are_averaged() -> None:
    outputs = [np.full((2, 1), value, np.float32) for value in (1, 2, 6)]
    assert np.asarray(average_outputs(outputs, "regression")).tolist() == [[3], [3]]


def test_impossible_class_has_finite_logits() -> None:
    outputs = [np.array([[0.0, -1e4]], np.float32), np.array([[0.0, -2e4]], np.float32)]
    assert np.isfinite(average_compiled(outputs, "classification")).all()


def test_outputs_of_other_shapes_are_refused() -> None:
    with pytest.raises(DataError, match=r"outputs of shape \(4,\) and \(2, 4\); must be equal"):
        average_outputs([np.zeros((3, 4)), np.zeros((3, 2, 4))], "classification")


@pytest.mark.medium
def test_ensemble_predicts_the_mean_of_its_members(cache: Path) -> None:
    """Of two architectures, each with its own names of weights."""
    recipes = [compose_tiny(cache, *MLP), compose_tiny(cache, *CONVOLUTION)]
    runs = [make_run(recipe, seed) for seed, recipe in enumerate(recipes)]
    run = make_ensemble(dict(zip((Path("a"), Path("b")), runs, strict=True)))
    images = np.random.default_rng(0).integers(0, 17, (5, 8, 8, 1), dtype=np.uint8)
    members = [
        np.asarray(jax.jit(make_predict(member))(member.arrays, images), np.float64)
        for member in runs
    ]
    powers = [np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) for logits in members]
    found = np.asarray(jax.jit(make_predict(run))(run.arrays, images), np.float64)
    np.testing.assert_allclose(np.exp(found), np.mean(powers, axis=0), rtol=2e-5)
    assert select_weights(run.arrays, 1).keys() == runs[1].arrays.keys()
    assert str(run) == "ensemble of 2 runs of mlp, layers"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"columns": {"image": ColumnSpec((8, 8, 1), "float32")}},
            "b: its samples differ from those of a in columns; must be equal",
        ),
        (
            {
                "targets": Targets(("no", "yes")),
                "columns": {"image": ColumnSpec((9, 9, 1), "uint8")},
            },
            "b: .* in columns, targets; must",
        ),
    ],
)
def test_members_with_other_samples_are_refused(
    cache: Path, changes: dict[str, Any], problem: str
) -> None:
    run = make_run(compose_tiny(cache, *MLP), 0)
    other = replace(run, samples=replace(run.samples, **changes))
    with pytest.raises(DataError, match=problem):
        make_ensemble({Path("a"): run, Path("b"): other})


def test_duplicate_run_is_refused() -> None:
    with pytest.raises(DataError, match="a: is named twice; must be another run"):
        read_network([Path("a"), Path("a")])
