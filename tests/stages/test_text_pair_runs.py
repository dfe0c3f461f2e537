"""Runs of pairs of texts, classified or matched: sinks, devices, resume, infer, export, report."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, UsageError
from pipeline.data.text.text_columns import read_text_columns
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.record.trained_run import read_trained_run
from tests import outcome
from tests.command_line import export, infer, report
from tests.whole_run import run

WORDS = [f"word{number}" for number in range(17)]
SMALL = ["monitor.tensorboard=false", "train.batch_size=16", "train.epochs=null", "train.steps=24"]
SMALL += ["train.schedule.warmup_epochs=0.0", "train.sink_size=24", "checkpoint.every_steps=12"]
SMALL += ["dataset.text_columns=[ask,answer]", "dataset.lengths=[4,8]", "eval.every_epochs=null"]
SMALL += ["checkpoint.keep=9", "dataset.max_words=40"]
EMBED = "{name: embedding, vocabulary: 43, features: 8}"
TOWERS = f"{{name: branches, inputs: [query, passage], branches: [[{EMBED}, mean_token]]}}"
GRU = f"[{EMBED}, {{name: gru, features: 4, output: last}}]"
ATTENTION = f"[{EMBED}, {{name: self_attention, heads: 2}}, first_token]"
BOTH = (
    f"[{{name: branches, inputs: [text_a, text_b], branches: [{GRU}, {ATTENTION}]}},"
    "{name: dense, features: $classes}]"
)
KINDS = ["towers", "classes"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose second text has the words of the first one, and one of two others."""
    draw = np.random.default_rng(0)
    rows = [["ask", "answer", "kind"]]
    for number in range(100):
        words = [WORDS[n] for n in draw.choice(len(WORDS), 2, replace=False)]
        kind = ("yes", "no")[number % 2]
        rows.append([" ".join(words), " ".join(["it is", kind, *words[::-1]]), kind])
    path = tmp_path_factory.mktemp("pairs") / "pairs.csv"
    with path.open("w", newline="") as opened:
        csv.writer(opened).writerows(rows)
    return path


def compose(kind: str, cache: Path, file: Path, *keys: str) -> Recipe:
    settings = [*SMALL, f"dataset.root={file}", f"cache.root={cache}"]
    if kind == "towers":
        layers = f"model.layers=[{TOWERS}]"
        return load_recipe("two_towers_docstrings", [*settings, layers, *keys])
    settings += [f"model.layers={BOTH}", "dataset.class_column=kind"]
    return load_recipe("pair_docstrings", [*settings, *keys])


