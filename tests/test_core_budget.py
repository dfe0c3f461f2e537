"""What a reader of a module must load: lines that its top-level imports bring along, at most."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pipeline.stages.runner.run_features import RUN_FEATURES
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig
from tests.core_budget import (
    WATCHED,
    count_lines,
    find_closure,
    list_loaded,
    list_targets,
    main,
)

MOST_LINES = {
    "engine.loop": 3_300,
    "config.recipe": 7_600,
    "training.state": 800,
    "training.step": 6_600,
    "stages.run": 24_800,
    "cli.train": 14_000,
}
"""Most lines of a module and what it brings along. Lower a number when a change allows it."""
QUIET = ("monitor.tensorboard=false", "monitor.sample_images=0")
MOST_LOADED = {
    ("train.steps=1",): (300, 39_900),
    ("+recipe=gpt_text", "train.steps=1"): (300, 40_000),
    ("+recipe=resnet50_cifar10", "stages=[data,build]"): (300, 39_100),
}
"""Most modules and lines that a run loads. Lower a number when a change allows it."""
MOST_TARGETS = 15
"""Most modules of the package that `stages.run` imports."""


@pytest.mark.medium
@pytest.mark.parametrize("name", MOST_LINES)
def test_module_brings_along_at_most_its_budget(name: str) -> None:
    lines = count_lines(find_closure(f"pipeline.{name}"))
    assert lines <= MOST_LINES[name]
    # A budget that is far above the number guards nothing.
    assert lines >= 0.7 * MOST_LINES[name]


@pytest.mark.parametrize(("kind", "most"), [(StepConfig, 14), (TrainState, 6)])
def test_step_and_state_have_few_fields(kind: type[Any], most: int) -> None:
    assert len(fields(kind)) <= most


def test_run_imports_few_modules() -> None:
    assert len(list_targets("pipeline.stages.run")) <= MOST_TARGETS


@pytest.mark.medium
def test_run_brings_along_no_feature() -> None:
    features = {listed.place.partition(":")[0] for listed in RUN_FEATURES}
    assert sorted(features & find_closure("pipeline.stages.run")) == []


@pytest.mark.slow
def test_default_run_loads_only_the_features_that_it_uses() -> None:
    """The autopsy, and the processes: `launch=auto` looks for a launcher."""
    script = (
        "import json, sys; from pipeline import load_recipe; import pipeline.stages.run;"
        "from pipeline.stages.runner.run_features import open_features;"
        "open_features(load_recipe('lenet5_digits')); print(json.dumps(list(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    loaded = set(json.loads(result.stdout.splitlines()[-1]))
    features = {listed.place.partition(":")[0] for listed in RUN_FEATURES}
    used = {"pipeline.inspect.autopsy.run_autopsy", "pipeline.stages.launch.join"}
    assert features & loaded == used


@pytest.mark.slow
@pytest.mark.parametrize("overrides", MOST_LOADED, ids=" ".join)
def test_run_loads_at_most_its_budget(overrides: tuple[str, ...], tmp_path: Path) -> None:
    loaded = list_loaded([*overrides, *QUIET], tmp_path / "run")
    most_modules, most_lines = MOST_LOADED[overrides]
    assert len(loaded) <= most_modules
    assert count_lines(loaded) <= most_lines
    # A budget that is far above the number guards nothing.
    assert count_lines(loaded) >= 0.9 * most_lines


@pytest.mark.medium
def test_command_prints_a_line_for_each_module(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-3]] == list(WATCHED) == list(MOST_LINES)
