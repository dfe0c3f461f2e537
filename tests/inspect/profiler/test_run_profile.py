"""Profiled runs: their numbers are those of other runs, and their files say where time goes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from jax._src.source_info_util import ExtendNameStackContextManager

from pipeline.__main__ import main
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.inspect.profiler import run_profile
from pipeline.inspect.profiler.profiled_executable import ProfiledExecutable
from pipeline.inspect.profiler.trace import Tracer
from pipeline.models.modules.name_stack import DATA, UPDATE
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.lower import lower
from tests.conftest import MLP, TINY
from tests.golden.make_runs import RUNS
from tests.whole_run import run

Compose = Callable[..., Recipe]
SHORT = "train.steps=90"
METADATA = re.compile(r",? ?metadata=\{[^}]*\}|, (frontend_attributes|stack_frame_id)=[^,]*")


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def program_text(recipe: Recipe) -> str:
    """The training loop as XLA compiled it."""
    with Reporter() as reporter:
        backend = recipe.device.open(recipe.parallel)
        dataset = load_data(recipe, reporter)
        built = lower(recipe, dataset, build(recipe, dataset, reporter), backend, None, reporter)
        return compile_programs(recipe, dataset, built, backend, reporter).program_text


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.slow
@pytest.mark.mlp
def test_scopes_do_not_change_instructions(tiny: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny(SHORT, "cache.compiled=false")
    scoped = program_text(recipe)
    assert "step.update" in scoped
    enter = ExtendNameStackContextManager.__enter__

    def enter_others(scope: Any) -> Any:
        """Enter all scopes but those of a step, as flax's."""
        if scope.name in (DATA, UPDATE):
            scope.name = ""
        return enter(scope)

    monkeypatch.setattr(ExtendNameStackContextManager, "__enter__", enter_others)
    plain = program_text(recipe)
    assert "step.update" not in plain
    assert without_metadata(plain) == without_metadata(scoped)


def without_metadata(text: str) -> list[str]:
    """Instructions alone: no names of scopes, no tables of files and lines."""
    lines = [METADATA.sub("", line) for line in text.splitlines()]
    return [line for line in lines if " = " in line]


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.slow
@pytest.mark.mlp
@pytest.mark.parametrize("how", ["train.sink_size=20", "train.mechanism=soft", "train.sink=false"])
def test_profile_does_not_change_the_losses(how: str, tiny: Compose, tmp_path: Path) -> None:
    on = ["profile.mode=on", "profile.start=13", "profile.steps=20"]
    run(tiny(SHORT, how), tmp_path / "plain")
    run(tiny(SHORT, how, *on), tmp_path / "profiled")
    assert len(losses(tmp_path / "plain")) == 90
    assert losses(tmp_path / "profiled") == losses(tmp_path / "plain")
    assert (tmp_path / "profiled" / "profile" / "profile.json").is_file()