@pytest.fixture(scope="module")
def runs(cache: Path, file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind in one sink."""
    folder = tmp_path_factory.mktemp("trained")
    for kind in KINDS:
        run(compose(kind, cache, file), folder / kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_run_does_not_depend_on_sinks_and_resume(
    kind: str, runs: dict[str, Path], cache: Path, file: Path, tmp_path: Path
) -> None:
    for keys in (["train.sink=false"], ["train.sink_size=7"], ["train.feed=stream"]):
        other = tmp_path / "".join(filter(str.isalnum, keys[0]))
        run(compose(kind, cache, file, *keys), other)
        outcome.assert_same_run(other, runs[kind])
    broken = tmp_path / "broken"
    shutil.copytree(runs[kind], broken)
    shutil.rmtree(make_checkpoint_path(broken / "checkpoints", 24))
    run(compose(kind, cache, file, f"train.resume={broken}"))
    assert outcome.metrics(broken) == outcome.metrics(runs[kind])
    outcome.assert_equal_arrays(outcome.arrays(broken, 24), outcome.arrays(runs[kind], 24))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["siglip", "triplet"])
def test_other_losses_of_pairs_do_not_depend_on_sinks_and_fall(
    loss: str, cache: Path, file: Path, tmp_path: Path
) -> None:
    for size in (1, 24):
        keys = [f"loss={loss}", f"train.sink_size={size}"]
        run(compose("towers", cache, file, *keys), tmp_path / str(size))
    outcome.assert_same_run(tmp_path / "1", tmp_path / "24")
    losses = [line["loss"] for line in outcome.metrics(tmp_path / "24")]
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_classified_pairs_have_equal_bits_on_two_devices(
    cache: Path, file: Path, tmp_path: Path
) -> None:
    for devices in (1, 2):
        keys = ["parallel.mode=data", f"parallel.devices={devices}"]
        run(compose("classes", cache, file, *keys), tmp_path / str(devices))
    outcome.assert_same_run(tmp_path / "2", tmp_path / "1")


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_matched_pairs_of_two_devices_do_not_depend_on_sinks_and_resume(
    cache: Path, file: Path, tmp_path: Path
) -> None:
    keys = ["parallel.mode=semi_auto", "parallel.devices=2"]
    for size in (1, 7, 24):
        run(compose("towers", cache, file, *keys, f"train.sink_size={size}"), tmp_path / str(size))
    outcome.assert_same_run(tmp_path / "1", tmp_path / "24")
    outcome.assert_same_run(tmp_path / "7", tmp_path / "24")
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "24", broken)
    shutil.rmtree(make_checkpoint_path(broken / "checkpoints", 24))
    run(compose("towers", cache, file, *keys, f"train.resume={broken}"))
    assert outcome.metrics(broken) == outcome.metrics(tmp_path / "24")
    outcome.assert_equal_arrays(outcome.arrays(broken, 24), outcome.arrays(tmp_path / "24", 24))
    alone = tmp_path / "alone"
    run(compose("towers", cache, file), alone)
    losses = [[line["loss"] for line in outcome.metrics(folder)] for folder in (broken, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_both_kinds_learn(cache: Path, file: Path, tmp_path: Path) -> None:
    longer = ["train.steps=150", "train.sink_size=150", "train.optimizer.lr=0.03"]
    metrics = run(compose("towers", cache, file, *longer), tmp_path / "towers").metrics
    assert metrics["recall_at_1"] > 0.5  # by chance 0.05
    assert metrics["recall_at_1"] <= metrics["recall_at_5"] <= metrics["recall_at_10"]
    metrics = run(compose("classes", cache, file, *longer), tmp_path / "classes").metrics
    assert metrics["accuracy"] > 0.9


@pytest.mark.slow
def test_recall_does_not_depend_on_batches_and_is_that_of_the_report(
    cache: Path, file: Path, tmp_path: Path, runs: dict[str, Path]
) -> None:
    """The loss compares with the pairs of a batch, so it does."""
    whole = outcome.read_summary(runs["towers"])["metrics"]
    run(compose("towers", cache, file, "dataset.eval.batch_size=3"), tmp_path / "run")
    small = outcome.read_summary(tmp_path / "run")["metrics"]
    recalls = ("recall_at_1", "recall_at_5", "recall_at_10")
    assert [small[name] for name in recalls] == [whole[name] for name in recalls]
    assert small["loss"] != whole["loss"]
    assert report([str(runs["towers"]), "--out", str(tmp_path / "report")]) == 0
    with (tmp_path / "report" / "predictions.csv").open() as opened:
        ranks = [int(row["rank"]) for row in csv.DictReader(opened)]
    assert len(ranks) == whole["count"] == 20
    for k, name in zip((1, 5, 10), recalls, strict=True):
        assert sum(rank <= k for rank in ranks) / len(ranks) == whole[name]
    page = (tmp_path / "report" / "index.html").read_text()
    assert f"{whole['recall_at_5']:.4f}" in page


@pytest.mark.slow
def test_report_of_classified_pairs_is_written(runs: dict[str, Path], tmp_path: Path) -> None:
    assert report([str(runs["classes"]), "--out", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "classes.csv").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_export_predicts_as_the_run(
    kind: str, runs: dict[str, Path], file: Path, tmp_path: Path, capsys: Any
) -> None:
    assert export([str(runs[kind]), str(tmp_path / "exported")]) == 0
    capsys.readouterr()
    lines = []
    for source in (runs[kind], tmp_path / "exported"):
        assert infer([str(source), str(file), "--json"]) == 0
        assert infer([str(source), "--text", "word1 word2", "--text", "it is no word2 word1"]) == 0
        assert infer([str(source), str(file), "--csv", str(tmp_path / "out.csv")]) == 0
        lines.append(capsys.readouterr().out.splitlines())
    assert lines[0] == lines[1]
    key = {"towers": "cosine", "classes": "class"}[kind]
    assert key in json.loads(lines[0][0])
    assert len(lines[0]) == 102
    assert lines[0][100].startswith("word1 word2, it is no word2 word1: ")
    with (tmp_path / "out.csv").open() as opened:
        assert key in next(csv.DictReader(opened))


@pytest.mark.slow
def test_onnx_of_towers_has_the_cosines_of_the_run(
    runs: dict[str, Path], file: Path, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("onnxruntime", reason="not installed: pip install '.[onnx]'")
    folder = tmp_path / "onnx"
    assert export([str(runs["towers"]), str(folder), "--to", "onnx", "--int8"]) == 0
    inputs = ["text_a", "text_a_mask", "text_b", "text_b_mask"]
    assert sorted(json.loads((folder / "model.json").read_text())["onnx"]["inputs"]) == inputs
    text = read_trained_run(runs["towers"]).samples.text
    assert text is not None
    columns = text.encode_pairs(read_text_columns(file, text.columns), (4, 8))
    np.savez(tmp_path / "pairs.npz", **columns)
    capsys.readouterr()
    assert infer([str(runs["towers"]), str(file)]) == 0
    expected = [line.rsplit(": ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    for option in ([], ["--int8"]):
        script = [sys.executable, str(folder / "predict.py"), str(tmp_path / "pairs.npz"), *option]
        result = subprocess.run(script, capture_output=True, text=True, check=True)
        lines = [line.rsplit(": ", 1)[1] for line in result.stdout.splitlines()]
        assert lines == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_mask_keeps_padding_out_of_every_branch(kind: str, runs: dict[str, Path]) -> None:
    """Outputs are equal whatever tokens the padding has, and not whatever the others are."""
    trained = read_trained_run(runs[kind])
    assert trained.samples.text is not None
    columns = trained.samples.text.encode_pairs(
        [("word1 word2", "it is no"), ("word3", "no")], (4, 8)
    )
    predict = jax.jit(make_predict(trained))
    outputs = np.asarray(predict(trained.arrays, columns))
    for name in ("text_a", "text_b"):
        for value in (True, False):
            changed = np.where(columns[f"{name}_mask"] == value, 7, columns[name])
            other = np.asarray(predict(trained.arrays, {**columns, name: changed.astype(np.int32)}))
            assert np.array_equal(other, outputs) is not value


@pytest.mark.slow
def test_unusable_requests_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    source = str(runs["towers"])
    with pytest.raises(UsageError, match="the network reads pairs; must be two --text for each"):
        infer([source, "--text", "red"])
    (tmp_path / "a.csv").write_text("ask,other\na,b\n")
    with pytest.raises(DataError, match=r"a\.csv: has no column answer; it has ask, other"):
        infer([source, str(tmp_path / "a.csv")])
    with pytest.raises(DataError, match="embeddings of several networks have no average"):
        infer(
            [source, str(shutil.copytree(source, tmp_path / "copy")), "--text", "a", "--text", "b"]
        )
    with pytest.raises(RecipeError, match=r"has no translation to ONNX.*StableHLO has all"):
        export([str(runs["classes"]), str(tmp_path / "onnx"), "--to", "onnx"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["loss=mse", "schedule=cosine"],
            "train.loss = mse: must be one for matching: contrastive",
        ),
        (["dataset.class_column=kind"], "the network ends in 16 outputs, and the dataset has 2 cl"),
        (
            ["dataset.max_words=9", "model.layers.0.branches.0.0.vocabulary=5"],
            "must be at least 12",
        ),
        (
            ["model.inputs={query: text_a, passage: texts}"],
            "there is no column 'texts' for the net",
        ),
        (
            ["model.layers.0.inputs=[query]", "model.inputs=null"],
            "query: there is no column 'query",
        ),
        (
            ["model=bert_base", "~model.layers", "model.inputs=null"],
            "bert: reads one input; to match",
        ),
        (["parallel.mode=data"], "parallel.mode=semi_auto compares them across devices"),
        (["train.memory=4GB"], "with train.memory = 4GB: a device sees a part of the batch"),
        (["train.accumulate_steps=2"], "must be 1 with train.loss = contrastive, which compares"),
        (["train.ledger=true"], "unless each sample has one of several classes, not pairs to"),
        (
            ["checkpoint.best=accuracy", "eval.every_steps=8"],
            "must be a metric of matching: loss, ",
        ),
    ],
)
def test_settings_that_do_not_fit_pairs_are_refused(
    keys: list[str], message: str, cache: Path, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        run(compose("towers", cache, file, "stages=[data,build]", *keys), tmp_path)
