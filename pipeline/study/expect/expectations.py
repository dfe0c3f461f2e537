"""Section `expect` of a recipe: what a run of it must reach.

    expect:
      loss@100: recorded          # or a number with a tolerance, such as 0.76 +- 2%
      accuracy: ">= 0.985"
      step_ms: "<= 1.2x"          # of the other side
      learns: true

A key is a figure of the run's summary, or NAME@STEP of metrics.jsonl.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from pipeline.config.compose import compose_and_check, compose_config
from pipeline.config.files import find_recipes
from pipeline.config.hydra_options import resolve_recipe
from pipeline.config.recipe import Recipe
from pipeline.config.recipe_file import YAML, read_recipe_file
from pipeline.core.errors import RecipeError, UsageError
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.paths import expand_home
from pipeline.core.files.value_text import show
from pipeline.study.runs.ranking import directions
from pipeline.training.state import Record

SECTION = "expect"
LEARNS = "learns"
RECORDED = "recorded"
TIMES = ("step_ms", "median_step_ms", "train_s", "total_s")
"""Times of a summary."""
STEP_FIGURES = Record._fields
"""Figures of every step in metrics.jsonl."""
FORMS = "a bound as in '>= 0.98' or '<= 1.2x', recorded, or a number as in 0.76 +- 2%"
MAX_STEP = 10**12
"""Step after the last of any run."""
_NUMBER = r"[+-]?(?:\d{1,30}\.?\d{0,30}|\.\d{1,30})(?:e[+-]?\d{1,3})?"
_BOUND = re.compile(rf"(<=|>=|<|>) ?({_NUMBER})(x?)")
_VALUE = re.compile(rf"({RECORDED}|{_NUMBER})(?: ?\+- ?({_NUMBER})(%?))?")
_KEY = re.compile(r"(\w{1,100})(?:@(\d{1,12}))?")
_HOLDS: Mapping[str, Callable[[float, float], bool]] = {"<=": le, ">=": ge, "<": lt, ">": gt}


@dataclass(frozen=True)
class FigureBound:
    """A figure on one side of a number."""

    sign: str
    number: float
    is_factor: bool
    """Whether the number is a multiple of the other side's figure."""

    @property
    def is_upper(self) -> bool:
        """Whether smaller figures meet the bound."""
        return self.sign in ("<=", "<")

    def holds(self, figure: float) -> bool:
        """Return whether a figure, or its multiple, meets the bound."""
        return _HOLDS[self.sign](figure, self.number)


@dataclass(frozen=True)
class FigureValue:
    """A figure that equals a value."""

    value: float | None
    """The value; None: the recorded one."""
    tolerance: float | None
    """Largest difference; None: equal bits."""
    is_share: bool
    """Whether the tolerance is a share of the value."""

    def holds(self, figure: float, value: float) -> bool:
        """Return whether a figure is as near to a value as the tolerance allows."""
        if self.tolerance is None:
            return figure == value
        return abs(figure - value) <= self.tolerance * (abs(value) if self.is_share else 1)


@dataclass(frozen=True)
class Expectation:
    """A key of the section and its rule."""

    key: str
    text: str
    name: str
    """Name of the figure."""
    step: int | None
    """The step of metrics.jsonl that has the figure; None: the run's summary has it."""
    rule: FigureBound | FigureValue | None
    """None: the run learns."""

    @property
    def needs_other_side(self) -> bool:
        """Whether the rule compares with recorded values or another side."""
        match self.rule:
            case FigureBound(is_factor=is_factor):
                return is_factor
            case FigureValue(value=value):
                return value is None
        return False

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


@dataclass(frozen=True)
class RecipeTest:
    """A recipe and its expectations."""

    name: str
    file: Path
    recipe: Recipe
    expectations: tuple[Expectation, ...]

    @property
    def steps(self) -> int | None:
        """The step after which all figures are known; None: the end of the run."""
        steps = [expectation.step for expectation in self.expectations]
        return None if None in steps else max(cast(list[int], steps))


