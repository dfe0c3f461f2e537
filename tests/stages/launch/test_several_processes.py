"""Features of a run in several processes: the bits of one process, and the same decisions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.checkpoint.restore import read_saved
from pipeline.core.errors import PipelineError
from tests import outcome
from tests.stages.launch.forked_processes import train_in_processes
from tests.whole_run import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized_programs_of_module")]

TINY = (
    "model=mlp",
    "model.hidden=[12]",
    "schedule=constant",
    "train.optimizer.lr=0.001",
    "train.batch_size=24",
    "train.sink_size=10",
    "train.steps=40",
    "monitor.tensorboard=false",
    "checkpoint.every_steps=20",
    "stages=[data,build,compile,train,checkpoint]",
)
SHARED = (
    "parallel.mode=semi_auto",
    "parallel.mesh={data: 1, model: 2}",
    "parallel.specs=[{pattern: dense_0/kernel, axes: [null, model]}]",
    "stages=[data,build,compile,train,checkpoint,eval]",
    "eval.every_steps=20",
)
BAD_SAMPLE = 17


def train(cache: Path, run_dir: Path, *overrides: str) -> Path:
    """Train in this process; return the run directory."""
    run(load_recipe("lenet5_digits", [*TINY, f"cache.root={cache}", *overrides]), run_dir)
    return run_dir


def train_in_two(cache: Path, run_dir: Path, *overrides: str, status: int = 0) -> list[str]:
    """Train in two processes; return their lines, after the exit status of both is compared."""
    words = ["+recipe=lenet5_digits", *TINY, *overrides, f"hydra.run.dir={run_dir}"]
    statuses, texts = train_in_processes(words, cache, run_dir.parent)
    assert statuses == [status] * 2, texts
    return texts


def require_same(one: Path, other: Path) -> None:
    """Raise AssertionError unless metrics and weights are equal, bit for bit."""
    assert outcome.metrics(one) == outcome.metrics(other)
    arrays = read_saved(one).arrays
    others = read_saved(other).arrays
    assert {path: array.tobytes() for path, array in arrays.items()} == {
        path: others[path].tobytes() for path in arrays
    }


@pytest.fixture(scope="module")
def bad_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Keys of a dataset with one value whose products overflow."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(240, 8, 8, 1)).astype(np.float32)
    y = draws.integers(0, 10, 240)
    bad = x.copy()
    bad[BAD_SAMPLE, 3, 3, 0] = 3e38
    file = tmp_path_factory.mktemp("data") / "bad.npz"
    np.savez(file, x_train=bad, y_train=y, x_test=x[:48], y_test=y[:48])
    return ("dataset=numpy", f"dataset.root={file}", "parallel.mode=data")


def test_processes_share_parameters(cache: Path, tmp_path: Path) -> None:
    """A done run of two processes continues in one; both evaluate after step 20."""
    two = tmp_path / "two"
    train_in_two(cache, two, *SHARED, "train.steps=20")
    one = train(cache, tmp_path / "one", *SHARED)
    train(cache, two, *SHARED, f"train.resume={two}")
    require_same(two, one)
    assert (two / "evals.jsonl").read_bytes() == (one / "evals.jsonl").read_bytes()


def test_first_process_plans_for_all(cache: Path, tmp_path: Path) -> None:
    auto = "parallel.mode=auto"
    two = tmp_path / "two"
    train_in_two(cache, two, auto)
    one = train(
        cache, tmp_path / "one", auto, "parallel.devices=2", f"parallel.plan={two}/plan.yaml"
    )
    require_same(two, one)


def test_processes_roll_back_together(
    cache: Path, tmp_path: Path, bad_data: tuple[str, ...]
) -> None:
    back = (*bad_data, "train.on_nan={name: rollback, most: 9}", "checkpoint.every_steps=5")
    one = train(cache, tmp_path / "one", *back)
    two = tmp_path / "two"
    train_in_two(cache, two, *back)
    require_same(two, one)
    went_back = [outcome.read_summary(run_dir)["bad_steps"] for run_dir in (one, two)]
    assert went_back[0]["rollbacks"]
    assert went_back[0] == went_back[1]


@pytest.mark.usefixtures("unoptimized_programs")
def test_first_process_examines_a_non_finite_step(
    cache: Path, tmp_path: Path, bad_data: tuple[str, ...]
) -> None:
    """Each equation of the step is a program, whose compilation takes most of the time."""
    with pytest.raises(PipelineError, match="Invalid loss"):
        train(cache, tmp_path / "one", *bad_data)
    texts = train_in_two(cache, tmp_path / "two", *bad_data, status=1)
    assert "Invalid loss" in texts[0]
    findings = [
        json.loads((tmp_path / name / "autopsy.json").read_text()) for name in ("one", "two")
    ]
    assert findings[0] == findings[1]
    assert "dense_0" in json.dumps(findings[0]["finding"])


def test_every_process_writes_its_profile(cache: Path, tmp_path: Path) -> None:
    keys = ("parallel.mode=data", "train.steps=90", "profile.mode=on")
    two = tmp_path / "two"
    train_in_two(cache, two, *keys)
    one = train(cache, tmp_path / "one", "parallel.mode=data", "train.steps=90")
    require_same(two, one)
    for folder in (two / "profile", two / "profile/ranks/1"):
        (profile,) = json.loads((folder / "profile.json").read_text())["profiles"]
        assert "dense_0" in {row["layer"] for row in profile["layers"]}
        assert (folder / "raw/trace.xplane.pb").stat().st_size > 0
