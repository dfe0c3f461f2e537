"""A run that a non-finite step ends leaves an autopsy, and a reproducer that a command repeats."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.__main__ import main
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError, UsageError
from pipeline.data.columns import Split
from pipeline.data.dataset_spec import BatchOp
from pipeline.engine.history import Examination
from pipeline.inspect.autopsy import on_failure
from pipeline.inspect.autopsy.examine import Autopsy, NonFiniteSamples
from pipeline.stages.runner.context import CompiledRun
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry
from tests import outcome
from tests.command_line import autopsy
from tests.conftest import compose_tiny
from tests.engine.test_history_policies import VICTIM, poisoned_data
from tests.step_rows import telemetry_of
from tests.whole_run import run

pytestmark = pytest.mark.slow

Compose = Callable[..., Recipe]

PLACES = [f"line {2 * row}" for row in range(10)]


@pytest.fixture(scope="module")
def ended(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that a sample which is no number has ended."""
    run_dir = tmp_path_factory.mktemp("ended")
    with poisoned_data(), pytest.raises(RunError, match="Invalid loss"):
        run(compose_tiny(cache, "train.steps=30"), run_dir)
    return run_dir


@pytest.fixture
def copied(ended: Path, tmp_path: Path) -> Path:
    """Of that run the reproducer alone, as it might be sent to somebody."""
    return Path(shutil.copytree(ended / "reproducer", tmp_path / "sent"))


def test_non_finite_sample_is_named(ended: Path) -> None:
    found = json.loads((ended / "autopsy.json").read_text())
    step = len(outcome.metrics(ended))
    assert (found["step"], found["reproduced"], found["loss"]) == (step, True, "nan")
    finding = found["finding"]
    assert (finding["phase"], finding["layer"]) == ("data", None)
    tensor = finding["tensor"]
    assert (tensor["kind"], tensor["name"], tensor["nan"]) == ("input column", "image", 1)
    assert tensor["shape"] == [16, 8, 8, 1]
    assert (finding["samples"]["ids"], finding["samples"]["of"]) == ([VICTIM], 16)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ((3,), ["of line 6"]),
        ((3, 0), ["of line 6, line 0"]),
        ((0, 1, 2, 3, 4, 5, 6, 7, 9), ["of " + ", ".join(PLACES[:8]) + " and 1 more"]),
        (tuple(range(10)), []),
        ((), []),
    ],
)
def test_files_of_non_finite_samples_are_named(ids: tuple[int, ...], text: list[str]) -> None:
    split = Split({"x": np.arange(10)}, original_rows=np.arange(0, 20, 2))
    placed = replace(split, locate="line {}".format)
    samples = NonFiniteSamples(ids, ids, of=10)
    assert list(on_failure.list_places(placed, samples)) == text
    assert list(on_failure.list_places(split, samples)) == []
    assert list(on_failure.list_places(placed, None)) == []


def test_finding_is_logged(ended: Path) -> None:
    log = (ended / "run.log").read_text()
    step = len(outcome.metrics(ended))
    assert f"autopsy    step {step}: in the data: input column image: float32 16x8x8x1" in log
    assert f"samples: 1 of 16 samples: {VICTIM}" in log
    assert f"python -m pipeline autopsy {ended}" in log


def test_reproducer_is_small_and_complete(ended: Path) -> None:
    names = {file.name for file in (ended / "reproducer").iterdir()}
    assert names == {"arrays.npz", "lowerings.json", "recipe.yaml", "step.json"}
    with np.load(ended / "reproducer" / "arrays.npz", allow_pickle=False) as arrays:
        assert arrays["batch/columns/image"].shape == (16, 8, 8, 1)
        assert VICTIM in arrays["batch/sample"]
        assert not any(name.startswith("state/opt_state") for name in arrays.files)


