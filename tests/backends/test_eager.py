"""M-11: operations that run by themselves; slower, and the numbers of the compiled step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError
from pipeline.models.modules import convolution, standard
from tests import outcome
from tests.conftest import compose_tiny
from tests.whole_run import run

Compose = Callable[..., Recipe]
SHORT = ["train.steps=6", "train.epochs=null", "eval.every_epochs=null"]
SMALL = [
    *SHORT,
    "model=layers",
    "model.layers=[{name: conv, features: 2, kernel: 3},{name: max_pool, kernel: 4},flatten,"
    "{name: dense, features: '$classes'}]",
]
"""A network whose operations are few, since each is compiled by itself."""


@pytest.fixture(scope="module")
def eager(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of the small network whose operations run by themselves."""
    run_dir = tmp_path_factory.mktemp("eager")
    run(compose_tiny(cache, *SMALL, "train.mode=eager"), run_dir)
    return run_dir


def watch(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, seen: list[bool]) -> None:
    """Note for each call of a function whether its values are there to be looked at."""
    function = getattr(module, name)

    def watched(x: Any, *args: Any, **settings: Any) -> Any:
        value = getattr(x, "primal", x)
        seen.append(not isinstance(value, jax.core.Tracer))
        return function(x, *args, **settings)

    monkeypatch.setattr(module, name, watched)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The calls of the pooling in Python."""
    seen: list[bool] = []
    watch(monkeypatch, standard, "pool_max", seen)
    return seen


@pytest.fixture
def convolutions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The calls of the convolution in Python."""
    seen: list[bool] = []
    for name in ("conv2d", "conv2d_chwn"):
        watch(monkeypatch, convolution, name, seen)
    return seen


@pytest.mark.slow
def test_python_in_a_layer_runs_at_every_step_with_values(
    tiny: Compose, calls: list[bool], tmp_path: Path
) -> None:
    run(tiny(*SMALL, "train.mode=eager", "train.sink_size=3"), tmp_path)
    initialisation, steps, evaluated_batches = 1, 6, 3
    assert calls.count(True) == initialisation + steps + evaluated_batches


@pytest.mark.slow
def test_python_in_a_layer_runs_only_during_tracing_in_graph_mode(
    tiny: Compose, calls: list[bool], tmp_path: Path
) -> None:
    run(tiny(*SMALL), tmp_path)
    assert calls.count(False) > 0
    assert calls.count(True) == 0


@pytest.mark.slow
def test_eager_results_match_graph_mode(eager: Path, tiny: Compose, tmp_path: Path) -> None:
    """To float32's last digits: a compiled step fuses what is computed one by one here."""
    run(tiny(*SMALL, "autotune=off"), tmp_path)
    for ours, theirs in zip(outcome.metrics(eager), outcome.metrics(tmp_path), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-6)
    weights, expected = outcome.arrays(eager), outcome.arrays(tmp_path)
    assert weights.keys() == expected.keys()
    for path, array in weights.items():
        np.testing.assert_allclose(array, expected[path], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sink", ["train.sink=false", "train.sink_size=4"])
def test_sinks_do_not_change_results(sink: str, eager: Path, tiny: Compose, tmp_path: Path) -> None:
    run(tiny(*SMALL, "train.mode=eager", sink), tmp_path)
    outcome.assert_same_run(eager, tmp_path)


@pytest.mark.slow
def test_divergence_stops_at_its_step(tiny: Compose, tmp_path: Path) -> None:
    """C-02."""
    with pytest.raises(RunError, match="Invalid loss, terminating training"):
        run(tiny(*SMALL, "train.mode=eager", "train.optimizer.lr=1e30"), tmp_path)
    assert 1 < len(outcome.metrics(tmp_path)) < 6


@pytest.mark.slow
def test_selected_layers_are_compiled_while_others_run_in_python(
    eager: Path, tiny: Compose, calls: list[bool], convolutions: list[bool], tmp_path: Path
) -> None:
    run(tiny(*SMALL, "train.mode=eager", "train.jit_layers=[conv_*]"), tmp_path)
    initialisation, steps, evaluated_batches = 1, 6, 3
    assert calls.count(True) == initialisation + steps + evaluated_batches
    assert convolutions.count(True) == initialisation
    assert "by itself but for those in conv_*" in (tmp_path / "run.log").read_text()
    for ours, theirs in zip(outcome.metrics(tmp_path), outcome.metrics(eager), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-6)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([], "train.jit_layers = ['conv_0']: must be [] with train.mode = graph, which compiles"),
        (
            ["train.mode=eager", "optimizer=thor"],
            "train.jit_layers = ['conv_0']: must be [] with thor, which looks into layers",
        ),
    ],
)
def test_jit_layers_requires_eager_mode(overrides: list[str], problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_digits", ["train.jit_layers=[conv_0]", *overrides])
    assert problem in str(caught.value)


@pytest.mark.slow
def test_pattern_without_a_matching_layer_is_refused(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"pattern 'relu_0' matches none of the 5 layers in conv"):
        run(tiny(*SHORT, "train.mode=eager", "train.jit_layers=[relu_0]"), tmp_path)
