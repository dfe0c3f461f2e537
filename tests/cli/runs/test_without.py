"""Runs without some samples: the bits of training without them from the start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from pipeline import load_recipe, run
from pipeline.__main__ import main
from pipeline.checkpoint.checkpoint_folder import FOLDER, make_checkpoint_path
from pipeline.checkpoint.restore import read_checkpoint
from pipeline.cli.runs.without import format_changed
from pipeline.core.errors import DataError, PipelineError, RecipeError, UsageError
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.data.columns import Split, Targets
from pipeline.engine.monitors.log_lines import read_lines
from pipeline.inspect.dumps.opened_recipe import make_silent_reporter
from pipeline.inspect.replay import open_replay
from pipeline.inspect.without import (
    Counterfactual,
    compute_counterfactual,
    find_first_step,
    make_recipe,
)
from pipeline.training.step import get_evaluated_weights, predict
from tests.command_line import without
from tests.conftest import MLP, OPS, ROOT, compose_tiny

RUN = (*MLP, "train.steps=12", "checkpoint.every_steps=3", "checkpoint.keep=9")
IGNORED = 3
"""The label that one run ignores."""
Facts = dict[str, Any]
TABLE_RUN = (
    "train.steps=6", "train.epochs=null", "train.batch_size=16", "monitor.tensorboard=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(compose_tiny(cache, *RUN), folder).status == "done"
    return folder


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., Facts]:
    """Call the command, and return its facts."""

    def ask(*words: str) -> Facts:
        capsys.readouterr()
        assert without([*words, "--json"]) == 0
        facts: Facts = json.loads(capsys.readouterr().out)
        return facts

    return ask


def find_late_row(run_dir: Path) -> tuple[int, int]:
    """Return the row of the first epoch that is read last, and the steps before."""
    with open_replay(run_dir, make_silent_reporter()) as replay:
        order = replay.opened.dataset.train_order
        batch = order.batches(order.steps_per_epoch - 1, 1)
        labels = np.asarray(replay.opened.dataset.train.columns["label"])
        row = next(int(row) for row in batch.rows[0] if labels[row] != IGNORED)
        assert find_first_step(replay.opened.dataset, np.array([row]), 12) == (
            order.steps_per_epoch - 1
        )
        return row, order.steps_per_epoch - 1


def compute_loss_without(run_dir: Path, row: int, step: int) -> float:
    """Return the mean cross entropy of the other samples of the batch after `step` steps, by numpy
    from the outputs of the state before it."""
    with open_replay(run_dir, make_silent_reporter()) as replay:
        opened = replay.opened
        state, batch = replay.go_to(step), opened.batch(step)
    config = opened.built.step_config
    outputs, labels = predict(config, get_evaluated_weights(config, state), batch)
    logits = np.asarray(outputs, np.float64)
    picked = logits[np.arange(len(logits)), np.asarray(labels)]
    losses = np.log(np.exp(logits).sum(axis=1)) - picked
    kept = np.asarray(batch.sample) % len(opened.dataset.train) != row
    assert kept.sum() == len(kept) - 1
    return float(losses[kept].mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.accumulate_steps=2", "optimizer=adam"),
        ("parallel.mode=data", "parallel.devices=1", "parallel.shards=2"),
        ("train.loss.hardest_share=0.5", "train.ema.decay=0.9"),
        (f"dataset.ignore_index={IGNORED}", "train.loss.reduction=sum"),
        (
            "model=layers",
            "model.layers=[flatten,{name: dense, features: 8},batch_norm,{name: dropout, rate: "
            "0.5},{name: dense, features: '$classes'}]",
        ),
    ],
    ids=" ".join,
)
def test_bits_are_those_of_training_without_from_the_start(
    cache: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    network = () if overrides[:1] == ("model=layers",) else MLP
    recipe = compose_tiny(cache, *network, *RUN[len(MLP) :], *overrides)
    run(recipe, tmp_path / "run")
    row, first = find_late_row(tmp_path / "run")
    with open_replay(tmp_path / "run", make_silent_reporter()) as replay:
        result = compute_counterfactual(replay, np.array([row]), 12)
    assert (result.first, result.saved_steps) == (first, first)
    run(make_recipe(recipe, np.array([row])), tmp_path / "oracle")
    expected = read_checkpoint(make_checkpoint_path(tmp_path / "oracle" / FOLDER, 12)).arrays
    actual = flatten_by_path(result.other)
    assert actual.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(actual[path], array, err_msg=path)
    ours = flatten_by_path(result.state.params)
    assert any((np.asarray(leaf) != actual[f"params/{path}"]).any() for path, leaf in ours.items())
    logged = json.loads((tmp_path / "oracle" / "summary.json").read_text())["metrics"]
    assert result.other_metrics["loss"] == logged["loss"]
    if not overrides:
        losses = [line.fields["loss"] for line in read_lines(tmp_path / "oracle" / "metrics.jsonl")]
        expected_loss = compute_loss_without(tmp_path / "run", row, first)
        np.testing.assert_allclose(losses[first], expected_loss, rtol=1e-5)


def test_rows_are_ranges_files_and_conditions(
    trained: Path, tmp_path: Path, ask: Callable[..., Facts]
) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("4\n\n7-9\n")
    facts = ask("4,7-9", str(trained))
    assert facts["rows"] == [4, 7, 8, 9]
    assert ask(str(file), str(trained)) == facts
    with open_replay(trained, make_silent_reporter()) as replay:
        labels = np.asarray(replay.opened.dataset.train.columns["label"])
    name = str(labels[0])
    facts = ask(str(trained), "--where", f"label == {name}")
    assert facts["rows"] == np.flatnonzero(labels == labels[0]).tolist()
    facts = ask(str(trained), "--where", "label>=8")
    assert facts["rows"] == np.flatnonzero(labels >= 8).tolist()
    assert facts["metrics"] != facts["metrics_without"]


@pytest.fixture(scope="module")
def table(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table whose classes are named 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("table")
    rows = [f"{number % 3 + number / 100},{number % 3 + 1}" for number in range(60)]
    (folder / "t.csv").write_text("age,kind\n" + "\n".join(rows) + "\n")
    data = ("dataset=csv", f"dataset.root={folder / 't.csv'}", "dataset.target=kind")
    recipe = load_recipe("lenet5_digits", (*data, *MLP, *TABLE_RUN))
    assert run(recipe, folder / "run").status == "done"
    return folder / "run"


@pytest.mark.parametrize(("name", "number"), [("1", 0), ("2", 1), ("'3'", 2)])
def test_class_is_named_before_it_is_numbered(
    table: Path,
    ask: Callable[..., Facts],
    name: str,
    number: int,
) -> None:
    with open_replay(table, make_silent_reporter()) as replay:
        split = replay.opened.dataset.train
        labels = np.asarray(split.columns["label"][:])
    rows = split.list_rows()[np.flatnonzero(labels == number)]
    assert len(rows)
    facts = ask(str(table), "--where", f"label == {name}")
    assert facts["rows"] == sorted(rows.tolist())
    assert facts["classes"] == [name.strip("'")]


@pytest.mark.parametrize("condition", ["label == 0", "label >= 2", "label != 4", "label == cat"])
def test_number_of_a_class_with_another_number_as_name_is_refused(
    table: Path, condition: str
) -> None:
    text = "classes have numbers as names, so must be == or != one of 1, 2, 3"
    with pytest.raises(UsageError, match=text):
        without([str(table), "--where", condition])


def test_column_of_a_table_is_refused_with_what_to_do(table: Path) -> None:
    text = "there is no column age; the columns are features, label; a table's own are numbers in"
    with pytest.raises(UsageError, match=text):
        without([str(table), "--where", "age > 1"])


def test_row_that_no_step_read_changes_nothing(
    cache: Path, tmp_path: Path, ask: Callable[..., Facts]
) -> None:
    run_dir = tmp_path / "run"
    run(compose_tiny(cache, *RUN, "train.end_step=1"), run_dir)
    with open_replay(run_dir, make_silent_reporter()) as replay:
        dataset = replay.opened.dataset
        read = dataset.train_order.batches(0, 1).rows.ravel()
        absent = np.setdiff1d(np.arange(len(dataset.train)), read)[:2]
    facts = ask(",".join(map(str, absent)), str(run_dir))
    assert (facts["first_step"], facts["saved_steps"]) == (None, 1)
    assert facts["metrics"] == facts["metrics_without"]
    assert facts["weights_moved_by"] == 0


def test_changed_predictions_are_counted() -> None:
    """Of classes, those with another largest output; of a forecast's times, any other bits."""
    outputs = np.array([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6]], np.float32)
    other = np.array([[0.2, 0.8], [0.3, 0.7], [0.4, 0.6]], np.float32)
    state: Any = jax.tree.map(np.asarray, {})
    for has_classes, changed in [(True, [1]), (False, [0, 1])]:
        result = Counterfactual(1, 0, state, state, {}, {}, outputs, other, has_classes)
        assert result.find_changed().tolist() == changed


