"""Learning rates of a run: the table of its updates and parameter groups, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.config.recipe import TrainSpec
from pipeline.core.errors import RecipeError
from pipeline.engine.schedule import RunSchedule
from pipeline.training.part_specs import ScheduleSpec
from pipeline.training.rate_table import RateFile, TableSchedule


def learning_rates(train: TrainSpec, run: RunSchedule) -> np.ndarray:
    """The rates of each update: float32 (total,), or (total, 1 + rules) where `lr_rules` has any.

    The first column is the main schedule's; each rule has `factor` times that of its own schedule,
    or of the main one. Raises RecipeError where a schedule has no such table.
    """
    main = _table("train.schedule", train.schedule, train, run)
    if not train.lr_rules:
        return main
    columns = [main]
    for number, rule in enumerate(train.lr_rules):
        key = f"train.lr_rules.{number}.schedule"
        own = main if rule.schedule is None else _table(key, rule.schedule, train, run)
        columns.append(own * np.float32(rule.factor))
    return np.stack(columns, axis=1)


def _table(key: str, schedule: ScheduleSpec, train: TrainSpec, run: RunSchedule) -> np.ndarray:
    try:
        return schedule.table(train.optimizer.lr, run.total, run.steps_per_pass)
    except ValueError as error:
        raise RecipeError([_problem(key, error)]) from error


def read_rate_files(train: TrainSpec) -> Mapping[str, RateFile]:
    """Read the files of learning rates by key. Raises RecipeError with what is wrong with each."""
    files, problems = {}, []
    for key, schedule in train.schedules.items():
        if isinstance(schedule, TableSchedule):
            try:
                files[key] = schedule.read()
            except ValueError as error:
                problems.append(_problem(key, error))
    if problems:
        raise RecipeError(problems)
    return files


def fingerprints(files: Mapping[str, RateFile]) -> dict[str, Any]:
    """Fingerprints of files of learning rates, as provenance.json has those of columns."""
    return {
        key: {"shape": file.rates.shape, "dtype": file.dtype, "sha256": file.sha256, "of": "all"}
        for key, file in files.items()
    }


def _problem(key: str, error: ValueError) -> str:
    """A line that begins with the key: that of the file where the error names it."""
    text = str(error)
    return f"{key}.{text}" if text.startswith("file = ") else f"{key}: {text}"
