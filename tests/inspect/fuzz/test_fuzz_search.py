"""Searches of small runs: mutants fool the network, again and within the radius."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.cli.runs import fuzz
from pipeline.config.compose import load_recipe
from pipeline.core.errors import DataError, RecipeError, RunError
from pipeline.data.columns import IMAGES, ColumnSpec
from pipeline.data.targets import Targets
from pipeline.inspect.dumps.opened_recipe import make_silent_reporter, open_recipe
from pipeline.inspect.fuzz.fuzz_search import FuzzSearch, make_predict, require_fuzzable
from pipeline.inspect.fuzz.mutations import ChangeLimits
from pipeline.inspect.replay.open_at import replay_state
from pipeline.stages.record.trained_run import read_run_recipe
from pipeline.training.step import get_evaluated_weights
from tests.conftest import MLP
from tests.whole_run import run


@pytest.fixture(scope="module")
def trained_run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("fuzzed") / "run"
    length = ("train.steps=60", "checkpoint.every_steps=60", "monitor.tensorboard=false")
    digits = [*MLP, *length, "model.hidden=[32]", f"cache.root={cache}"]
    run(load_recipe("lenet5_digits", digits), run_dir)
    return run_dir


@pytest.mark.medium
def test_reported_mutants_fool_the_network(trained_run: Path) -> None:
    opened = open_recipe(read_run_recipe(trained_run), trained_run)
    state = replay_state(opened, trained_run, 60, make_silent_reporter())
    variables = get_evaluated_weights(opened.built.step_config, state)
    predict = make_predict(opened, 60)

    def predict_images(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return predict(variables, images)

    search = FuzzSearch(opened.dataset, predict_images, 1, ChangeLimits(0.2, 16))
    result = search.search(np.arange(40), 700)
    assert result.right + result.wrong == 40
    assert result.fooling
    images = np.stack([mutant.candidate.image for mutant in result.fooling])
    predicted = predict_images(images)[0].argmax(axis=1)
    labels = opened.dataset.eval.columns["label"][
        np.array([mutant.candidate.sample for mutant in result.fooling])
    ]
    assert (predicted != labels).all()
    for mutant, number, label in zip(result.fooling, predicted, labels, strict=True):
        assert mutant.predicted == number
        assert mutant.candidate.label == label
        assert mutant.distance <= 0.2
        assert mutant.candidate.changes.count("affine") <= 1
    assert result.coverage["multisection"] < result.coverage_with_mutants["multisection"]
    # A search repeats, and a shorter one is the beginning of a longer one.
    shorter = search.search(np.arange(40), 300)
    assert shorter.fooling
    for again, mutant in zip(shorter.fooling, result.fooling, strict=False):
        assert again.candidate.changes == mutant.candidate.changes
        assert np.array_equal(again.candidate.image, mutant.candidate.image)


@pytest.mark.slow
def test_command_writes_a_sheet_tables_and_facts(trained_run: Path, tmp_path: Path) -> None:
    result = fuzz.main(trained_run, 0.2, 30, 300, with_faults=True)
    folder = trained_run / "fuzz"
    facts = json.loads((folder / "fuzz.json").read_text())
    assert {**facts, "folder": str(folder)} == result.facts
    with open(folder / "fooling.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == facts["fooling"] > 0
    assert all(row["label"] != row["prediction"] for row in rows)
    assert len({row["sample"] for row in rows}) == facts["fooled_samples"]
    with Image.open(folder / "sheet.png") as picture:
        assert picture.size[0] > 100
    header = (folder / "faults.csv").read_text().splitlines()[0]
    assert header == "fault,count,accuracy,least"
    assert {row["fault"] for row in facts["faults"]} == {"bit flips", "zeros", "sign flips"}
    # Nothing of an earlier search stays.
    fuzz.main(trained_run, 0.0, 30, 1, with_faults=False)
    assert not (folder / "faults.csv").exists()
    fuzz.main(trained_run, 0.2, 30, 1, with_faults=False, out=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "fuzz.json").exists()


@pytest.mark.slow
def test_refusals(trained_run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="isn't a run directory"):
        fuzz.main(tmp_path, 0.1, 10, 10, with_faults=False)
    copy = tmp_path / "run"
    shutil.copytree(trained_run, copy)
    shutil.rmtree(copy / "fuzz", ignore_errors=True)
    (copy / "fuzz").symlink_to(tmp_path)
    with pytest.raises(DataError, match="is a link"):
        fuzz.main(copy, 0.1, 10, 10, with_faults=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't be written"):
        fuzz.main(trained_run, 0.1, 10, 10, with_faults=False, out=tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"text": "a tokenizer"}, "has tokens, whose changes would be other texts"),
        ({"table": "columns"}, "doesn't have images"),
        ({"raw_image": None}, "doesn't have images"),
        ({"raw_image": ColumnSpec((8, 8, 1), "float32")}, "has float32 of shape"),
        ({"raw_image": ColumnSpec((8, 8, 2), "uint8")}, "not bytes of 1 or 3 channels"),
        ({"targets": Targets(("a", "b"), "multi_label")}, "doesn't have one class"),
    ],
    ids=["text", "table", "series", "float", "channels", "labels"],
)
def test_inputs_without_pixels_are_refused(changed: dict[str, Any], problem: str) -> None:
    facts: dict[str, Any] = {"text": None, "table": None, "unit": IMAGES, "label_positions": ()}
    facts |= {"targets": Targets(("a", "b")), "raw_image": ColumnSpec((8, 8, 1), "uint8")}
    with pytest.raises(RecipeError, match=f"dataset = made up: .*{problem}"):
        require_fuzzable(SimpleNamespace(**{**facts, **changed}), "made up")  # type: ignore[arg-type]
