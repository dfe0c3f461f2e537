"""Whole runs of the recipe for tables: sinks, resume, prediction, exports, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.api.trainer import Trainer
from pipeline.config.compose import load_recipe
from pipeline.core.errors import RecipeError
from pipeline.stages.export.onnx.onnx_export import make_onnx_model
from pipeline.stages.export.prediction import make_predict, read_network
from tests import outcome
from tests.command_line import infer
from tests.whole_run import run

SMALL = (
    *("model.hidden=[6]", "model.members=3", "model.frequencies=2", "model.one_hot_up_to=2"),
    "model.bins=4",
    *("train.batch_size=16", "train.epochs=2", "monitor.tensorboard=false"),
)
GENERATOR = np.random.default_rng(4)


def write_table(folder: Path) -> Path:
    """A table of numbers with gaps, categories, a class, a count and a price."""
    lines = ["size,kind,colour,class,count,price"]
    for row in range(150):
        size = GENERATOR.normal()
        kind, colour = "ab"[row % 2], ["red", "green", "blue", ""][row % 4]
        shown = "" if row % 11 == 0 else f"{size:.4f}"
        count, price = GENERATOR.poisson(np.exp(size)), np.exp(2 * size)
        name = "yes" if size > 0 else "no"
        lines.append(f"{shown},{kind},{colour},{name},{count},{price:.4f}")
    (folder / "mine.csv").write_text("\n".join(lines) + "\n")
    return folder / "mine.csv"


def keys(table: Path, target: str, *changes: str) -> list[str]:
    others = ",".join({"class", "count", "price"} - {target})
    found = [f"dataset.root={table}", f"dataset.target={target}", f"dataset.ignored=[{others}]"]
    return [*SMALL, *found, f"cache.root={table.parent / 'cache'}", *changes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("class", None),
        ("count", "loss: poisson, since count are counts; loss=NAME chooses another"),
        ("price", "loss: gamma, since price is positive and skewed"),
    ],
)
def test_run_predicts_and_exports(
    target: str, line: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path)
    changes = ["dataset.task=regression"] if target == "count" else []
    recipe = load_recipe("table", keys(table, target, *changes))
    run(recipe, tmp_path / "run")
    printed = capsys.readouterr().out
    assert line is None or line in printed
    assert (target == "class") == ("calibrate  temperature " in printed)
    trained = read_network([tmp_path / "run"])
    summary = outcome.read_summary(tmp_path / "run")
    expected = summary["calibration"]["temperature"] if target == "class" else 1
    assert trained.temperature == expected
    rows = np.zeros((5, 3), np.float32)
    rows[:, 0] = np.linspace(-2, 2, 5)
    rows[:, 1:] = [[0, 0], [1, 1], [2, 2], [1, 3], [2, 4]]
    logits = np.asarray(make_predict(trained)(trained.arrays, rows))
    onnxruntime = pytest.importorskip("onnxruntime")
    content = make_onnx_model(trained).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"features": rows})[0], logits, atol=1e-4)
    assert infer([str(tmp_path / "run"), str(table)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 150
    if target != "class":
        assert all(float(each.split()[-1]) >= 0 for each in lines)


@pytest.mark.slow
def test_sinks_and_a_resumed_run_have_the_same_bits(tmp_path: Path) -> None:
    table = write_table(tmp_path)

    def train(name: str, *changes: str, **options: Any) -> None:
        run(load_recipe("table", keys(table, "class", *changes)), tmp_path / name, **options)

    train("whole", "train.sink_size=-1")
    for name, size in (("ones", 1), ("sevens", 7)):
        train(name, f"train.sink_size={size}")
        outcome.assert_same_run(tmp_path / name, tmp_path / "whole")
    stopped = tmp_path / "stopped"
    recipe = load_recipe("table", keys(table, "class", "train.sink_size=3"))
    for report in Trainer(recipe, run_dir=stopped).sinks():
        if report.step >= 6:
            break
    assert outcome.read_summary(stopped)["steps"] < 14
    train("stopped", "train.sink_size=3", f"train.resume={stopped}")
    assert outcome.metrics(stopped) == outcome.metrics(tmp_path / "whole")
    outcome.assert_equal_arrays(outcome.arrays(stopped), outcome.arrays(tmp_path / "whole"))


@pytest.mark.medium
def test_feature_that_reads_one_output_is_refused(tmp_path: Path) -> None:
    table = write_table(tmp_path)
    recipe = load_recipe("table", keys(table, "class", "+train.ledger=true"))
    with pytest.raises(RecipeError, match=r"model\.members = 3: must be 1 with ledger"):
        run(recipe, tmp_path / "run")


@pytest.mark.medium
def test_data_that_are_no_table_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe("lenet5_digits", ["model=table"])
    with pytest.raises(RecipeError, match=r"model table: .*reads the rows of a table"):
        run(recipe, tmp_path / "run")
