"""Runs that faults are injected into: their arguments, files before, and expected results."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from pipeline.__main__ import main as pipeline
from tests.faults.faults import make_counting_settings
from tests.faults.runs import Nursery

RUN = "run"
CACHE = "cache"
DATA = "data"
PROGRAMS = f"{CACHE}/xla-2"
SHORT = (
    "+recipe=lenet5_digits",
    "model=mlp",
    "model.hidden=[16]",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
    "train.epochs=2",
    "train.sink_size=50",
    "checkpoint.every_steps=44",
    "checkpoint.keep=1",
    "train.optimizer.lr=0.001",
    "eval.every_epochs=1",
    f"hydra.run.dir={RUN}",
)
"""88 steps in two sinks and two epochs, each with a checkpoint at its end; the first is deleted."""
STREAMED = ("dataset=records", f"dataset.root={DATA}/digits", "train.feed=stream")
RESUME = f"train.resume={RUN}"
RESUMED_STEP = 44
"""The step that a run is resumed from."""


@dataclass(frozen=True)
class Scenario:
    """A run, and the folder whose files fail."""

    name: str
    root: str
    arguments: Sequence[str]
    expendable: str | None = None
    """A folder that the run doesn't need: it must not fail if only calls in there fail."""


SCENARIOS = (
    Scenario("fresh", RUN, SHORT),
    Scenario(
        "resumed",
        RUN,
        (*SHORT[:3], *SHORT[4:], "monitor.tensorboard=true", RESUME),
    ),
    Scenario("streamed", DATA, (*SHORT, *STREAMED)),
    Scenario("cache", CACHE, SHORT, expendable=PROGRAMS),
)


@dataclass(frozen=True)
class Baseline:
    """A scenario and its run without a fault."""

    scenario: Scenario
    template: Path
    """The folder of a case before the run."""
    cache: Path
    unbroken: Path
    """The run directory of the run without a fault."""
    calls: Counter[str] = field(compare=False)
    """Number of calls of each kind."""

    @property
    def arguments(self) -> Sequence[str]:
        """Arguments of a run in the folder of a case."""
        # A relative path, since JAX's keys of programs have the path of the cache in them.
        cache = CACHE if self.scenario.root == CACHE else self.cache
        return [*self.scenario.arguments, f"cache.root={cache}"]


def run_baseline(scenario: Scenario, folder: Path, nursery: Nursery) -> Baseline:
    """Run a scenario without faults; the files before and after the run stay in `folder`."""
    cache = folder / CACHE
    template = folder / f"{scenario.name}_template"
    template.mkdir()
    if scenario.root == DATA:
        _convert_digits(template / DATA / "digits", cache)
    baseline = Baseline(scenario, template, cache, folder / "nowhere", Counter())
    if RESUME in scenario.arguments:
        _make_killed_run(baseline, nursery)
    if scenario.root == CACHE:
        _make_cache(baseline, nursery)
    # Twice: the first run compiles programs into the cache of the second.
    for name in ("first", "unbroken"):
        place = copy_template(baseline, folder / f"{scenario.name}_{name}")
        log = folder / f"{place.name}.calls"
        environment = make_counting_settings(place / scenario.root, log)
        result = nursery.run(baseline.arguments, place, environment)
        assert result.status == 0, result.console
    calls = Counter(line.split(" ", 1)[0] for line in log.read_text().splitlines())
    return Baseline(scenario, template, cache, place / RUN, calls)


def copy_template(baseline: Baseline, folder: Path) -> Path:
    """Make the folder of a case."""
    shutil.copytree(baseline.template, folder)
    return folder


def _convert_digits(folder: Path, cache: Path) -> None:
    folder.parent.mkdir(parents=True)
    arguments = ["convert", "records", str(folder), "dataset=digits", f"cache.root={cache}"]
    with redirect_stdout(StringIO()):
        assert pipeline(arguments) == 0


def _make_killed_run(baseline: Baseline, nursery: Nursery) -> None:
    """Make a run that was killed between its last checkpoint and its end."""
    arguments = list(baseline.arguments)
    arguments[arguments.index(RESUME)] = "checkpoint.keep=2"
    result = nursery.run(arguments, baseline.template, {})
    assert result.status == 0, result.console
    (baseline.template / RUN / "summary.json").unlink()
    for folder in (baseline.template / RUN / "checkpoints").iterdir():
        if folder.name != str(RESUMED_STEP):
            shutil.rmtree(folder)


def _make_cache(baseline: Baseline, nursery: Nursery) -> None:
    """Make a cache without one of the programs, so that it is both read and written."""
    result = nursery.run(baseline.arguments, baseline.template, {})
    assert result.status == 0, result.console
    shutil.rmtree(baseline.template / RUN)
    programs = sorted((baseline.template / CACHE).rglob("jit_stage-*"))
    assert programs, "a cache has a program of the initialisation"
    for program in programs:
        program.unlink()
