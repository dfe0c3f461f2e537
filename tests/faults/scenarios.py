"""Runs into which faults are put: what they are given, what is there before, what must be after."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from pipeline.__main__ import main as pipeline
from tests.faults.faults import counting
from tests.faults.runs import Nursery

RUN, CACHE, DATA = "run", "cache", "data"
"""Folders of a case: the run directory, the cache, a dataset."""
PROGRAMS = f"{CACHE}/xla-2"
SHORT = (
    "+recipe=lenet5_digits",
    "model=mlp",
    "model.hidden=[16]",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
    "train.passes=2",
    "train.sink_size=50",
    "checkpoint.every_steps=44",
    "checkpoint.keep=1",
    "train.optimizer.lr=0.001",
    "eval.every_passes=1",
    f"hydra.run.dir={RUN}",
)
"""88 steps in two sinks and two epochs, each with a checkpoint at its end; the first one goes."""
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
    """A folder that the run must do without, where calls fail in there alone."""


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
class Prepared:
    """A scenario that has been run once without a fault."""

    scenario: Scenario
    template: Path
    """What a case's folder is a copy of."""
    cache: Path
    unbroken: Path
    """The run directory of the run without a fault."""
    calls: Counter[str] = field(compare=False)
    """How many calls of each kind it made."""

    @property
    def arguments(self) -> Sequence[str]:
        """Those of a run in a case's folder."""
        # By a relative path: JAX's keys of programs have the path of the cache in them.
        cache = CACHE if self.scenario.root == CACHE else self.cache
        return [*self.scenario.arguments, f"cache.root={cache}"]


def prepare(scenario: Scenario, folder: Path, nursery: Nursery) -> Prepared:
    """Run a scenario without faults, and keep what its cases begin with and must end as."""
    cache, template = folder / CACHE, folder / f"{scenario.name}_template"
    template.mkdir()
    if scenario.root == DATA:
        _convert_digits(template / DATA / "digits", cache)
    prepared = Prepared(scenario, template, cache, folder / "nowhere", Counter())
    if RESUME in scenario.arguments:
        _make_killed_run(prepared, nursery)
    if scenario.root == CACHE:
        _make_cache(prepared, nursery)
    # Twice: the first one compiles what the second finds in the cache.
    for name in ("first", "unbroken"):
        place = begin(prepared, folder / f"{scenario.name}_{name}")
        log = folder / f"{place.name}.calls"
        environment = counting(place / scenario.root, log)
        ended = nursery.run(prepared.arguments, place, environment)
        assert ended.status == 0, ended.console
    calls = Counter(line.split(" ", 1)[0] for line in log.read_text().splitlines())
    return Prepared(scenario, template, cache, place / RUN, calls)


def begin(prepared: Prepared, folder: Path) -> Path:
    """Make the folder of a case."""
    shutil.copytree(prepared.template, folder)
    return folder


def _convert_digits(folder: Path, cache: Path) -> None:
    folder.parent.mkdir(parents=True)
    arguments = ["convert", "records", str(folder), "dataset=digits", f"cache.root={cache}"]
    with redirect_stdout(StringIO()):
        assert pipeline(arguments) == 0


def _make_killed_run(prepared: Prepared, nursery: Nursery) -> None:
    """A run that was killed between its last checkpoint and its end."""
    arguments = list(prepared.arguments)
    arguments[arguments.index(RESUME)] = "checkpoint.keep=2"
    ended = nursery.run(arguments, prepared.template, {})
    assert ended.status == 0, ended.console
    (prepared.template / RUN / "summary.json").unlink()
    for folder in (prepared.template / RUN / "checkpoints").iterdir():
        if folder.name != str(RESUMED_STEP):
            shutil.rmtree(folder)


def _make_cache(prepared: Prepared, nursery: Nursery) -> None:
    """A cache that lacks one of the programs, so that it is both read and written."""
    ended = nursery.run(prepared.arguments, prepared.template, {})
    assert ended.status == 0, ended.console
    shutil.rmtree(prepared.template / RUN)
    programs = sorted((prepared.template / CACHE).rglob("jit_stage-*"))
    assert programs, "a cache has a program of the initialisation"
    for program in programs:
        program.unlink()
