"""Histograms, the graph and embeddings of a run, and that they change none of its numbers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.graph_pb2 import GraphDef

from pipeline import load_run, run
from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.engine.callbacks.callback import Callback, RunControl
from pipeline.stages.collect import Collector
from pipeline.stages.data import load_data
from pipeline.training.telemetry import Telemetry
from tests.conftest import compose_tiny

pytestmark = pytest.mark.usefixtures("optimized_programs_of_module")

COLLECTED = ["monitor.tensorboard=true", "monitor.collect_every=20"]
SHOWN = ["monitor.graph=true", "monitor.embeddings=30"]


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of a run, without the number of the sink."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def events(run_dir: Path) -> EventAccumulator:
    sizes = {"histograms": 0, "compressedHistograms": 1}
    return EventAccumulator(str(run_dir), size_guidance=sizes).Reload()


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, Path]:
    """A run without collection and one with everything, of 45 steps."""
    folder = tmp_path_factory.mktemp("collected")
    run(compose_tiny(cache), folder / "plain")
    run(compose_tiny(cache, *COLLECTED, *SHOWN), folder / "full")
    return folder / "plain", folder / "full"


@pytest.mark.slow
def test_collecting_does_not_change_the_losses(collected: tuple[Path, Path]) -> None:
    plain, full = map(numbers, collected)
    assert len(plain) == 45
    assert plain == full
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in collected)
    assert one["metrics"] == other["metrics"]


@pytest.mark.slow
def test_weight_histograms_match_the_state(collected: tuple[Path, Path]) -> None:
    full, kept = events(collected[1]), load_run(collected[1]).parameters
    tags = [tag for tag in full.Tags()["histograms"] if tag.startswith("weights/")]
    assert len(tags) == len(kept)
    for tag in tags:
        found = full.Histograms(tag)
        assert [event.step for event in found] == [0, 20, 40]
        array = kept[tag.removeprefix("weights/")]
        assert all(event.histogram_value.num == array.size for event in found)


@pytest.mark.slow
def test_gradient_histograms_match_the_next_step(collected: tuple[Path, Path]) -> None:
    full, steps = events(collected[1]), numbers(collected[1])
    tags = [tag for tag in full.Tags()["histograms"] if tag.startswith("gradients/")]
    squares: dict[int, float] = dict.fromkeys((0, 20, 40), 0.0)
    for tag in tags:
        for event in full.Histograms(tag):
            squares[event.step] += event.histogram_value.sum_squares
    for step, total in squares.items():
        assert np.sqrt(total) == pytest.approx(steps[step]["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_graph_has_every_layer_and_one_output(collected: tuple[Path, Path]) -> None:
    graph = GraphDef.FromString(events(collected[1]).Graph().SerializeToString())
    names = {node.name for node in graph.node}
    layers = {name.rpartition("/")[0] for name in names}
    own = {path.rpartition("/")[0] for path in load_run(collected[1]).parameters}
    assert own <= layers
    reads = [name for node in graph.node for name in node.input]
    assert set(reads) <= names
    assert names - set(reads) == {"output"}
    (shape,) = graph.node[-1].attr["_output_shapes"].list.shape
    assert [dim.size for dim in shape.dim] == [1, 10]


@pytest.mark.slow
def test_embeddings_are_the_inputs_of_the_last_layer(collected: tuple[Path, Path]) -> None:
    board, trained = collected[1], load_run(collected[1])
    vectors = np.loadtxt(board / "embeddings" / "vectors.tsv", dtype=np.float64)
    assert vectors.shape == (30, 84)
    labels = (board / "embeddings" / "labels.tsv").read_text().splitlines()
    assert len(labels) == 30
    assert (
        'sprite { image_path: "embeddings/pictures.png"'
        in (board / "projector_config.pbtxt").read_text()
    )
    last = max(path for path in trained.parameters if path.startswith("dense"))
    layer = last.rpartition("/")[0]
    kernel, bias = (trained.parameters[f"{layer}/{name}"] for name in ("kernel", "bias"))
    logits = vectors @ kernel + bias
    rows = np.arange(30) * 40 // 30
    dataset = load_data(trained.recipe, Reporter(console=Console(file=io.StringIO())))
    images = np.asarray(dataset.eval.columns["image"][rows])
    assert np.allclose(logits, trained.predict(images), atol=1e-3)


def test_failure_is_a_single_warning(tiny: Callable[..., Recipe]) -> None:
    said: list[str] = []
    broken: Any = None
    collector = Collector(broken, broken, 10, broken, broken, said.append)
    collector(broken, 0)
    collector(broken, 1)
    assert len(said) == 1
    assert said[0].startswith("monitor.collect_every: AttributeError:")
    assert said[0].endswith("aren't collected any more; training continues")


@pytest.mark.slow
@pytest.mark.mlp
@pytest.mark.usefixtures("unoptimized_programs")
@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.mode=data", "parallel.devices=2"],
        ["train.precision=O2", "train.loss_scale=dynamic"],
        ["train.mode=eager", "train.steps=3", "monitor.collect_every=2"],
        ["train.freeze=[dense_0]", "train.unfreeze=[{pattern: dense_0, after_steps: 20}]"],
        ["train.accumulate_steps=2"],
        ["optimizer=thor"],
    ],
)
def test_gradients_of_other_step_kinds_match_the_norm(
    overrides: list[str], tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    run(tiny(*COLLECTED, *overrides), tmp_path / "run")
    full, steps = events(tmp_path / "run"), numbers(tmp_path / "run")
    tags = [tag for tag in full.Tags()["histograms"] if tag.startswith("gradients/")]
    squares: dict[int, float] = {}
    for tag in tags:
        for event in full.Histograms(tag):
            value = event.histogram_value.sum_squares
            squares[event.step] = squares.get(event.step, 0.0) + value
    assert len(squares) > 1
    # Those of an overflow are not finite.
    norms = {step: steps[step]["grad_norm"] for step in squares}
    compared = {step: norm for step, norm in norms.items() if norm is not None}
    assert compared
    for step, norm in compared.items():
        assert np.sqrt(squares[step]) == pytest.approx(norm, rel=2e-3)


class Slower(Callback):
    """A callback that asks for another rate in the middle of a sink."""

    def on_steps(self, run: RunControl, telemetry: Telemetry) -> None:
        """Ask at once, to have it at the next boundary."""
        run.set_learning_rate(0.001)


@pytest.mark.slow
@pytest.mark.mlp
def test_callback_requests_take_effect_at_the_same_step(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    sinks = ("train.sink_size=15", "eval.every_epochs=null")
    for name, added in (("plain", ()), ("full", COLLECTED)):
        run(tiny(*sinks, *added), tmp_path / name, callbacks=[Slower()])
    rates = [[step["learning_rate"] for step in numbers(tmp_path / n)] for n in ("plain", "full")]
    assert rates[0] == rates[1]
    assert rates[0][14] != rates[0][15]


@pytest.mark.slow
def test_resumed_run_collects_each_step_once(
    tiny: Callable[..., Recipe], tmp_path: Path, collected: tuple[Path, Path]
) -> None:
    run_dir = tmp_path / "run"
    run(tiny(*COLLECTED, "train.steps=40"), run_dir)
    run(tiny(*COLLECTED, f"train.resume={run_dir}"))
    one, other = events(run_dir), events(collected[1])
    assert one.Tags()["histograms"] == other.Tags()["histograms"]
    for tag in one.Tags()["histograms"]:
        ours, theirs = one.Histograms(tag), other.Histograms(tag)
        # A run of 40 steps has no batch after its last one.
        expected = [0, 20] if tag.startswith("gradients/") else [0, 20, 40]
        assert [event.step for event in ours] == expected
        assert [event.histogram_value for event in ours] == [
            event.histogram_value for event in theirs[: len(expected)]
        ]
