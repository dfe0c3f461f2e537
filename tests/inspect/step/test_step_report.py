"""The command `step`: what it says about steps of runs, and its bundles."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe, run
from pipeline.core.errors import DataError, UsageError
from tests.command_line import step
from tests.conftest import MLP, compose_tiny

SHORT = ("train.steps=8", "train.sink_size=4", "checkpoint.every_steps=4")
OUTLIER = "12000"
"""A value of a cell; all others are below 1."""


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    keys = (*MLP, *SHORT, "train.clip.norm=0.01", "train.precision=O2", "train.accumulate_steps=2")
    run(compose_tiny(cache, *keys), folder)
    return folder


def read_facts(args: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> Any:
    capsys.readouterr()
    assert step([*args, "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.medium
@pytest.mark.parametrize("number", [1, 5, 7, 8])
def test_step_has_the_record_of_the_run(
    trained: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = read_facts([str(trained), str(number)], capsys)
    logged = json.loads((trained / "metrics.jsonl").read_text().splitlines()[number - 1])
    assert facts["run_loss"] == logged["loss"]
    for name in ("loss", "grad_norm", "learning_rate", "loss_scale"):
        # None is not finite.
        np.testing.assert_equal(np.float32(facts[name]), np.float32(logged[name]), name)
    assert facts["epoch"] == logged["epoch"]
    assert facts["approximate"] == []
    shares = [row["loss_share"] for row in facts["samples"]]
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert "accumulation" in facts["features"]
    assert ("skipped" in logged) == (facts["grad_norm"] is None) == (number < 6)
    if number < 6:
        assert "no update: the gradient overflows, and the loss scale falls" in facts["features"]
        return
    assert sum(row["gradient_share"] for row in facts["samples"]) == pytest.approx(1, abs=1e-2)
    norm = np.sqrt(sum(row["gradient_norm"] ** 2 for row in facts["layers"]))
    assert norm == pytest.approx(facts["grad_norm"], rel=1e-2)
    assert all(row["learning_rate"] == facts["learning_rate"] for row in facts["layers"])
    assert "times train.clip.norm = 0.01" in "; ".join(facts["features"])


@pytest.mark.medium
def test_bundle_repeats_the_step_without_its_run(
    trained: Path,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    bundle = tmp_path / "my bundle"
    typed = ["pipeline", "--plugin", "my parts.py", "step"]
    monkeypatch.setattr("sys.orig_argv", typed)
    assert step([str(run_dir), "6", f"--out={tmp_path / 'first'}"]) == 0
    again_line = f"again: python -m pipeline --plugin 'my parts.py' step {tmp_path / 'first'}"
    assert again_line in " ".join(capsys.readouterr().out.split())
    shutil.rmtree(tmp_path / "first")
    facts = read_facts([str(run_dir), "6", f"--out={bundle}"], capsys)
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert len((bundle / "samples.csv").read_text().splitlines()) == len(facts["samples"]) + 1
    shutil.rmtree(run_dir)
    again = read_facts([str(bundle)], capsys)
    assert again["samples"] == facts["samples"]
    assert again["same"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my bundle"]
    arrays = dict(np.load(bundle / "arrays.npz"))
    name = next(name for name in arrays if name.endswith("kernel"))
    arrays[name] = arrays[name] * 2
    np.savez(bundle / "arrays.npz", **arrays)
    assert read_facts([str(bundle)], capsys, 1)["same"] is False
    document = json.loads((bundle / "step.json").read_text())
    document["facts"]["samples"][0].pop("label")
    (bundle / "step.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="does not describe a step"):
        step([str(bundle)])


@pytest.mark.medium
def test_step_of_changed_data_is_refused_or_marked(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    file = run_dir / "provenance.json"
    tree = json.loads(file.read_text())
    tree["processes"][0]["data"]["train"]["image"]["sha256"] = "0" * 64
    file.write_text(json.dumps(tree))
    with pytest.raises(DataError, match="the data have changed"):
        step([str(run_dir), "6", f"--out={tmp_path / 'bundle'}"])
    assert not (tmp_path / "bundle").exists()
    capsys.readouterr()
    assert step([str(run_dir), "6", "--approximate"]) == 0
    printed = capsys.readouterr().out
    for stage in ("step", "record", "features"):
        assert re.search(rf"^{stage} +approximate: ", printed, re.MULTILINE), stage
    assert re.search("^approximate: layers", printed, re.MULTILINE)
    assert re.search("^approximate: 16 samples", printed, re.MULTILINE)


@pytest.mark.medium
def test_outlier_of_a_table_is_first_with_its_line(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(3)
    x = rng.uniform(size=(64, 3)).round(4)
    lines = [f"{a},{b},{c},{'yes' if a + b > c else 'no'}" for a, b, c in x]
    lines[40] = f"{OUTLIER},0.5,0.5,no"
    file = tmp_path / "rows.csv"
    file.write_text("a,b,c,label\n" + "\n".join(lines) + "\n")
    run_dir = tmp_path / "run"
    data = ("dataset=csv", f"dataset.root={file}", "dataset.target=label", "dataset.split=0.1")
    keys = [*data, *MLP, "train.batch_size=8", f"cache.root={cache}", *SHORT]
    run(load_recipe(overrides=[*keys, "dataset.standardise=false"]), run_dir)
    places = []
    for number in range(1, 8):
        facts = read_facts([str(run_dir), str(number)], capsys)
        for row in facts["samples"]:
            name, _, place = row["place"].rpartition(", line ")
            assert name == str(file)
            assert lines[int(place) - 2].endswith(row["label"])
        places.append(facts["samples"][0]["place"])
        samples = [row["place"] for row in facts["samples"]]
        if f"{file}, line 42" in samples:
            assert samples[0] == f"{file}, line 42"
    assert f"{file}, line 42" in places


@pytest.mark.slow
def test_bundle_of_padded_texts_has_their_bucket_and_lines(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["model.features=8", "model.hidden=8", "model.heads=2", "model.blocks=1"]
    keys = [*small, "train.epochs=null", "train.batch_size=4", f"cache.root={cache}", *SHORT]
    stages = "stages=[data,build,compile,train,checkpoint]"
    run(load_recipe("bert_docstrings", [*keys, stages]), tmp_path / "run")
    bundle = tmp_path / "bundle"
    facts = read_facts([str(tmp_path / "run"), "3", f"--out={bundle}"], capsys)
    for row in facts["samples"]:
        file, _, line = row["place"].rpartition(", line ")
        with Path(file).open(newline="") as opened:
            reader = csv.DictReader(opened)
            ends = [(reader.line_num, fields) for fields in reader]
        assert row["label"] in dict(ends)[int(line.replace(",", ""))].values()
    again = read_facts([str(bundle)], capsys)
    assert again["samples"] == facts["samples"]


def test_bad_input_has_one_message(trained: Path, tmp_path: Path) -> None:
    for args, error, message in [
        ([], UsageError, "name the step of a run, RUN_DIR N"),
        (["9"], DataError, "step 9: must be from 1 to 8"),
        (["0"], UsageError, "must be a whole number from 1"),
        (["x"], UsageError, "must be a whole number from 1"),
        (["3", f"--out={trained}"], DataError, "must be an empty folder"),
    ]:
        with pytest.raises(error, match=message):
            step([str(trained), *args])
    with pytest.raises(DataError, match="there is no such run"):
        step([str(tmp_path / "none"), "3"])
    (tmp_path / "step.json").write_text("{}")
    with pytest.raises(UsageError, match="is the bundle of a step"):
        step([str(tmp_path), "3"])
