from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pipeline.backends.base import Executable
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.engine.callbacks.callback import Evaluation
from pipeline.engine.history import History
from pipeline.stages import evaluate as stage
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.evaluate import EvalOptions, evaluate
from pipeline.stages.runner.evaluations import Evaluations
from pipeline.training.metrics import EvalSums, zero_sums
from pipeline.training.state import TrainState
from tests.whole_run import run

Compose = Callable[..., Recipe]

SMALL = [
    "model=mlp",
    "model.hidden=[8]",
    "dataset.train.ops=[{name: rescale, factor: 9.0, shift: 1.0}]",
    "dataset.eval.ops=[{name: rescale, factor: 0.00390625, shift: -0.5}]",
]


def prepare(recipe: Recipe) -> tuple[Executable, Dataset]:
    reporter = Reporter(console=Console(file=io.StringIO()))
    dataset = load_data(recipe, reporter)
    made = build(recipe, dataset, reporter)
    return compile_programs(
        recipe, dataset, made, recipe.device.open(recipe.parallel), reporter
    ), dataset


def of_classes(confusion: np.ndarray, **sums: Any) -> EvalSums:
    """Sums over 10 classes with this confusion matrix."""
    none = zero_sums(10)
    assert none.classes is not None
    return replace(none, classes=replace(none.classes, confusion=confusion), **sums)