def test_autopsy_command_repeats_the_finding(
    ended: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the run directory, and by the reproducer alone."""
    for where in (ended, copied):
        assert autopsy([str(where)]) == 0
        printed = capsys.readouterr().out
        assert json.loads((ended / "autopsy.json").read_text())["text"] in printed
        assert printed.endswith("this is what the run has found\n")


@pytest.mark.medium
def test_skipped_step_is_examined_from_the_state_of_the_run(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run went on, so it has no reproducer; finite steps and changed logs are refused."""
    with poisoned_data():
        run(compose_tiny(cache, "train.steps=30", "train.on_nan=skip"), tmp_path)
        lines = outcome.metrics(tmp_path)
        step = next(line["step"] for line in lines if line["loss"] is None)
        capsys.readouterr()
        assert autopsy([str(tmp_path), f"--step={step}", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["finding"]["samples"]["ids"] == [VICTIM]
        assert (facts["step"], facts["approximate"]) == (step, [])
        with pytest.raises(DataError, match=rf"finite, so .* aren't finite: {step}"):
            autopsy([str(tmp_path), "--step=1" if step > 1 else "--step=2"])
        with pytest.raises(DataError, match="must be from 1 to 30"):
            autopsy([str(tmp_path), "--step=31"])
        with pytest.raises(UsageError, match="must be with --step"):
            autopsy([str(tmp_path), "--approximate"])
        log = tmp_path / "metrics.jsonl"
        log.write_text(re.sub(r'"loss": [\d.]+', '"loss": 1.25', log.read_text(), count=1))
        with pytest.raises(RunError, match="can't be computed"):
            autopsy([str(tmp_path), f"--step={step}"])
        assert autopsy([str(tmp_path), f"--step={step}", "--approximate"]) == 0
        assert "approximate: step" in capsys.readouterr().out
    with pytest.raises(DataError, match="the data have changed"):
        autopsy([str(tmp_path), f"--step={step}"])


def test_feature_that_a_reproducer_lacks_is_named(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A teacher's weights aren't in it, and the finding in the data is the same."""
    feature = "train.features=[{name: distill, teacher: ema}]"
    with poisoned_data(), pytest.raises(RunError, match="Invalid loss"):
        run(compose_tiny(cache, "train.steps=30", feature), tmp_path)
    assert autopsy([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "computed without distill, which no reproducer has\n" in printed


def test_command_reports_another_finding(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((copied / "step.json").read_text())
    document["autopsy"]["text"] = "step 1: something else"
    (copied / "step.json").write_text(json.dumps(document))
    assert autopsy([str(copied)]) == 1
    assert "the run has found:\nstep 1: something else" in capsys.readouterr().out


def test_autopsy_without_a_reproducer_is_refused_by_the_command_line(
    ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ended / "checkpoints"
    assert main(["autopsy", str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {folder}: has no reproducer; a run writes it if")


@pytest.mark.parametrize("args", [[], ["a", "b"]])
def test_invalid_arguments_are_refused(args: Sequence[str]) -> None:
    with pytest.raises(
        UsageError, match="autopsy takes RUN_DIR and --step, --approximate, --json, --quiet"
    ):
        autopsy(args)


DAMAGE = {
    "no arrays": lambda folder: (folder / "arrays.npz").unlink(),
    "truncated arrays": lambda folder: (folder / "arrays.npz").write_bytes(b"PK"),
    "no JSON": lambda folder: (folder / "step.json").write_text("{"),
    "another JSON": lambda folder: (folder / "step.json").write_text('{"inputs": 3}'),
    "a class too many": lambda folder: _rewrite(folder, classes=11),
    "too many classes to list": lambda folder: _rewrite(folder, classes=10**9),
    "an unknown task": lambda folder: _rewrite(folder, targets={"task": "none"}),
    "an op of no table": lambda folder: _rewrite(folder, encoding_ops=[{"name": "crop"}]),
    "an image of another shape": lambda folder: _rewrite(folder, inputs=_INPUTS),
}
_IMAGE = {"shape": ["x"], "dtype": "float32", "layout": "hwc"}
_INPUTS = {"arrays": [{"name": "image", "column": "image", "spec": _IMAGE}], "is_named": False}


def _rewrite(folder: Path, **changed: Any) -> None:
    document = json.loads((folder / "step.json").read_text())
    (folder / "step.json").write_text(json.dumps({**document, **changed}))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_reproducer_is_refused(damage: Callable[[Path], None], copied: Path) -> None:
    damage(copied)
    with pytest.raises(DataError, match=str(copied)):
        autopsy([str(copied)])


def test_fault_of_the_arrays_is_not_blamed_on_the_description(copied: Path) -> None:
    arrays = dict(np.load(copied / "arrays.npz"))
    arrays["batch/count"] = np.int32(99)
    np.savez(copied / "arrays.npz", **arrays)
    with pytest.raises(DataError, match=r"arrays\.npz: .*the batch has 99 samples"):
        autopsy([str(copied)])


def test_reproducer_of_an_earlier_version_is_read(copied: Path) -> None:
    document = json.loads((copied / "step.json").read_text())
    del document["targets"], document["encoding_ops"]
    (copied / "step.json").write_text(json.dumps({**document, "table": None}))
    assert autopsy([str(copied)]) == 0


def _write_series(folder: Path) -> list[str]:
    rows = [f"{row},{200 + row % 7}" for row in range(120)]
    (folder / "small.csv").write_text("\n".join(["time,v", *rows]) + "\n")
    return [
        "dataset.package=null",
        "dataset.time_column=time",
        f"dataset.root={folder}/small.csv",
    ]


OF_OTHER_DATA = {
    "standardised series": ("forecast_linear", ["train.optimizer.lr=1e25"], _write_series),
    "numbers with a distribution": (
        "diabetes_mlp",
        ["loss=auto", "train.optimizer.lr=1e12"],
        lambda _: [],
    ),
    "a table whose samples are mixed": (
        "breast_cancer_mlp",
        ["dataset.train.ops=[{name: mix_up, column: features}]", "train.optimizer.lr=1e30"],
        lambda _: [],
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "keys", "write"), OF_OTHER_DATA.values(), ids=OF_OTHER_DATA.keys()
)
def test_step_of_other_data_is_computed_again_as_the_run_did(
    name: str,
    keys: list[str],
    write: Callable[[Path], list[str]],
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the ops that were fitted on the data, the targets of the data, and the ops' classes."""
    keys = [*keys, *write(tmp_path), f"cache.root={cache}", "train.steps=30", "train.epochs=null"]
    keys += ["eval.every_epochs=null", "monitor.tensorboard=false"]
    with pytest.raises(RunError, match="Invalid loss"):
        run(load_recipe(name, keys), tmp_path / "run")
    found = json.loads((tmp_path / "run/autopsy.json").read_text())
    assert found["reproduced"]
    assert autopsy([str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.endswith("this is what the run has found\n")
    ops = on_failure.read_reproducer(tmp_path / "run").step_config.train_ops
    assert [op.classes for op in ops if isinstance(op, BatchOp)] == [2] * ("mix_up" in str(keys))


class Healthy:
    """An executable that finds nothing wrong with a step when it is run again."""

    loader = SimpleNamespace(get_window=None)

    def put(self, state: Any) -> Any:
        return state

    def run(self, state: Any, start: int, stop: int, mechanism: str) -> tuple[Any, Telemetry]:
        return state, telemetry_of(start, np.array([[0.5, 0.1, 2.0, 1.0, 0.0]]))


def test_machine_fault_is_distinguished_from_a_run_fault() -> None:
    found = on_failure.repeat_step(Healthy(), None, 7)  # type: ignore[arg-type]
    assert found is not None
    assert (found.step, found.loss, found.grad_norm) == (7, 0.5, 2.0)
    assert str(found).startswith("step 7: not reproduced: the same program returned another result")
    assert found.to_dict()["reproduced"] is False
    assert found.is_fault_of_machine


@pytest.mark.parametrize("when", ["meanwhile", "before"])
def test_signal_ends_an_autopsy_immediately(
    when: str, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of it, or where it was noted before: the run ends for the non-finite step."""
    examined: list[str] = []

    def interrupted(*_: object) -> None:
        examined.append("begun")
        signal.raise_signal(signal.SIGTERM)
        examined.append("went on")

    def noted(run: CompiledRun, state: TrainState, step: int) -> Examination:
        signal.raise_signal(signal.SIGTERM)
        return examine(run, state, step)

    examine = on_failure.examine_non_finite_step
    monkeypatch.setattr("pipeline.inspect.autopsy.on_failure.examine", interrupted)
    if when == "before":
        monkeypatch.setattr(on_failure, "examine_non_finite_step", noted)
    with poisoned_data(), pytest.raises(RunError, match="Invalid loss"):
        run(tiny("train.steps=30"), tmp_path)
    assert examined == (["begun"] if when == "meanwhile" else [])
    log = (tmp_path / "run.log").read_text()
    step = len(outcome.metrics(tmp_path))
    assert f"warning    no autopsy of step {step}: SIGTERM received\n" in log
    assert outcome.read_summary(tmp_path)["status"] == "failed"
    assert outcome.checkpoints(tmp_path)[-1] == step - 1


def test_resume_is_not_offered_if_it_would_fail_again(ended: Path) -> None:
    log = (ended / "run.log").read_text()
    step = len(outcome.metrics(ended))
    assert f"autopsy    replaying step {step}, one operation at a time\n" in log
    advice = "start a new run with corrected data, or train.on_nan=skip"
    assert f"resume     would fail at step {step} again; {advice}\n" in log
    assert "train.resume=" not in log


def test_too_high_learning_rate_is_named(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        run(tiny("train.steps=30", "train.optimizer.lr=1e9"), tmp_path)
    assert "is 1e+09, which is the likely cause: try a smaller train.optimizer.lr" in str(
        caught.value
    )
    log = (tmp_path / "run.log").read_text()
    assert "again; start a new run with a smaller train.optimizer.lr\n" in log
    assert "train.resume=" not in log


def test_resume_is_offered_after_a_machine_fault(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Autopsy(3, 0.5, 2.0, None, "a fault of memory", is_fault_of_machine=True)
    monkeypatch.setattr(on_failure, "repeat_step", lambda *_: fault)
    with poisoned_data(), pytest.raises(RunError, match="Invalid loss"):
        run(tiny("train.steps=30"), tmp_path)
    assert f"resume     train.resume={tmp_path}" in (tmp_path / "run.log").read_text()
    assert json.loads((tmp_path / "autopsy.json").read_text()) == fault.to_dict()


def test_failing_autopsy_does_not_hide_the_step_error(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("pipeline.inspect.autopsy.on_failure.examine", fails)
    with poisoned_data(), pytest.raises(RunError, match="Invalid loss"):
        run(tiny("train.steps=30"), tmp_path)
    assert "no autopsy of step" in (tmp_path / "run.log").read_text()
    assert not (tmp_path / "autopsy.json").exists()


def test_resumed_run_archives_the_earlier_autopsy(
    ended: Path, tiny: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With repaired data the step succeeds; the finding is kept, and computed again."""
    run_dir = tmp_path / "run"
    shutil.copytree(ended, run_dir)
    mended = ["train.resume_changed=allow", f"train.resume={run_dir}"]
    assert run(tiny("train.steps=30", *mended)).status == "done"
    assert not (run_dir / "autopsy.json").exists()
    assert not (run_dir / "reproducer").exists()
    earlier = run_dir / "earlier_autopsy"
    assert f"the earlier autopsy is in {earlier}" in (run_dir / "run.log").read_text()
    assert json.loads((earlier / "autopsy.json").read_text())["step"] <= 30
    assert main(["autopsy", str(earlier)]) == 0
    assert "in the data: input column image" in capsys.readouterr().out
