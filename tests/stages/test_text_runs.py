"""Runs of texts: killed and resumed, in sinks of any size, and what they say."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.core.errors import DataError, RecipeError
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.record.trained_run import read_trained_run
from tests import outcome
from tests.stages.export.text_runs import bert, gpt
from tests.whole_run import run

pytestmark = pytest.mark.slow

KEPT = ["checkpoint.every_steps=10", "checkpoint.keep=20", "model.blocks=1", "train.steps=30"]
SELDOM = ["checkpoint.every_steps=40", "checkpoint.keep=20", "model.blocks=1"]


def test_language_model_does_not_depend_on_sinks_and_resume(cache: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    whole = tmp_path / "whole"
    summary = run(gpt(cache, text, *KEPT), whole)
    run(gpt(cache, text, *KEPT, "train.sink_size=7"), tmp_path / "sevens")
    run(gpt(cache, text, *KEPT, "train.sink=false"), tmp_path / "single")
    outcome.assert_same_run(tmp_path / "sevens", whole)
    outcome.assert_same_run(tmp_path / "single", whole)

    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    for step in (20, 30):
        shutil.rmtree(make_checkpoint_path(broken / "checkpoints", step))
    run(gpt(cache, text, *KEPT, f"train.resume={broken}"))
    assert outcome.metrics(broken) == outcome.metrics(whole)
    outcome.assert_equal_arrays(outcome.arrays(broken, 30), outcome.arrays(whole, 30))

    metrics = summary.metrics
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]), rel=1e-5)
    assert metrics["count"] == len(read_trained_run(whole).recipe.dataset.read(Path()).eval) * 12
    said = (whole / "run.log").read_text()
    assert "tokens/s" in said
    assert "images" not in said
    assert f"perplexity {metrics['perplexity']:.4f} over {metrics['count']:,} tokens" in said
    assert summary.time["tokens_per_s"] == pytest.approx(8 * 12 * 1000 / summary.time["step_ms"])


def test_resume_with_a_changed_text_is_refused(cache: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    run(gpt(cache, text, *KEPT), tmp_path / "run")
    text.write_text(text.read_text().replace("cat", "act", 1))
    with pytest.raises(DataError, match="the data have changed since the run was trained"):
        run(gpt(cache, text, *KEPT, f"train.resume={tmp_path / 'run'}", "train.steps=80"))


def test_text_classifier_does_not_depend_on_sinks_and_kills(cache: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    summary = run(bert(cache, *SELDOM), whole)
    run(bert(cache, *SELDOM, "train.sink_size=9"), tmp_path / "nines")
    outcome.assert_same_run(tmp_path / "nines", whole)
    assert summary.metrics["accuracy"] > 0.2
    said = (whole / "run.log").read_text()
    assert "texts/s" in said
    assert "training texts padded to 8 (" in said

    killed = tmp_path / "killed"
    script = (
        "import sys; from pathlib import Path; from tests.stages.export.text_runs import bert;"
        "from pipeline import run;"
        "run(bert(Path(sys.argv[1]), *sys.argv[3:]), Path(sys.argv[2]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(cache), str(killed), *SELDOM, "train.sink_size=1"],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.DEVNULL,
    )
    while (
        process.poll() is None and not (make_checkpoint_path(killed / "checkpoints", 40)).exists()
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(bert(cache, *SELDOM, f"train.resume={killed}"))
    assert outcome.metrics(killed) == outcome.metrics(whole)
    outcome.assert_equal_arrays(outcome.arrays(killed), outcome.arrays(whole))

    trained = read_trained_run(whole)
    assert trained.samples.text is not None
    split = trained.recipe.dataset.read(Path()).eval
    column, labels = split.columns["tokens"], np.asarray(split.columns["label"][:])
    padded = np.full((len(split), 24), -1, np.int32)
    for row, sample in enumerate(padded):
        value = column.value(row)  # type: ignore[attr-defined]
        sample[: len(value)] = value
    found = np.asarray(jax.jit(make_predict(trained))(trained.arrays, padded)).argmax(axis=-1)
    assert (found == labels).mean() == pytest.approx(summary.metrics["accuracy"])


def test_too_small_vocabulary_is_refused(cache: Path, tmp_path: Path) -> None:
    keys = ["dataset.tokenizer=bytes", "model.vocabulary=100", "dataset.buckets=[[24]]"]
    with pytest.raises(RecipeError, match="vocabulary = 100: must be at least 259, the number of"):
        run(bert(cache, *keys), tmp_path / "run")


def test_class_metric_is_refused_for_next_token(cache: Path, tmp_path: Path) -> None:
    keys = ["checkpoint.best=accuracy", "eval.every_steps=10"]
    with pytest.raises(RecipeError, match="metric of next_token: loss, token_accuracy, perplexity"):
        run(gpt(cache, tmp_path / "a.txt", *keys), tmp_path / "run")
