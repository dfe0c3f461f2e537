"""M-11: operations that run by themselves; slower, and the numbers of the compiled step."""

from __future__ import annotations

import json
import subprocess
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
from tests.conftest import TINY, compose_tiny
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


READING = Path(__file__).with_name("reading_components.py")


def place(text: str) -> str:
    """Return the beginning of the place, in a message, of the line that contains a text."""
    lines = READING.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return f"reading_components.py, line {number}: `print("


LAYER = f"layer Gate_0 ({place('np.asarray(x)')}"
LOSS = place("np.array(losses)")
READS = [
    "--plugin", str(READING), *TINY, *SHORT, "model=flax", "model.import=reading_components:Net",
    "loss=capped", "hydra.run.dir=run",
]  # fmt: skip
"""A network whose layer and a loss which choose by values."""
Forked = Callable[..., subprocess.CompletedProcess[str]]


def read_losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[], ["train.accumulate_steps=2"]], ids=["batch", "microbatches"])
def test_layer_and_loss_choose_by_values(keys: list[str], forked: Forked, tmp_path: Path) -> None:
    """They have the losses of graph mode, in which the same choices are made without values."""
    eager = forked([*READS, *keys, "train.mode=eager"])
    assert eager.returncode == 0, eager.stderr
    rows = 8 if keys else 16
    assert eager.stdout.count(f"inputs ({rows}, 8) ") >= 6
    assert eager.stdout.count(f"losses ({rows},)") >= 6
    losses = read_losses(tmp_path / "run")
    graph = forked([
        *READS, *keys, "model.arguments.reads=false", "+train.loss.reads=false",
        "hydra.run.dir=graph",
    ])  # fmt: skip
    assert graph.returncode == 0, graph.stderr
    assert losses == pytest.approx(read_losses(tmp_path / "graph"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ([], f"model flax: reading_components:Net: {LAYER}"),
        (["model.arguments.reads=false"], f"train.loss = capped: {LOSS}"),
        (["train.mode=eager", "device=ascend910"], LAYER),
        (["train.mode=eager", "train.jit_layers=[Gate_0]"], LAYER),
    ],
    ids=["graph", "loss in graph mode", "estimate", "compiled layer"],
)
def test_read_of_a_traced_value_has_one_message(
    keys: list[str], problem: str, forked: Forked
) -> None:
    refused = forked([*READS, *keys])
    assert refused.returncode == 2, refused.stderr
    assert problem in refused.stderr
    assert "reads the value of an array" in refused.stderr
    assert "train.mode=eager" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_reading_network_is_summarised_and_predicts(forked: Forked, tmp_path: Path) -> None:
    assert forked([*READS, "train.mode=eager"]).returncode == 0
    np.save(tmp_path / "images.npy", np.zeros((3, 8, 8, 1), np.uint8))
    plugin = READS[:2]
    predicted = forked([*plugin, "infer", "run", "images.npy"])
    assert predicted.returncode == 0, predicted.stderr
    assert "inputs (3, 8)" in predicted.stdout
    summary = forked([*plugin, "summary", *READS[2:-1], "train.mode=eager"])
    assert "Gate_0" in summary.stdout, summary.stderr
    exported = forked([*plugin, "export", "run", "exported"])
    assert exported.returncode == 2
    assert LAYER in exported.stderr