def parse_expectations(section: Any) -> tuple[Expectation, ...]:
    """Parse a section. Raises RecipeError with every problem."""
    if not isinstance(section, dict) or not section:
        raise RecipeError([f"{SECTION} = {show(section)}: must be a section of figures"])
    expectations: list[Expectation] = []
    problems: list[str] = []
    for key, value in section.items():
        if value is None:  # removed from what a base expects
            continue
        try:
            expectations.append(_parse_expectation(str(key), value))
        except ValueError as error:
            problems.append(f"{SECTION}.{key} = {show(value)}: {error}")
    if problems:
        raise RecipeError(problems)
    if not expectations:
        raise RecipeError([f"{SECTION}: all figures are null; must have one"])
    return tuple(expectations)


def _parse_expectation(key: str, value: Any) -> Expectation:
    """Parse a key and its value. Raises ValueError if either is wrong."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError("the key must be a figure, or a figure of a step as in loss@100")
    name = match[1]
    step = None if match[2] is None else int(match[2])
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if key == LEARNS:
        if value is not True:
            raise ValueError("must be true; leave it out instead")
        return Expectation(key, text, name, step, None)
    if step == 0:
        raise ValueError("steps count from 1")
    choices = STEP_FIGURES if step else (LEARNS, *TIMES, *directions())
    # Figures of training samples have a prefix.
    if name not in choices and (step or name.removeprefix("train_") not in directions()):
        noun = "figure of a step" if step else "figure of a run"
        raise ValueError(explain_unknown_name(noun, name, choices))
    return Expectation(key, text, name, step, _parse_rule(name, value))


def _parse_rule(name: str, value: Any) -> FigureBound | FigureValue:
    """Parse the rule of a figure. Raises ValueError for another form."""
    text = " ".join(value.split()) if isinstance(value, str) else ""
    if bound := _BOUND.fullmatch(text):
        number = float(bound[2])
        is_factor = bool(bound[3])
        if is_factor and number <= 0:
            raise ValueError("a multiple must be above 0")
        return FigureBound(bound[1], number, is_factor)
    match = _VALUE.fullmatch(text)
    if match is None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        what = "a number needs a tolerance; " if is_number else ""
        raise ValueError(f"{what}must be {FORMS}")
    figure, tolerance, percent = match.groups()
    if tolerance is None and figure != RECORDED:
        raise ValueError(f"a number needs a tolerance; must be {FORMS}")
    if tolerance is not None and float(tolerance) < 0:
        raise ValueError("a tolerance must be at least 0")
    if figure == RECORDED and name in TIMES:
        raise ValueError("a time never repeats; must be a bound as in '<= 1.2x'")
    return FigureValue(
        None if figure == RECORDED else float(figure),
        None if tolerance is None else float(tolerance) / (100 if percent else 1),
        bool(percent),
    )


def read_tested_recipe(name: str) -> RecipeTest:
    """Read a recipe, by its name or file. Raises RecipeError with every problem."""
    overrides = [f"+recipe={name}"]
    recipe = compose_and_check(overrides)
    config = compose_config(resolve_recipe(overrides))
    section = OmegaConf.to_container(config).get(SECTION)  # type: ignore[union-attr]
    if section is None:
        raise RecipeError([f"{name}: has no section {SECTION}, which says what a run must reach"])
    file = expand_home(Path(name)) if name.endswith(YAML) else find_recipes(Path.cwd())[name]
    expectations = parse_expectations(section)
    total = recipe.train.end_step or recipe.train.steps
    if late := [item.key for item in expectations if total and (item.step or 0) > total]:
        raise RecipeError(
            [f"{SECTION}.{key}: the run ends at step {total:,}; null removes it" for key in late]
        )
    return RecipeTest(name, file, recipe, expectations)


def find_tested_recipes(names: Sequence[str]) -> list[RecipeTest]:
    """Read recipes by name or file; without names, those in `recipes/` that have the section.

    Raises RecipeError with every problem of the recipes, UsageError if none has the section.
    """
    if not names:
        files = sorted(Path("recipes").glob("*.yaml"))
        names = [str(file) for file in files if SECTION in read_recipe_file(file)]
    if not names:
        rule = f"none of them has a section {SECTION}; name a recipe that has one"
        raise UsageError(["recipes/*.yaml"], rule)
    recipes: list[RecipeTest] = []
    problems: list[str] = []
    for name in dict.fromkeys(names):
        try:
            recipes.append(read_tested_recipe(name))
        except RecipeError as error:
            several = len(set(names)) > 1
            problems += [f"{name}: {text}" if several else text for text in error.problems]
    if problems:
        raise RecipeError(problems)
    return recipes
