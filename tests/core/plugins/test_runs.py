"""Runs with components of a plug-in: killed and resumed, in sweeps and in several processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests import outcome
from tests.conftest import TINY
from tests.forked import run_forked

pytestmark = pytest.mark.slow

OWN = Path(__file__).with_name("custom_components.py")
CALLBACKS = (
    "[listening, asking, logging, {name: reduce_on_plateau, metric: margin, patience: 1,"
    " factor: 0.9}, {name: stop_at, metric: margin, value: 1000.0}]"
)
RUN = (
    *("+recipe=lenet5_digits", *TINY, "model=mlp", "+model.hidden=[8]", "train.steps=48"),
    *("train.sink_size=8", "checkpoint.every_steps=12", "checkpoint.keep=20"),
    *("eval.every_epochs=null", "eval.every_steps=12", "eval.metrics=[margin]"),
    f"train.callbacks={CALLBACKS}",
)
DATA = ("parallel.mode=data", "parallel.devices=2")
LOGS = ("metrics.jsonl", "evals.jsonl", "scalars.jsonl")
Process = subprocess.CompletedProcess[str]
Start = Callable[..., Process]


@pytest.fixture
def start(cache: Path, tmp_path: Path) -> Start:
    """Run the command with the plug-in, in the test's folder, to be killed at `kill`."""
    return starter(cache, tmp_path)


def starter(cache: Path, folder: Path) -> Start:
    """The function that runs the command in a folder."""
    shutil.copy(OWN, folder / "own.py")

    def go(
        *overrides: str, flags: Sequence[str] = ("--plugin", "own.py"), kill: str = ""
    ) -> Process:
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent), "KILL": kill or ":0"}
        return run_forked([*flags, *RUN, *overrides], folder, environment)

    return go


def done(process: Process) -> None:
    assert process.returncode == 0, process.stderr


def test_kills_change_nothing_and_callbacks_get_each_event_once(
    start: Start, tmp_path: Path
) -> None:
    done(start("hydra.run.dir=whole"))
    run, whole = tmp_path / "run", tmp_path / "whole"
    # The first one comes before anything is saved.
    kills = ("sink:8", "eval:24", "checkpoint:27", "steps:33", "eval:48")
    assert start("hydra.run.dir=run", kill=kills[0]).returncode == -signal.SIGKILL
    for kill in kills[1:]:
        assert start("train.resume=run", kill=kill).returncode == -signal.SIGKILL
    done(start("train.resume=run"))
    for log in LOGS:
        assert (run / log).read_bytes() == (whole / log).read_bytes(), log
    assert outcome.checkpoints(run) == outcome.checkpoints(whole) == [12, 24, 27, 36, 48]
    outcome.assert_equal_arrays(outcome.arrays(run), outcome.arrays(whole))
    for name in ("_Listening", "_Asking"):
        told = outcome.read_lines(run / f"told_{name}.json")[0]
        assert told == outcome.read_lines(whole / f"told_{name}.json")[0]
        events: dict[str, list[int]] = {}
        for event, step, *_ in told:
            events.setdefault(event, []).append(step)
        assert events == {
            "step": list(range(1, 49)),
            "sink": [8, 16, 24, 32, 40, 48],
            "eval": [12, 13, 24, 36, 48],
            "checkpoint": [12, 24, 27, 36, 48],
        }


def test_plugin_is_compared_with_the_resumed_run(start: Start, tmp_path: Path) -> None:
    assert start("hydra.run.dir=run", kill="steps:40").returncode == -signal.SIGKILL
    missing = start("train.resume=run", flags=())
    assert missing.returncode == 2
    assert "there is no such callback" in missing.stderr
    assert "a custom component needs --plugin FILE" in missing.stderr
    with (tmp_path / "own.py").open("a") as file:
        file.write("# changed\n")
    refused = start("train.resume=run")
    assert refused.returncode == 2
    assert "the plug-ins have changed since the run was trained:" in refused.stderr
    assert "own: own.py" in refused.stderr
    allowed = start("train.resume=run", "train.resume_changed=allow")
    done(allowed)
    assert "the plug-ins have changed" in allowed.stdout + allowed.stderr


