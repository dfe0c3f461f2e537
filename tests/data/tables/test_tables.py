"""Tables from the recipe to predictions: figures, kills, sinks, exports, wrong files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe, run
from pipeline.api.trainer import Trainer
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.stages.record.summary import Summary
from pipeline.stages.record.trained_run import read_trained_run
from tests import outcome
from tests.command_line import convert_records, export, infer
from tests.conftest import ROOT
from tests.forked import start_forked

QUIET = ["monitor.tensorboard=false", "monitor.loss_every=0"]
FIGURES = json.loads((ROOT / "tests" / "golden" / "tables.json").read_text())
SMALL = [
    "dataset=csv",
    "model=mlp",
    "model.hidden=[8]",
    "optimizer=adam",
    "schedule=constant",
    "train.optimizer.lr=0.01",
    "train.batch_size=16",
]


def compose(cache: Path, *overrides: str, name: str | None = None) -> Recipe:
    given = [*QUIET, f"cache.root={cache}", *overrides]
    return load_recipe(name, given) if name else load_recipe(overrides=given)


def write_houses(file: Path, rows: int = 120) -> None:
    """Houses whose price follows from size and district; a few sizes are missing."""
    draw = np.random.default_rng(0)
    size, district = draw.uniform(40, 200, rows).round(1), draw.choice(["old", "new"], rows)
    price = 3000 * size + 50_000 * (district == "new") + draw.normal(0, 5000, rows)
    texts = ["" if n % 17 == 5 else str(value) for n, value in enumerate(size)]
    garden, garage = size > 100, district == "new"
    lines = [
        f"{a},{b},{c:.0f},{c / 1000:.3f},{d:d},{e:d}"
        for a, b, c, d, e in zip(texts, district, price, garden, garage, strict=True)
    ]
    file.write_text("\n".join(["size,district,price,rent,garden,garage", *lines]) + "\n")


@pytest.fixture
def houses(tmp_path: Path) -> Path:
    write_houses(tmp_path / "houses.csv")
    return tmp_path / "houses.csv"


def trained(folder: Path, cache: Path, houses: Path, *overrides: str) -> Summary:
    return run(compose(cache, *SMALL, f"dataset.root={houses}", *overrides), folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_regression_is_as_good_as_scikit_learn_golden(
    seed: int, cache: Path, tmp_path: Path
) -> None:
    summary = run(compose(cache, f"seed={seed}", name="diabetes_mlp"), tmp_path)
    figures, found = FIGURES["diabetes"], summary.metrics
    assert found["r2"] > figures["MLPRegressor"]["r2"]
    assert found["mae"] < 1.05 * figures["Ridge"]["mae"]
    assert found["rmse"] < 1.05 * figures["Ridge"]["rmse"]
    assert "accuracy" not in found


@pytest.mark.slow
def test_linear_network_matches_scikit_learn_golden(cache: Path, tmp_path: Path) -> None:
    """The same minimum, so the same errors in the units of the data: all else is as it should."""
    recipe = compose(
        cache,
        *("dataset=csv", "dataset.shipped=diabetes", "dataset.target=progression"),
        *("model=layers", "model.layers=[{name: dense, features: $classes}]", "loss=mse"),
        *("optimizer=adam", "schedule=cosine", "train.optimizer.lr=0.05", "train.steps=3000"),
        *("train.batch_size=354", "train.sink_size=1000"),
    )
    found = run(recipe, tmp_path).metrics
    for name, value in FIGURES["diabetes"]["LinearRegression"].items():
        assert found[name] == pytest.approx(value, rel=2e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("table", ["breast_cancer", "wine"])
def test_classification_is_as_good_as_scikit_learn_golden(
    table: str, cache: Path, tmp_path: Path
) -> None:
    target = {"breast_cancer": "diagnosis", "wine": "cultivar"}[table]
    own = [f"dataset.shipped={table}", f"dataset.target={target}"]
    summary = run(compose(cache, *own, name="breast_cancer_mlp"), tmp_path)
    # One sample less than the better of the two is within what another seed does.
    best = max(FIGURES[table].values())
    assert summary.metrics["accuracy"] > best - 1.5 / summary.metrics["count"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sinks"),
    [
        ("diabetes_mlp", ["sink_size=1", "sink_size=45"]),
        ("breast_cancer_mlp", ["sink_size=7", "sink=false"]),
    ],
)
def test_results_are_identical_at_any_sink_size(
    name: str, sinks: list[str], cache: Path, tmp_path: Path
) -> None:
    events = ["train.epochs=null", "train.steps=45", "eval.every_epochs=null"]
    events += ["eval.every_steps=12", "checkpoint.every_steps=20"]
    for number, sink in enumerate(sinks):
        run(compose(cache, *events, f"train.{sink}", name=name), tmp_path / str(number))
    outcome.assert_same_run(tmp_path / "0", tmp_path / "1")


@pytest.mark.slow
def test_killed_run_resumes_to_identical_results(
    cache: Path, tmp_path: Path, forked: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    length = ["train.epochs=null", "train.steps=600", "train.sink_size=10"]
    length += ["checkpoint.every_steps=50", "checkpoint.keep=20", "eval.every_epochs=null"]
    length += ["eval.every_steps=100", "+recipe=diabetes_mlp", *QUIET]
    assert forked([*length, f"hydra.run.dir={tmp_path / 'whole'}"]).returncode == 0
    killed = tmp_path / "killed"
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}
    process = start_forked(
        [*length, f"hydra.run.dir={killed}"], tmp_path, environment, [tmp_path / "said"] * 2
    )
    while (
        process.exitcode is None
        and not (make_checkpoint_path(killed / "checkpoints", 150)).exists()
    ):
        time.sleep(0.005)
    process.kill()
    process.join()
    assert not (killed / "summary.json").exists()
    said = forked([*length, f"train.resume={killed}"])
    assert said.returncode == 0, said.stderr
    outcome.assert_same_run(tmp_path / "whole", killed)


def answers(capsys: pytest.CaptureFixture[str], *args: str | Path) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert infer([*map(str, args), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_predictions_of_new_rows_are_in_data_units(
    houses: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the run, by its export and by the Trainer alike; errors of the run come out again."""
    options = ["dataset.target=[price,rent]", "loss=l1", "train.epochs=150", "dataset.split=0.25"]
    options += ["dataset.columns=[size,district]", "dataset.missing_indicators=true"]
    summary = trained(tmp_path / "run", cache, houses, *options)
    assert summary.metrics["r2"] > 0.8
    assert export([str(tmp_path / "run"), str(tmp_path / "export")]) == 0
    said = answers(capsys, tmp_path / "run", houses)
    for one, other in zip(said, answers(capsys, tmp_path / "export", houses), strict=True):
        assert one["file"] == other["file"]
        assert one["price"] == pytest.approx(other["price"], rel=1e-5)
    price = np.array([line.split(",")[2] for line in houses.read_text().splitlines()[1:]], float)
    read = read_trained_run(tmp_path / "run")
    raw = read.recipe.dataset.read(Path())
    evaluated = read.samples.targets.to_data_units(np.asarray(raw.eval.columns["label"]))[:, 0]
    rows = [int(np.argmin(np.abs(price - value))) for value in evaluated]
    errors = np.array([[said[row]["price"], said[row]["rent"]] for row in rows]) - np.stack(
        [price[rows], price[rows] / 1000], axis=1
    )
    assert np.abs(errors).mean() == pytest.approx(summary.metrics["mae"], rel=1e-3)
    table = read.samples.table
    assert table is not None
    assert [column.indicator for column in table.numeric] == [True]
    trainer = Trainer.load(tmp_path / "run")
    logits = trainer.predict(np.asarray(raw.eval.columns["features"]))
    assert logits.shape == (len(rows), 2)
    # New rows: other columns, another order, a district that nobody has seen, a size unknown.
    (tmp_path / "new.csv").write_text("district,note,size\nnew,x,100\nharbour,y,100\nold,z,\n")
    new, unseen, unknown = answers(capsys, tmp_path / "run", tmp_path / "new.csv")
    assert new["price"] == pytest.approx(350_000, rel=0.15)
    assert all(np.isfinite(one["price"]) for one in (unseen, unknown))
    capsys.readouterr()
    infer([str(tmp_path / "run"), str(tmp_path / "new.csv")])
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{tmp_path}/new.csv[0]: price 3")