def logits_by_hand(state: TrainState, images: np.ndarray) -> np.ndarray:
    """Dense, ReLU, dense in float64 after the evaluation's own op."""
    x = images.reshape(len(images), -1) / 256 - 0.5
    (w1, b1), (w2, b2) = (
        (np.float64(layer["kernel"]), np.float64(layer["bias"]))
        for _, layer in sorted(state.params.items())
    )
    return np.maximum(x @ w1 + b1, 0) @ w2 + b2


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [16, 64, 1], ids=lambda n: f"batches of {n}")
def test_metrics_do_not_depend_on_batch_size(batch_size: int, tiny: Compose) -> None:
    """D-17, E-01: 40 samples in 3, 1 and 40 batches."""
    executable, dataset = prepare(tiny(*SMALL, f"dataset.eval.batch_size={batch_size}"))
    state = executable.init()
    logits = logits_by_hand(state, dataset.eval.columns["image"])
    labels = np.asarray(dataset.eval.columns["label"])
    predicted = logits.argmax(axis=1)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(40), labels]
    ranks = (logits > logits[np.arange(40), labels][:, None]).sum(axis=1)

    evaluation = evaluate(executable, state, dataset, EvalOptions(1.0))
    assert evaluation is not None
    assert evaluation.metrics["count"] == 40
    assert evaluation.metrics["accuracy"] == (predicted == labels).mean()
    assert evaluation.metrics["top5"] == (ranks < 5).mean()
    assert evaluation.metrics["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    confusion = np.zeros((10, 10), int)
    np.add.at(confusion, (labels, predicted), 1)
    assert np.array_equal(evaluation.confusion, confusion)


@pytest.mark.slow
def test_metrics_do_not_depend_on_dispatch_size(tiny: Compose) -> None:
    executable, dataset = prepare(tiny(*SMALL, "dataset.eval.batch_size=4"))
    state = executable.init()
    one, other = (
        evaluate(executable, state, dataset, EvalOptions(seconds)) for seconds in (1e-9, 1e9)
    )
    assert one is not None
    assert other is not None
    assert one.metrics == other.metrics
    assert np.array_equal(one.confusion, other.confusion)


class Timed:
    """All samples are right: a batch takes `batch_s`, by a clock of its own."""

    def __init__(self, batch_s: float) -> None:
        self.dispatched: list[tuple[int, int]] = []
        self.now = 0.0
        self._batch_s = batch_s

    def evaluate(self, state: TrainState, start: int, stop: int, before: Any = None) -> EvalSums:
        self.dispatched.append((start, stop))
        self.now += self._batch_s * (stop - start)
        right = np.diag([4 * stop, *9 * [0]])
        return of_classes(right, samples=right.sum(), count=right.sum())


@pytest.mark.parametrize(
    ("batch_s", "spans"),
    [
        (0.25, [(0, 1), (1, 5), (5, 9), (9, 10)]),
        (1e-6, [(0, 1), (1, 10)]),
        (5.0, [(n, n + 1) for n in range(10)]),
    ],
)
def test_dispatches_are_bounded_in_time(
    batch_s: float,
    spans: list[tuple[int, int]],
    tiny: Compose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten batches, a second to each dispatch; the first is of one batch, to find out."""
    dataset = load_data(
        tiny(*SMALL, "dataset.eval.batch_size=4"), Reporter(console=Console(file=io.StringIO()))
    )
    timed = Timed(batch_s)
    clock = SimpleNamespace(perf_counter=lambda: timed.now)
    monkeypatch.setattr(stage, "time", clock)
    assert evaluate(timed, None, dataset, EvalOptions(1.0)) is not None  # type: ignore[arg-type]
    assert timed.dispatched == spans
    # Given up as soon as one of them is over.
    timed.dispatched = []
    answers = iter([False, True])
    assert evaluate(timed, None, dataset, EvalOptions(1.0), lambda: next(answers)) is None  # type: ignore[arg-type]
    assert timed.dispatched == spans[:1]


@pytest.mark.medium
def test_uncounted_sample_is_an_error(tiny: Compose) -> None:
    recipe = tiny(*SMALL)
    dataset = load_data(recipe, Reporter(console=Console(file=io.StringIO())))
    sums = of_classes(np.diag([39, *9 * [0]]), samples=np.int32(39))
    forgetful = SimpleNamespace(evaluate=lambda *_: sums)
    with pytest.raises(RunError, match=r"^evaluated 39 samples of 40$"):
        evaluate(forgetful, None, dataset, EvalOptions(1.0))  # type: ignore[arg-type]


@pytest.mark.medium
def test_evaluation_of_only_ignored_labels_is_an_error(tiny: Compose) -> None:
    dataset = load_data(tiny(*SMALL), Reporter(console=Console(file=io.StringIO())))
    sums = replace(zero_sums(10), samples=np.int32(40))
    blind = SimpleNamespace(evaluate=lambda *_: sums)
    expected = r"^all labels of the 40 evaluation samples are dataset\.ignore_index; at least one"
    with pytest.raises(RunError, match=expected):
        evaluate(blind, None, dataset, EvalOptions(1.0))  # type: ignore[arg-type]


@pytest.mark.medium
def test_training_sample_of_only_ignored_labels_is_an_error(tiny: Compose) -> None:
    dataset = load_data(tiny(*SMALL), Reporter(console=Console(file=io.StringIO())))

    def evaluate_split(*_: Any, on_train: bool = False) -> EvalSums:
        return of_classes(np.diag([40, *9 * [0]]), samples=np.int32(40), count=40 - 40 * on_train)

    half_blind = SimpleNamespace(evaluate=evaluate_split)
    expected = r"^all labels of the 40 training samples are dataset\.ignore_index; at least one"
    with pytest.raises(RunError, match=expected):
        evaluate(half_blind, None, dataset, EvalOptions(1.0, on_train=True))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "is_said"), [("batch_norm", True), ("relu", False)])
def test_classes_missed_after_few_steps_may_be_due_to_running_statistics(
    layer: str,
    is_said: bool,
    tiny: Callable[..., Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    network = f"[flatten, {layer}, {{name: dense, features: '$classes'}}]"
    run(tiny("model=layers", f"model.layers={network}", "train.steps=1"), tmp_path / "run")
    printed = capsys.readouterr().out
    assert "never predicted: " in printed
    assert ("after 1 step running statistics may still be far from" in printed) == is_said


@pytest.mark.parametrize(("name", "is_said"), [("mean", True), ("positions", False)])
def test_buffers_other_than_statistics_have_no_settling_warning(name: str, is_said: bool) -> None:
    """A table of positions, which a network of PyTorch may have, doesn't change."""
    said: list[str] = []
    context = SimpleNamespace(
        ranks=SimpleNamespace(is_first=True),
        reporter=SimpleNamespace(warn=said.append, print_stage=lambda *_: None),
    )
    built = SimpleNamespace(
        state=SimpleNamespace(collections={"batch_stats": {"embed": {name: 0}}})
    )
    dataset = SimpleNamespace(targets=SimpleNamespace(task="classification"))
    observers = SimpleNamespace(monitor=SimpleNamespace(submit=lambda call: call()))
    done = SimpleNamespace(context=context, built=built, dataset=dataset)
    figures = {"per_class": {"a": 0.5, "b": 0.5}}
    metrics = {"count": 5, "precision": figures, "recall": figures, "f1": figures}
    evaluations = Evaluations(done, observers, History(3))  # type: ignore[arg-type]
    evaluations._show_classes(Evaluation(metrics, np.array([[0, 2], [0, 3]])), 3)
    assert len(said) == 1
    assert ("running statistics" in said[0]) == is_said
