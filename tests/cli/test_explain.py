"""`explain` on real digits: its output, not the speed of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.__main__ import main
from pipeline.backends.loading import loader as loader_module
from pipeline.backends.loading.loader import make_loader
from pipeline.backends.loading.window import LoaderSource
from pipeline.backends.sink_choice import Cost, Costs, SinkChoice
from pipeline.cli import explain as command
from pipeline.cli.explain import make_calendar, make_dispatch, measure_memory
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import list_event_periods
from pipeline.core.reporter import Reporter
from pipeline.engine.schedule import Event, RunSchedule
from pipeline.stages.data import load_data
from pipeline.training.parallel.state_sharing import DevicePlacement
from tests.conftest import MLP, STEPS, TINY

RECIPE = "+recipe=lenet5_digits"
Compose = Callable[..., Recipe]
Explain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def explained(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Explain:
    """Run `explain` in a folder of its own, for a moment: figures are not what is tested."""
    monkeypatch.setattr(command, "BUDGET_S", 0.2)
    monkeypatch.setattr(command, "TRIAL_S", 0.02)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))

    def run(*arguments: str) -> tuple[int, str, str]:
        return main(["explain", *arguments]), *capsys.readouterr()

    return run


def choosing(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    """Have every measurement end in the same choice, whatever this machine is."""
    mechanism = "loop" if size else "none"
    choice = SinkChoice(size, mechanism, "made up", off_ms=3.0, step_ms=2.0)  # type: ignore[arg-type]
    monkeypatch.setattr(command, "choose", lambda costs, bounds: choice)


@pytest.mark.slow
@pytest.mark.usefixtures("long_runs")
def test_sinks_of_the_default_recipe_are_explained(
    explained: Explain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing(monkeypatch, 20)
    status, out, err = explained()
    assert (status, err) == (0, "")
    assert list(tmp_path.iterdir()) == []
    for line in (
        r"^lenet5_digits on cpu:0 .*, batch 32$",
        r"^  step        [\d.]+ ms as one program, [\d.]+ ms step by step without waiting, in a",
        r"^  to start    -?\d+ us on the host for each step without sinks \(90 % are below",
        r"^  memory      the device holds all samples, .* kB, and 1,024 batches as lists of their",
        r"^  events      evaluate 4 times in 1,760 steps; at most 440 steps between two$",
        r"^  none           3\.0000   1\.00x$",
        r"^  20 .*x  <- chosen$",
        r"^  200 .*x  <- the recipe's$",
        r"^  chosen      sinks of 20 steps as one program: made up$",
        r"^  predicted   1\.500x, give or take [\d.]+ %$",
        r"^  achieved    [\d.]+x, give or take [\d.]+ %: [\d.]+ ms a step, [\d.]+ without sinks",
    ):
        assert re.search(line, out, re.MULTILINE), line


@pytest.mark.slow
@pytest.mark.usefixtures("long_runs")
def test_out_option_writes_a_file(explained: Explain, tmp_path: Path) -> None:
    status, _, err = explained(
        RECIPE, *TINY, *MLP, STEPS, "train.sink_size=auto", "--out=deep/mine"
    )
    assert (status, err) == (0, "")
    told = json.loads((tmp_path / "deep" / "mine" / "explain.json").read_text())
    assert (told["recipe"], told["batch_size"], told["asked"]) == ("lenet5_digits", 16, None)
    assert told["predicted_off_ms"] > 0
    assert {"1", "10", "100", "1000"} <= told["predicted_ms"].keys()
    assert told["memory"]["batch_bytes"] == 16 * 4 + 8
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.1, 7.0])
def test_busy_machine_is_warned_of(
    load: float, explained: Explain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    _, out, _ = explained(RECIPE, *TINY, *MLP, "train.steps=1")
    warning = "warning    load 7.0 on 2 processors: other programs use them, so times will vary\n"
    assert (warning in out) is (load > 1)


@pytest.mark.slow
def test_recipe_without_sinks_has_no_achieved_speedup(
    explained: Explain, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing(monkeypatch, None)
    status, out, _ = explained(RECIPE, *TINY, *MLP, STEPS)
    assert status == 0
    assert "  chosen      no sinks: made up" in out
    assert "achieved" not in out


@pytest.mark.slow
def test_run_of_single_steps_is_not_measured(explained: Explain) -> None:
    status, out, _ = explained(RECIPE, *TINY, *MLP, "train.steps=1")
    assert status == 0
    assert "no sinks: a sink would have one step, since the run has no more than 1 step" in out
    assert "ms/step" not in out


PLAN = """\
mesh: {data: 1, model: 2}
batch: []
specs: [{pattern: dense_0/kernel, axes: [null, model]}]
constraints: []
"""


@pytest.mark.slow
def test_plan_of_a_file_is_explained_instead_of_a_searched_one(
    explained: Explain, tmp_path: Path
) -> None:
    Path(tmp_path, "mine.yaml").write_text(PLAN)
    status, out, err = explained(
        *TINY,
        *(*MLP, STEPS, "train.sink_size=auto"),
        *("parallel.mode=auto", "parallel.devices=2", "parallel.reproducible=layout"),
        "parallel.plan=mine.yaml",
    )
    assert (status, err) == (0, "")
    assert "1 x 2 devices, batch replicated, dense_0/kernel [null, model]; from mine.yaml" in out
    assert "searched in" not in out


@pytest.mark.slow
def test_emulated_device_is_explained_by_its_model(
    explained: Explain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr(command, "compile_to_fit", never)
    status, out, _ = explained(*TINY, STEPS, "device=ascend910")
    assert status == 0
    assert "MODELLED, not measured: lenet5_digits on Ascend 910A, batch 16" in out
    assert re.search(r"^  chosen      sinks of \d+ steps as one program: ", out, re.MULTILINE)
    assert re.search(
        r"^  range       \S+ ms if as tuned as the zoo, \S+ to \S+ as most ", out, re.MULTILINE
    )
    assert "achieved" not in out
    assert "all-reduce" not in out


@pytest.mark.slow
def test_several_emulated_devices_are_explained_with_their_all_reduces(
    explained: Explain, tmp_path: Path
) -> None:
    cluster = ("device=ascend910", "parallel.mode=data", "parallel.devices=16")
    status, out, _ = explained(*TINY, STEPS, *cluster, "train.batch_size=96", f"--out={tmp_path}")
    assert status == 0
    assert "lenet5_digits on 16 x Ascend 910A, batch 96 (6 a device)" in out
    (line,) = (line for line in out.splitlines() if line.startswith("  all-reduce"))
    found = json.loads((tmp_path / "explain.json").read_text())["communication"]
    assert (found["devices"], found["count"]) == (16, 1)
    assert found["nbytes"] >= 4 * 61_684
    assert line.endswith(f"exposed, {found['exposed_ms'] / found['step_ms']:.1%} of the step")


@pytest.mark.parametrize(
    ("mechanism", "median_us"), [("loop", 2000), ("soft", 1000), ("none", 2000)]
)
def test_overhead_of_a_dispatch_is_compared_with_the_chosen_sinks(
    mechanism: Any, median_us: float
) -> None:
    """Of a dispatch of 3 ms, a step takes 1 ms in a loop and 2 ms by itself."""
    costs = Costs(3.0, (Cost("loop", 0.5, 1.0), Cost("soft", 0.1, 2.0)), 0.0)
    dispatch = make_dispatch(np.array([3.0, 3.0, 3.0]), costs.find(mechanism))
    assert (dispatch.median_us, dispatch.p90_us) == (median_us, median_us)


MISTAKES = {
    "a flag": (["-m"], "-m: there is no such option. Choose from --help, --json, --out, --quiet"),
    "a wrong recipe": (
        ["train.sink_sise=5"],
        "there is no such key; did you mean train.sink_size?",
    ),
    "a sweep": (["train.sink_size=1,2"], "train.sink_size=1,2: "),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_invalid_recipe_returns_2(arguments: list[str], message: str, explained: Explain) -> None:
    status, out, err = explained(*arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.slow
def test_steps_that_diverge_return_1(explained: Explain) -> None:
    status, _, err = explained(RECIPE, *TINY, *MLP, STEPS, "train.optimizer.lr=1e30")
    assert status == 1
    assert "Invalid loss, terminating training" in err


@pytest.mark.medium
def test_unwritable_output_returns_1(explained: Explain, tmp_path: Path) -> None:
    """Before anything is measured."""
    (tmp_path / "file").write_text("")
    status, out, err = explained(*TINY, "train.steps=1", "--out=file/run")
    assert (status, out) == (1, "")
    assert "file/run: can't be written: Not a directory" in err


@pytest.mark.slow
def test_calendar_matches_the_segments_of_a_run(tiny: Compose) -> None:
    recipe = tiny("eval.every_steps=10", "checkpoint.every_steps=12", "checkpoint.every_epochs=2")
    run_schedule = RunSchedule(45, 6, 45)
    told = make_calendar(recipe, run_schedule)
    segments = list(run_schedule.segments(0, list_event_periods(recipe, 6)))
    evaluated = [s.stop for s in segments if Event.EVALUATE in s.events]
    saved = [s.stop for s in segments if Event.CHECKPOINT in s.events]
    assert told.counts == {"evaluate": len(evaluated), "checkpoint": len(saved), "collect": 0}
    assert told.longest == max(s.stop - s.start for s in segments)
    assert told.first == (
        (10, "evaluate"),
        (12, "checkpoint"),
        (20, "evaluate"),
        (24, "checkpoint"),
    )
    without = make_calendar(tiny("checkpoint.every_steps=12", "stages=[data,build]"), run_schedule)
    assert without.counts["checkpoint"] == 0


@pytest.mark.parametrize(("kind", "samples"), [("resident", 0), ("stream", 16 * 8 * 8)])
def test_memory_is_counted_for_a_window(
    kind: str, samples: int, tiny: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 16: a number for each sample and two for the batch, beside what it holds."""
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 8)
    dataset = load_data(tiny(), Reporter())
    loader = make_loader(
        LoaderSource(dataset.train, dataset.train_order, DevicePlacement((jax.devices()[0],))), kind
    )  # type: ignore[arg-type]
    told = measure_memory(loader)
    labels = 16 * 4 if samples else 0
    assert (told.resident, told.window_steps) == (kind == "resident", 8)
    assert told.batch_bytes == 16 * 4 + 8 + samples + labels