@pytest.mark.slow
def test_changed_forecasts_are_counted_by_bits(
    tmp_path: Path, ask: Callable[..., Facts], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{hour},{np.sin(hour / 3) + 0.1 * np.cos(hour * 1.7):.4f}" for hour in range(200)]
    (tmp_path / "s.csv").write_text("t,v\n" + "\n".join(lines) + "\n")
    recipe = load_recipe(
        "forecast_linear",
        (
            "dataset.package=null", f"dataset.root={tmp_path / 's.csv'}", "dataset.time_column=t",
            "train.steps=20", "train.epochs=null", "monitor.tensorboard=false",
        ),
    )  # fmt: skip
    run(recipe, tmp_path / "run")
    facts = ask("0-20", str(tmp_path / "run"))
    assert facts["weights_moved_by"] > 0
    assert len(facts["changed_predictions"]) > 0
    without(["0-20", str(tmp_path / "run")])
    text = " ".join(capsys.readouterr().out.split())
    assert "evaluation samples have outputs of other bits; weights move by" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["999999"], "row 999999: not in the training split"),
        (["x"], "x: must be numbers and ranges such as 3,17,40-59, not 'x', or a file with them"),
        (["3-1"], "must not end before its first number"),
        (["--where", "label = 7"], "must be COLUMN == VALUE"),
        (["--where", "shade == 7"], "there is no column shade; the columns are image, label"),
        (["--where", "image == 7"], "image has several numbers for each sample"),
        (["--where", "label == seven"], "'seven' isn't a number or a class"),
        (["--where", "label == 77"], "holds for no training sample"),
        (["--where", "label >= 0"], "are all training samples"),
        ([], "must be ROWS RUN_DIR, or RUN_DIR --where CONDITION"),
        (["3", "--where", "label == 1"], "must be ROWS RUN_DIR, or RUN_DIR --where CONDITION"),
    ],
)
def test_wrong_rows_are_refused(trained: Path, words: list[str], text: str) -> None:
    position = 1 if words and not words[0].startswith("--") else 0
    arguments = [*words[:position], str(trained), *words[position:]]
    with pytest.raises(PipelineError, match=re.escape(text)) as caught:
        without(arguments)
    assert caught.value.exit_status == 2