def test_command_to_resume_names_the_plugin(start: Start, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(
        "from typing import Literal\n"
        "from pipeline.api import Callback, CallbackSpec, component\n"
        "class Failing(Callback):\n"
        "    def on_sink(self, run, report):\n"
        "        raise ValueError('mine')\n"
        "@component('callback')\n"
        "class Spec(CallbackSpec):\n"
        "    name: Literal['failing'] = 'failing'\n"
        "    def build(self): return Failing()\n"
    )
    flags = "--plugin", "own.py", "--plugin=failing.py"
    failed = start("hydra.run.dir=run", "train.callbacks=[failing]", flags=flags)
    assert failed.returncode == 1
    assert failed.stderr == "error: callback Failing, on_sink: ValueError: mine\n"
    resume = next(line for line in failed.stdout.splitlines() if line.startswith("resume"))
    assert " -m pipeline --plugin own.py --plugin failing.py +recipe=" in resume
    assert resume.endswith(" train.resume=./run")


def test_sweep_jobs_have_the_plugin(start: Start, tmp_path: Path) -> None:
    sweep = "-m", "hydra.sweep.dir=sweep", "train.optimizer.lr=0.01,0.02"
    done(start(*sweep))
    for job in ("0", "1"):
        assert outcome.read_summary(tmp_path / "sweep" / job)["metrics"]["margin"] > 0


def test_callbacks_act_equally_in_several_processes(start: Start, tmp_path: Path) -> None:
    """All but to set parameters, which takes one process."""
    callbacks = CALLBACKS.replace("asking, ", "")
    shared = (*DATA, f"train.callbacks={callbacks}")
    done(start(*shared, "hydra.run.dir=one"))
    done(start(*shared, "launch=local", "launch.processes=2", "hydra.run.dir=two"))
    for log in LOGS:
        assert (tmp_path / "one" / log).read_bytes() == (tmp_path / "two" / log).read_bytes(), log
    outcome.assert_equal_arrays(outcome.arrays(tmp_path / "one"), outcome.arrays(tmp_path / "two"))


def test_unsupported_callback_action_ends_all_processes(start: Start, tmp_path: Path) -> None:
    failed = start(*DATA, "launch=local", "launch.processes=2", "hydra.run.dir=run")
    assert failed.returncode == 1
    problem = "parameters can't be set in a run of several processes"
    assert f"callback _Asking, on_sink: ValueError: {problem}" in failed.stderr
    assert max(outcome.checkpoints(tmp_path / "run")) == 16


PLATEAU = "{name: reduce_on_plateau, metric: margin, patience: 1, min_delta: 9.0, factor: 0.5}"
ACTING = f"train.callbacks=[{PLATEAU}]"


@pytest.fixture(scope="module")
def acted(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in sinks of 8 whose learning rate a callback halves."""
    folder = tmp_path_factory.mktemp("acted")
    done(starter(cache, folder)(ACTING, "hydra.run.dir=one"))
    return folder / "one"


@pytest.mark.parametrize(
    "override", ["train.sink=false", "train.sink_size=5", "train.mode=eager", "device=ascend910"]
)
def test_callbacks_do_not_depend_on_execution_mode(
    override: str, acted: Path, start: Start, tmp_path: Path
) -> None:
    """Where they act at evaluations; the ends of sinks are others."""
    done(start(ACTING, override, "hydra.run.dir=other"))
    one, other = (
        [(line["loss"], line["learning_rate"]) for line in outcome.metrics(run_dir)]
        for run_dir in (acted, tmp_path / "other")
    )
    # Operation by operation, last digits are others.
    within = 1e-5 if override == "train.mode=eager" else 0
    np.testing.assert_allclose(one, other, rtol=within)
    assert sorted({rate for _, rate in one}) == pytest.approx([0.0025, 0.005, 0.01])


LATE = """
from typing import Literal
import sys
from pipeline import Trainer, load_recipe
from pipeline.core.errors import RecipeError
from pipeline.api import Callback, CallbackSpec, MetricSpec, component
options = sys.argv[2:]
load_recipe("lenet5_digits", options)
for version in ("first", "second"):
    @component("metric")
    class Named(MetricSpec):
        name: Literal["named"] = "named"
        version: Literal[version] = version
        def zero(self, classes): return 0
        def sums(self, logits, labels, mask): return 0
        def value(self, sums): return 0.0
    recipe = load_recipe("lenet5_digits", [*options, "+eval.metrics=[named]"])
    (metric,) = recipe.eval.metrics
    print("a callback", type(metric) is Named, metric.version)
for attempt in range(2):
    @component("callback")
    class Late(CallbackSpec):
        name: Literal["late"] = "late"
        def build(self):
            return Stop()
    class Stop(Callback):
        def on_sink(self, run, report):
            run.stop(f"attempt {attempt}")
    trainer = Trainer("lenet5_digits", [*options, "train.callbacks=[late]"],
                      run_dir=f"{sys.argv[1]}/{attempt}")
    print(trainer.fit().reason)
try:
    component("callback")(type("Other", (Late,), {"__module__": "other"}))
except ValueError as error:
    print(error)
"""


def test_components_can_be_registered_after_recipe_validation(cache: Path, tmp_path: Path) -> None:
    """And again, as a cell of a notebook is run again."""
    options = [*TINY, "model=mlp", "+model.hidden=[8]", "train.steps=16", f"cache.root={cache}"]
    result = subprocess.run(
        [sys.executable, "-c", LATE, str(tmp_path), *options], capture_output=True, text=True
    )
    said = [line for line in result.stdout.splitlines() if line.startswith(("a callback", "callb"))]
    assert said == [
        "a callback True first",
        "a callback True second",
        "a callback stopped it: attempt 0",
        "a callback stopped it: attempt 1",
        "callback 'late' is already __main__.Late",
    ], result.stderr