@pytest.mark.slow
def test_several_flag_columns_are_multi_label(
    houses: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["dataset.target=[garden,garage]", "dataset.ignored=[price,rent]"]
    best = ["checkpoint.best=micro_f1", "eval.every_epochs=5"]
    options = [*labels, *best, "loss=binary_cross_entropy", "train.epochs=40"]
    summary = trained(tmp_path / "run", cache, houses, *options)
    assert summary.metrics["micro_f1"] > 0.9
    assert {"exact_match", "macro_f1", "loss"} <= set(summary.metrics)
    (tmp_path / "new.csv").write_text("size,district\n190,new\n50,old\n")
    both, none = answers(capsys, tmp_path / "run", tmp_path / "new.csv")
    assert {one["class"] for one in both["labels"]} == {"garden", "garage"}
    assert none["labels"] == []


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["huber", "quantile"])
def test_every_regression_loss_trains(loss: str, houses: Path, cache: Path, tmp_path: Path) -> None:
    """Metrics of numbers decide what is kept, when training stops and when a rate falls.

    Tests below train with l1 (predictions) and mse (wide_deep).
    """
    options = ["dataset.target=price", "dataset.ignored=[rent]", f"loss={loss}"]
    options += ["train.epochs=30", "eval.every_epochs=2", "checkpoint.best=rmse"]
    options += ["monitor.early_stop.metric=mae", "monitor.early_stop.patience=3"]
    options += ["train.callbacks=[{name: reduce_on_plateau, metric: r2}]"]
    summary = trained(tmp_path / "run", cache, houses, *options)
    assert summary.metrics["r2"] > 0.9
    evals = outcome.read_lines(tmp_path / "run" / "evals.jsonl")
    best = min(evals, key=lambda line: line["rmse"])
    assert best["step"] in outcome.checkpoints(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "loss", "metric"),
    [("garage", "cross_entropy", "accuracy"), ("price", "mse", "r2")],
)
def test_wide_deep_vocabulary_comes_from_the_table(
    target: str,
    loss: str,
    metric: str,
    houses: Path,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = ["model=wide_deep", "model.vocabulary=null", "model.embedding=4", "model.hidden=[16]"]
    data = [f"dataset.target={target}", "dataset.columns=[size,district]", f"loss={loss}"]
    arguments = [*own, *data, f"dataset.root={houses}", "train.epochs=60"]
    skipped = [one for one in SMALL if not one.startswith("model")]
    summary = run(compose(cache, *skipped, *arguments), tmp_path / "run")
    assert summary.metrics[metric] > 0.9
    arrays = outcome.arrays(tmp_path / "run")
    assert arrays["params/wide"].shape == (3, 1)
    (tmp_path / "new.csv").write_text("size,district\n100,new\n100,harbour\n")
    assert len(answers(capsys, tmp_path / "run", tmp_path / "new.csv")) == 2


def refused(cache: Path, folder: Path, *overrides: str) -> str:
    with pytest.raises((RecipeError, DataError)) as error:
        run(compose(cache, *SMALL, *overrides, "train.steps=2"), folder / "run")
    assert error.value.exit_status == 2
    return str(error.value).splitlines()[-1].strip()


@pytest.mark.slow
def test_recipes_unfit_for_the_table_are_refused(houses: Path, cache: Path, tmp_path: Path) -> None:
    root, price = f"dataset.root={houses}", "dataset.target=price"

    def said(*overrides: str) -> str:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return refused(cache, tmp_path, *overrides)

    assert "dataset.target: missing; it must be the name of the column" in said(root)
    assert "root: missing; it must be a CSV file; dataset.shipped" in said(price)
    assert said(root, "dataset.target=prise") == (
        f"{houses}: has no column prise; did you mean price? it has size, district, price, rent, "
        "garden, garage (dataset.target)"
    )
    expected = (
        "train.loss = cross_entropy: must be one for regression: auto, gamma, huber, "
        "l1, mse, poisson, quantile, squared_log; "
        "as in loss=mse"
    )
    assert said(root, price) == expected
    two = "dataset.target=[price,rent]"
    wide = ["model=wide_deep", "model.vocabulary=null", "model.hidden=[8]", "loss=mse"]
    assert "predicts classes, or one number or label, not 2 numbers" in refused_model(
        cache, tmp_path, [root, two, *wide]
    )
    few = [root, "dataset.target=garage", *wide[:1], "model.vocabulary=2", "model.hidden=[8]"]
    expected = "vocabulary = 2: must be null, or at least the 6 features of the table"
    assert expected in refused_model(cache, tmp_path, few)
    images = ["dataset=digits", *wide[:3]]
    expected = "the network reads field_index, field_value: there is no column 'field_index'"
    assert expected in refused_model(cache, tmp_path, images)


def refused_model(cache: Path, folder: Path, overrides: Sequence[str]) -> str:
    shutil.rmtree(folder / "run", ignore_errors=True)
    skipped = [one for one in SMALL if not one.startswith(("model", "dataset"))]
    data = [] if "dataset=digits" in overrides else ["dataset=csv"]
    with pytest.raises(RecipeError) as error:
        run(compose(cache, *data, *skipped, *overrides, "train.steps=2"), folder / "run")
    return str(error.value)


def test_records_of_a_table_are_refused(houses: Path, cache: Path, tmp_path: Path) -> None:
    given = ["dataset=csv", f"dataset.root={houses}", "dataset.target=price", "model=mlp"]
    with pytest.raises(
        RecipeError, match="dataset = csv: records can't hold the columns of a table"
    ):
        convert_records([str(tmp_path / "out"), *given, f"cache.root={cache}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.medium
def test_network_of_images_describes_its_input(houses: Path, cache: Path, tmp_path: Path) -> None:
    data = [f"dataset.root={houses}", "dataset.target=garage", "model=lenet5"]
    expected = r"model lenet5: conv_0: shape .*; must be images \(batch, height, width, channels\)"
    assert re.match(expected, refused_model(cache, tmp_path, data).splitlines()[-1].strip())


@pytest.mark.slow
def test_weights_for_other_columns_are_reported(houses: Path, cache: Path, tmp_path: Path) -> None:
    """The shapes fit, and the numbers mean something else."""
    own = ["dataset.target=price", "loss=mse", "train.steps=3"]
    trained(tmp_path / "first", cache, houses, *own)
    restore = [*own, f"checkpoint.restore={tmp_path / 'first'}"]
    trained(tmp_path / "same", cache, houses, *restore)
    write_houses(tmp_path / "more.csv", rows=150)
    trained(tmp_path / "other", cache, tmp_path / "more.csv", *restore)
    said = "was trained on columns with other means, deviations or categories"
    assert said not in (tmp_path / "same" / "run.log").read_text()
    assert said in (tmp_path / "other" / "run.log").read_text()
