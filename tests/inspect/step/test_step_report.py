"""The command `step`: what it says about steps of runs, and its bundles.

Terms and gradients of single samples, compared with formulas in numpy.
"""

from __future__ import annotations

import csv
import errno
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe, run
from pipeline.core.errors import DataError, RunError, UsageError
from pipeline.data.batch import Batch
from pipeline.inspect.autopsy.on_failure import write_inputs
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, open_recipe
from pipeline.inspect.step import step_bundle
from pipeline.inspect.step.step_bundle import write_bundle
from pipeline.inspect.step.step_report import SampleShares, measure_samples
from tests.command_line import step
from tests.conftest import MLP, compose_tiny

SHORT = ("train.steps=8", "train.sink_size=4", "checkpoint.every_steps=4")
OUTLIER = "12000"
"""A value of a cell; all others are below 1."""
LINEAR = ("model=layers", "model.layers=[flatten,{name: dense, features: '$classes'}]")
"""Softmax regression, whose gradients have a formula."""


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


@pytest.mark.medium
def test_bundle_that_cannot_be_written_leaves_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(*arguments: Any) -> None:
        write_inputs(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(step_bundle, "write_inputs", fill_disk)
    with pytest.raises(RunError, match=r"bundle: can't be written: No space left on device"):
        step([str(trained), "5", "--out", str(tmp_path / "bundle")])
    assert list(tmp_path.iterdir()) == []


def test_bundle_keeps_what_another_process_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that began with an empty folder: the second is refused, and removes nothing."""

    def write(folder: Path) -> None:
        nothing: Any = None
        write_bundle(folder, tmp_path, nothing, nothing, nothing, {"samples": [{"sample": 1}]})

    def write_beside(folder: Path, *_: Any) -> None:
        (folder / "step.json").write_text("first")
        with pytest.raises(RunError, match=r"bundle: another process is writing a bundle there"):
            write(folder)

    monkeypatch.setattr(step_bundle, "write_inputs", write_beside)
    write(tmp_path / "bundle")
    with pytest.raises(DataError, match="must be an empty folder"):
        write(tmp_path / "bundle")
    names = {path.name for path in (tmp_path / "bundle").iterdir()}
    assert names == {"samples.csv", "step.json"}


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


def open_linear(cache: Path, *overrides: str) -> OpenedRecipe:
    return open_recipe(compose_tiny(cache, *LINEAR, "train.loss.smoothing=0", *overrides))


def measure(opened: OpenedRecipe, batch: Batch | None = None) -> SampleShares:
    config = opened.built.step_config
    return measure_samples(config, opened.fresh_state(), batch or opened.batch(0))


def compute_in_numpy(opened: OpenedRecipe) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of the first batch, (B,), and their gradients, (B, weights)."""
    batch = opened.batch(0)
    ops = opened.built.step_config.train_ops
    from pipeline.data.transform import apply_ops

    columns = apply_ops(np, ops, batch.columns, batch.seed, batch.epoch, batch.sample)
    x = np.asarray(columns["image"], np.float64).reshape(len(batch.sample), -1)
    labels = np.asarray(columns["label"])
    params = opened.fresh_state().params["dense_0"]
    logits = x @ np.asarray(params["kernel"], np.float64) + np.asarray(params["bias"], np.float64)
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    errors = probabilities - np.eye(logits.shape[1])[labels]
    losses = -np.log(probabilities[np.arange(len(labels)), labels])
    kernels = x[:, :, None] * errors[:, None, :]
    return losses, np.concatenate([errors, kernels.reshape(len(x), -1)], axis=1)


@pytest.mark.medium
@pytest.mark.parametrize("overrides", [(), ("train.accumulate_steps=2",)])
def test_terms_and_gradients_equal_formulas(cache: Path, overrides: tuple[str, ...]) -> None:
    opened = open_linear(cache, *overrides)
    shares = measure(opened)
    losses, gradients = compute_in_numpy(opened)
    mean = gradients.mean(0)
    np.testing.assert_allclose(shares.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(shares.loss_shares, losses / losses.sum(), rtol=1e-5)
    norms = np.linalg.norm(gradients, axis=1) / len(losses)
    np.testing.assert_allclose(shares.gradient_norms, norms, rtol=1e-4)
    products = gradients @ mean / len(losses) / (mean @ mean)
    np.testing.assert_allclose(shares.gradient_shares, products, atol=1e-5)
    expected = [np.delete(losses, n).mean() for n in range(len(losses))]
    np.testing.assert_allclose(shares.other_losses, expected, rtol=1e-5)
    assert shares.are_finite.all()
    assert shares.loss == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.medium
def test_sum_and_hardest_samples_have_their_terms(cache: Path) -> None:
    losses, _ = compute_in_numpy(open_linear(cache))
    summed = measure(open_linear(cache, "train.loss.reduction=sum"))
    np.testing.assert_allclose(summed.terms, losses, rtol=1e-5)
    np.testing.assert_allclose(summed.other_losses, losses.sum() - losses, rtol=1e-5)
    hardest = measure(open_linear(cache, "train.loss.hardest_share=0.25"))
    hardest_rows = np.argsort(-losses)[: len(losses) // 4]
    expected = np.zeros(len(losses))
    expected[hardest_rows] = losses[hardest_rows] / losses[hardest_rows].sum()
    np.testing.assert_allclose(hardest.loss_shares, expected, rtol=1e-5)
    assert (hardest.gradient_norms[expected == 0] == 0).all()
    assert (hardest.gradient_norms[hardest_rows] > 0).all()
    assert set(hardest.rank()[: len(hardest_rows)]) == set(hardest_rows)


def _replace_image(batch: Batch, position: int, value: Any) -> Batch:
    images = np.asarray(batch.columns["image"], np.float32)
    images[position] = value
    return replace(batch, columns={**batch.columns, "image": images})


@pytest.mark.medium
def test_samples_that_are_not_finite_are_first(cache: Path) -> None:
    opened = open_linear(cache)
    shares = measure(opened, _replace_image(opened.batch(0), 5, np.nan))
    assert shares.rank()[0] == 5
    assert np.flatnonzero(~shares.are_finite).tolist() == [5]
    assert np.isfinite(shares.other_losses[5])
    # The loss is finite, and the squares of its gradient overflow.
    shares = measure(opened, _replace_image(opened.batch(0), 7, 1e30))
    assert np.isfinite(shares.terms).all()
    assert np.flatnonzero(~shares.are_finite).tolist() == [7]
    assert shares.rank()[0] == 7


@pytest.mark.medium
def test_padding_has_no_row(cache: Path) -> None:
    opened = open_linear(cache)
    batch = replace(opened.batch(0), count=np.int32(10))
    shares = measure(opened, batch)
    losses, gradients = compute_in_numpy(opened)
    np.testing.assert_allclose(shares.loss_shares, losses[:10] / losses[:10].sum(), rtol=1e-5)
    norms = np.linalg.norm(gradients[:10], axis=1) / 10
    np.testing.assert_allclose(shares.gradient_norms, norms, rtol=1e-4)