def test_sample_that_others_are_mixed_with_is_refused(cache: Path) -> None:
    """A partner's image has a part of it, whatever it weighs."""
    ops = f"dataset.train.ops={OPS[:-1]},{{name: mix_up}}]"
    recipe = compose_tiny(cache, *RUN, ops)
    with pytest.raises(RecipeError, match=r"dataset.train.ops.2 \(mix_up\): must be another op"):
        make_recipe(recipe, np.array([3]))


def test_rows_of_the_evaluation_split_are_refused(cache: Path, tmp_path: Path) -> None:
    """With folds, rows of the held-out fold are in no batch."""
    run_dir = tmp_path / "run"
    run(compose_tiny(cache, *RUN, "dataset.folds.count=4", "dataset.folds.index=1"), run_dir)
    with open_replay(run_dir, make_silent_reporter()) as replay:
        trained_rows = replay.opened.dataset.train.list_rows()
    held_out = np.setdiff1d(np.arange(trained_rows.max()), trained_rows)[0]
    with pytest.raises(DataError, match=f"row {held_out}: not in the training split"):
        without([str(held_out), str(run_dir)])


@pytest.mark.slow
def test_documented_commands_run(
    trained: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "without.md").read_text()
    lines = re.findall(r"^    python -m pipeline ([^#\n]*)", text, re.MULTILINE)
    assert len(lines) == 4
    shutil.copytree(trained, tmp_path / "outputs" / "again")
    (tmp_path / "rows.txt").write_text("5\n8-9\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    assert [main(shlex.split(line)) for line in lines] == [0] * 4


@pytest.mark.parametrize("ignored", [-1, 255])
def test_ignored_label_has_no_name(ignored: int) -> None:
    evaluated = Split({"label": np.full(5, ignored, np.int32)})
    dataset: Any = SimpleNamespace(
        targets=Targets(("a", "b", "c")), classes=("a", "b", "c"), eval=evaluated
    )
    outputs = np.eye(3, dtype=np.float32)[[0, 0, 0, 0, 0]]
    other = np.eye(3, dtype=np.float32)[[0, 0, 0, 1, 0]]
    state: Any = None
    result = Counterfactual(1, 0, state, state, {}, {}, outputs, other, has_classes=True)
    assert list(format_changed(result, dataset))[1].split() == ["3", "a", "b"]
