"""Sweeps whose jobs share a program: the files of each are those of the job alone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest

from pipeline.__main__ import main
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.checkpoint.restore import read_saved
from pipeline.core.host.signals import Signals
from pipeline.study.population import shared_program
from pipeline.study.sweep.vectorized import run_in_places
from tests import outcome
from tests.conftest import TINY

OPS = "[{name: rescale, factor: 0.0625, shift: 0.0}]"
MLP = [
    *("model=mlp", "model.hidden=[8]", "train.steps=12", "eval.every_steps=8"),
    *(f"dataset.train.ops={OPS}", f"dataset.eval.ops={OPS}"),
]
SWEPT = [
    "train.optimizer.momentum=0.9,0.5",
    "train.loss.smoothing=0.1,0.2",
    "train.optimizer.lr=0.05,1e38",
]
"""Four jobs that train, and four that diverge at once."""


@pytest.fixture(scope="module")
def command(
    cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Callable[..., int]]]:
    """A folder, and the command of a sweep in it."""
    folder = tmp_path_factory.mktemp("vectorized")
    before = Path.cwd()
    os.chdir(folder)

    def run(*overrides: str) -> int:
        given = [item for item in TINY if not item.startswith("dataset.train.ops")]
        given = [item for item in given if not item.startswith("dataset.eval.ops")]
        return main(["-m", *given, *MLP, f"cache.root={cache}", *overrides])

    yield folder, run
    os.chdir(before)


@pytest.fixture(scope="module")
def swept(command: tuple[Path, Callable[..., int]]) -> Path:
    """The directory of the sweep in one program."""
    folder, run = command
    assert run(*SWEPT, "hydra.sweeper.vectorize=true", "hydra.sweep.dir=one") == 1
    return folder / "one"


@pytest.mark.slow
def test_member_has_the_files_of_a_separate_run(
    swept: Path, command: tuple[Path, Callable[..., int]]
) -> None:
    """The same losses, evaluations and weights, bit for bit, and the same files."""
    folder, run = command
    alone = [item.replace("0.9,0.5", "0.5").replace("0.1,0.2", "0.2") for item in SWEPT[:2]]
    assert run(*alone, "train.optimizer.lr=0.05", "hydra.sweep.dir=alone") == 0
    one, other = swept / "3", folder / "alone" / "0"
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    assert (one / "evals.jsonl").read_bytes() == (other / "evals.jsonl").read_bytes()
    found, expected = outcome.read_summary(one), outcome.read_summary(other)
    assert found["metrics"] == expected["metrics"]
    assert found.keys() == expected.keys()
    assert {f.name for f in one.iterdir()} == {f.name for f in other.iterdir()}
    manifests = [
        json.loads((make_checkpoint_path(d / "checkpoints", 12) / "manifest.json").read_text())
        for d in (one, other)
    ]
    assert manifests[0].keys() == manifests[1].keys()


@pytest.mark.slow
def test_diverging_member_frees_its_slot(swept: Path) -> None:
    statuses = [outcome.read_summary(swept / str(job))["status"] for job in range(8)]
    assert statuses == ["done"] * 4 + ["failed"] * 4
    assert "Invalid loss" in outcome.read_summary(swept / "4")["reason"]
    losses = [outcome.read_summary(swept / str(job))["metrics"]["loss"] for job in range(4)]
    assert len(set(losses)) == 4, "each has numbers of its own"


@pytest.mark.slow
def test_interrupted_member_continues_and_finished_members_are_unchanged(
    swept: Path, command: tuple[Path, Callable[..., int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """As by a sweep that is not vectorized, which the same directory could go on with."""
    _, run = command
    before = (swept / "2" / "metrics.jsonl").read_bytes()
    (swept / "2" / "summary.json").unlink()
    assert run(*SWEPT, "hydra.sweeper.vectorize=1", "hydra.sweep.dir=one") == 1
    output = capsys.readouterr().out
    assert "5 jobs by one program, 1 at a time" in output, "what failed is tried once more"
    assert outcome.read_summary(swept / "2")["status"] == "done"
    assert (swept / "2" / "metrics.jsonl").read_bytes() == before


LOOKAHEAD = "{name: lookahead, steps: 3}"
LISTED = (
    f"train.features=[{LOOKAHEAD},{{name: distill, teacher: ema, decay: 0.9}},gradient_penalty,"
    "{name: accumulate_labels, labels: 40},gradient_noise]"
)
"""All listed features but throughput, whose columns are times."""


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_members_with_listed_features_have_the_bits_of_separate_runs(
    command: tuple[Path, Callable[..., int]],
) -> None:
    folder, run = command
    alike = (LISTED, "train.accumulate_steps=2")
    together = ("seed=1,2", "train.optimizer.momentum=0.9,0.5", "hydra.sweep.dir=listed")
    assert run(*alike, *together, "hydra.sweeper.vectorize=true") == 0
    alone = ("seed=2", "train.optimizer.momentum=0.5", "hydra.sweep.dir=listed_alone")
    assert run(*alike, *alone) == 0
    one, other = folder / "listed" / "3", folder / "listed_alone" / "0"
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    assert (one / "evals.jsonl").read_bytes() == (other / "evals.jsonl").read_bytes()
    assert "accumulated_labels" in outcome.read_lines(one / "metrics.jsonl")[0]
    saved = [read_saved(run_dir).arrays for run_dir in (one, other)]
    assert saved[0].keys() == saved[1].keys()
    for name, array in saved[0].items():
        assert array.tobytes() == saved[1][name].tobytes(), name


@pytest.mark.slow
def test_members_that_differ_in_a_listed_feature_have_programs_of_their_own(
    command: tuple[Path, Callable[..., int]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = command
    features = [f"[{{name: lookahead, steps: 3, rate: {rate}}}]" for rate in (0.5, 0.8)]
    swept = (f"train.features={features[0]},{features[1]}", "hydra.sweeper.vectorize=true")
    assert run(*swept, "hydra.sweep.dir=rates") == 2
    assert "they differ in train.features.0.rate; must differ only in" in capsys.readouterr().err
    assert run(*swept, "seed=1,2", "hydra.sweep.dir=rates") == 0
    assert "4 jobs by 2 programs, for train.features.0.rate;" in capsys.readouterr().out
    assert run(f"train.features={features[1]}", "seed=2", "hydra.sweep.dir=rate") == 0
    logs = [folder / name / "metrics.jsonl" for name in ("rates/3", "rate/0")]
    assert logs[0].read_bytes() == logs[1].read_bytes()
    assert logs[0].read_bytes() != (folder / "rates" / "1" / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_invalid_vectorize_settings_are_refused(
    command: tuple[Path, Callable[..., int]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = command
    assert run("train.batch_size=8,16", "hydra.sweeper.vectorize=true") == 2
    assert "no two of 2 jobs can share a program: they differ in train.batch_size" in (
        capsys.readouterr().err
    )
    assert run("seed=1,2", "hydra.sweeper.vectorize=0") == 2
    assert "hydra.sweeper.vectorize = 0: must be true, false or a whole number" in (
        capsys.readouterr().err
    )


def test_too_little_memory_error_names_the_fitting_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_program, "read_available_bytes", lambda: 7 * 10**9)
    shared_program.Places(3, is_set_by_user=True).require_room(2 * 10**9)
    with pytest.raises(shared_program.RunError) as error:
        shared_program.Places(8, is_set_by_user=True).require_room(2 * 10**9)
    text = str(error.value)
    assert "hydra.sweeper.vectorize = 8: 8 runs at once need 16.0 GB of memory, and 7.0 GB" in text
    assert text.endswith("hydra.sweeper.vectorize=3 fits")
    with pytest.raises(shared_program.RunError) as error:
        shared_program.Places(2).require_room(8 * 10**9)
    text = str(error.value)
    assert text.endswith("available; one needs 8.0 GB, so none fits; reduce train.batch_size")


def test_refused_program_closes_its_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its thread would go on to read the data."""
    loader = Mock()
    context = Mock()
    context.recipe.stages = ["train"]
    context.summary.time = {}

    def refuse(*_: Any) -> None:
        raise shared_program.CompiledInError(["train.steps"])

    monkeypatch.setattr(shared_program, "lower", Mock())
    monkeypatch.setattr(shared_program, "make_compile_inputs", lambda *_: Mock(train=loader))
    monkeypatch.setattr(shared_program, "share_step", refuse)
    program = shared_program.SharedProgram([], shared_program.Places(1))
    with pytest.raises(shared_program.CompiledInError, match=r"train\.steps"):
        program.open(Mock(context=context, recipe=context.recipe))
    loader.close.assert_called_once()


def test_signal_stops_members_and_starts_no_more() -> None:
    seen = []

    def member(signals: Signals) -> None:
        seen.append(signals)
        os.kill(os.getpid(), signal.SIGTERM)
        while signals.stop is None:
            pass

    assert run_in_places([member] * 3, 1) == "SIGTERM received"
    assert len(seen) == 1


def test_error_of_a_member_cancels_queued_members_and_stops_still_arrive() -> None:
    """The other active member ends by a signal that comes after the error."""
    seen = []
    has_failed = Event()

    def fail(signals: Signals) -> None:
        has_failed.set()
        raise OSError("disk full")

    def wait_for_stop(signals: Signals) -> None:
        has_failed.wait()
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 5
        while signals.stop is None and time.monotonic() < end:
            time.sleep(0.001)
        seen.append(signals.stop)

    with pytest.raises(OSError, match="disk full"):
        run_in_places([wait_for_stop, fail, *[seen.append] * 3], 2)
    assert seen == ["SIGTERM received"]


def test_error_of_a_member_starts_no_queued_member() -> None:
    started = []

    def begin(signals: Signals) -> None:
        started.append(signals)
        time.sleep(0.02)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_in_places([begin] * 20, 1)
    assert len(started) == 1