@pytest.mark.slow
def test_files_have_the_parts_of_the_time(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny(SHORT, "profile.mode=only", "stages=[data,build,compile,train]")
    summary = run(recipe, tmp_path / "run")
    assert summary.status == "done"
    folder = tmp_path / "run" / "profile"
    found = json.loads((folder / "profile.json").read_text())
    (profile,) = found["profiles"]
    assert profile["coverage"]["named"] > 0.97
    assert 0.9 < profile["coverage"]["parts_of_step"] < 1.1
    assert {"conv_0", "conv_1", "dense_0"} <= {row["layer"] for row in profile["layers"]}
    tails = profile["iteration"]
    parts = tails["data_tail"] + tails["fp_bp"] + tails["update_tail"]
    assert parts == pytest.approx(tails["iteration"])
    assert sum(row["share"] for row in profile["phases"]) == pytest.approx(1)
    assert all(profile["shares"][name] > 0 for name in ("CPU", "memory bandwidth"))  # F-02
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert ElementTree.parse(folder / "picture.svg").getroot().tag.endswith("svg")
    text = (folder / "table.txt").read_text()
    assert f"Verdict: {found['verdict']['name']}: " in text


def test_profiled_executable_passes_calls_on() -> None:
    """Its report is the newest: an executable that is short of memory compiles again."""
    plain = Mock()
    profiled = ProfiledExecutable(plain, 4, 2, lambda: None)
    assert profiled.init() is plain.init.return_value
    assert profiled.put(Mock()) is plain.put.return_value
    assert profiled.loader is plain.loader
    plain.report = Mock()
    assert profiled.report is plain.report


@pytest.mark.medium
def test_trace_is_read_if_warnings_are_errors() -> None:
    """The first trace that a process reads: jaxlib 0.12 with Python 3.13 aborted."""
    script = (
        "import warnings\n"
        "import jax, numpy as np\n"
        "from pipeline.inspect.profiler.trace import Tracer, read_operations\n"
        "double = jax.jit(lambda x: 2 * x)\n"
        "double(np.ones(4)).block_until_ready()\n"
        "tracer = Tracer()\n"
        "tracer.start()\n"
        "double(np.ones(4)).block_until_ready()\n"
        "trace = tracer.stop()\n"
        "warnings.simplefilter('error')\n"
        "print({operation.module for operation in read_operations(trace)})\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "{'jit__lambda'}\n"), ended.stderr


@pytest.mark.slow
def test_profile_command_prints_one_json_object(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = [*TINY, SHORT, "eval.every_steps=30", f"cache.root={cache}", "profile.output=here"]
    assert main(["profile", "--json", *keys]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert "Verdict: " in said.err
    assert (facts["status"], facts["folder"]) == ("done", "here")
    assert (Path(facts["run"]) / "summary.json").is_file()
    written = json.loads((tmp_path / "here" / "profile.json").read_text())
    assert {key: facts[key] for key in written} == written
    host = written["profiles"][0]["host"]
    assert host["events"] > 0
    assert host["step"] == pytest.approx(host["device"] + host["wait"] + host["between"])


@pytest.mark.medium
def test_stages_without_steps_to_trace_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *TINY, "stages=[data,build]"]) == 2
    assert "must have train, whose steps are traced" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.mlp
def test_complete_run_can_be_traced(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny(SHORT, "profile.mode=on", "profile.start=0", "profile.steps=90")
    assert run(recipe, tmp_path / "run").status == "done"
    (profile,) = json.loads((tmp_path / "run/profile/profile.json").read_text())["profiles"]
    assert profile["steps"] == 90
    assert profile["host"]["steps"] == 0


@pytest.mark.slow
def test_profile_has_emulated_and_measured_devices(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny(
        SHORT, "profile.mode=only", "device=ascend910", "stages=[data,build,compile,train]"
    )
    run(recipe, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())
    measured, modelled = found["profiles"]
    assert (measured["source"], modelled["source"]) == ("measured", "modelled")
    assert set(measured) == set(modelled)
    # F-02
    assert measured["shares"]["CPU"] > 0
    assert measured["memory"]["arguments"] > 0
    assert modelled["shares"].keys() >= {"cube", "vector", "ai_cpu", "data"}
    assert sum(modelled["shares"].values()) == pytest.approx(1)
    assert modelled["memory"]
    shared = {row["layer"] for row in measured["layers"]} & {
        row["layer"] for row in modelled["layers"]
    }
    assert {"conv_0", "dense_0"} <= shared
    assert "modelled ms" in (tmp_path / "run" / "profile" / "table.txt").read_text()


@pytest.mark.slow
def test_iterations_and_operators_can_be_left_out(tiny: Compose, tmp_path: Path) -> None:
    """Of the emulated device and of the measured one."""
    stages = "stages=[data,build,compile,train]"
    without = ("profile.training_trace=false", "profile.task_trace=false")
    run(tiny(SHORT, "profile.mode=only", "device=ascend910", stages, *without), tmp_path / "run")
    found = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())
    assert [profile["iteration"] for profile in found["profiles"]] == [None, None]
    assert [profile["operators"] for profile in found["profiles"]] == [[], []]


@pytest.mark.slow
def test_too_short_run_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = ["+recipe=lenet5_digits", *TINY, *MLP, "train.steps=25", f"cache.root={cache}"]
    assert main(["profile", *keys]) == 2
    assert "the run has 25 steps, too few to profile" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.mlp
def test_run_resumed_near_its_end_has_no_profile(tiny: Compose, tmp_path: Path) -> None:
    run(tiny("train.steps=80"), tmp_path)
    summary = run(tiny(SHORT, "profile.mode=on", f"train.resume={tmp_path}"))
    assert (summary.status, summary.steps) == ("done", 90)
    assert "too few to profile" in (tmp_path / "run.log").read_text()
    assert not (tmp_path / "profile").exists()


@pytest.mark.slow
@pytest.mark.mlp
def test_failing_profile_does_not_end_its_run(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_profile, "write_profile", fail)
    summary = run(tiny(SHORT, "profile.mode=on"), tmp_path)
    assert summary.status == "done"
    assert "no profile: " in (tmp_path / "run.log").read_text()
    assert "No space left on device" in (tmp_path / "run.log").read_text()


def test_points_that_no_operator_has_are_named(tiny: Compose) -> None:
    spec = tiny("profile.fp_point=fusion.13", "profile.bp_point=dot.1").profile
    (message,) = run_profile.list_unknown_points(spec, {"fusion.12", "dot.1"})
    assert message == (
        "profile.fp_point = fusion.13: the table has no such operator; did you mean fusion.12? "
        "The point is chosen automatically"
    )


def test_profile_only_with_resume_is_refused(tiny: Compose) -> None:
    with pytest.raises(RecipeError, match="must be null with profile"):
        run_profile.require_profilable(tiny("profile.mode=only", "train.resume=auto"), "cpu")


@pytest.mark.slow
def test_trace_without_operations_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Tracer, "stop", lambda self: setattr(self, "_folder", None) or b"")
    monkeypatch.setattr(Tracer, "start", lambda self: setattr(self, "_folder", "somewhere"))
    assert (
        main(["profile", "+recipe=lenet5_digits", *TINY, *MLP, SHORT, f"cache.root={cache}"]) == 2
    )
    assert "has no operations" in capsys.readouterr().err


def test_device_without_tracing_is_refused(tiny: Compose) -> None:
    with pytest.raises(run_profile.RecipeError, match="metal can't be traced"):
        run_profile.require_profilable(tiny(), "metal")


@pytest.mark.medium
def test_run_with_too_few_steps_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(RUNS / "1.0.0rc1" / "sinks", run_dir)
    assert main(["profile", f"{run_dir}@6"]) == 2
    message = f"error: {run_dir}: has 12 steps; 60 after a step are traced\n"
    assert capsys.readouterr().err == message
