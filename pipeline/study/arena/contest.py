"""Declarations of an arena before its first run: workloads, values of a key, their search spaces.

Every value gets the same number of trials. A space has the same width for each value of the key,
and trial i is at the same place of each space: a searched key has one axis for all values. Places
are a sequence of low discrepancy (Roberts 2018, the generalized golden ratio), shifted by a number
that the seed draws, so an arena with more trials has the trials of a smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pipeline.config.compose import compose_and_check
from pipeline.config.overrides import find_unparsable, get_key, list_values
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import schedule_run
from pipeline.core.errors import RecipeError, UsageError
from pipeline.data.random import seed_words, uniforms
from pipeline.stages.data import load_data

OPTIMIZER = "optimizer"
RATE = "train.optimizer.lr"
DEFAULT_OPTIMIZERS = ("adamw", "momentum", "lion", "muon")
LEAST_VALUES = 2
MOST_VALUES = 6
DECADES_EACH_SIDE = 1.5
"""Decades of a learning rate's space on each side of its centre."""
CENTRES = {
    "sgd": 0.1,
    "momentum": 0.03,
    "lars": 0.3,
    "lamb": 0.01,
    "adagrad": 0.03,
    "rmsprop": 0.001,
    "lion": 0.0005,
    "muon": 0.005,
    "adafactor": 0.01,
    "schedule_free_sgd": 1.0,
    "schedule_free_adamw": 0.01,
}
"""Centre of the learning rates of an optimizer; of others it is 0.003."""
OTHER_CENTRE = 0.003
PARTNERS: Mapping[str, Sequence[str]] = {
    "schedule_free_sgd": ("schedule=constant",),
    "schedule_free_adamw": ("schedule=constant",),
}
"""Overrides that belong to an optimizer: averaged weights take the place of a decaying rate."""
FOLD = ("+dataset.folds.count=5", "+dataset.folds.index=0")
"""Trials train on four folds of the training split and evaluate the fifth."""
EVALUATIONS = 20
"""Evaluations of a run of the arena, at most."""
QUIET = (
    "stages=[data,build,compile,train,eval]",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
    "train.resume=null",
    "autotune=off",
)
"""Keys of all runs. With tuned lowerings the bits of a run would depend on times."""
LENGTHS = ("train.steps", "train.epochs", "train.sink_epochs")


def _list_length_keys(steps: int, period: int) -> list[str]:
    return [
        f"train.steps={steps}",
        f"eval.every_steps={period}",
        "eval.every_epochs=null",
        "eval.every_seconds=null",
    ]


SET_HERE = frozenset(
    {
        *("seed", "dataset.folds", "hydra"),
        *(get_key(item) for item in (*QUIET, *_list_length_keys(1, 1))),
    }
) - {*LENGTHS}
"""Keys and sections that the arena sets."""
KEPT = (*SET_HERE, *LENGTHS)
"""Keys that aren't searched. A recipe may have a length, which is converted to steps."""
DIGITS = 4
"""Digits of a number of a trial."""
LEAST_NUMBERS = 50
"""Numbers that a range must have, with more digits if it is narrow."""


@dataclass(frozen=True)
class Workload:
    """A recipe with overrides, and the metric of its evaluation split that is compared."""

    name: str
    overrides: tuple[str, ...]
    """The recipe and its keys, without length, seed and evaluations."""
    steps: int
    metric: str | None
    """None: the main metric of the runs."""
    evaluations: int = EVALUATIONS
    """Evaluations of a run, at most."""

    @property
    def period(self) -> int:
        """Steps between two evaluations."""
        return math.ceil(self.steps / self.evaluations)

    def list_keys(self) -> list[str]:
        """Return the overrides of all runs, without those of a value, a trial or a seed."""
        return [*self.overrides, *QUIET, *_list_length_keys(self.steps, self.period)]


def _make_shipped(name: str, recipe: str, steps: int, metric: str, *keys: str) -> Workload:
    return Workload(name, (f"+recipe={recipe}", *keys), steps, metric)


SHIPPED = (
    _make_shipped("digits", "lenet5_digits", 200, "accuracy"),
    _make_shipped("halves", "digit_halves", 200, "accuracy"),
    _make_shipped("table", "breast_cancer_mlp", 120, "loss"),
    _make_shipped("regression", "diabetes_mlp", 120, "loss"),
    _make_shipped("series", "mnist1d_cnn", 400, "accuracy"),
    _make_shipped("sound", "audio_vowels", 100, "accuracy"),
    _make_shipped(
        "text",
        "gpt_text",
        200,
        "loss",
        "model.features=64",
        "model.hidden=256",
        "model.blocks=2",
        "dataset.length=32",
        "train.batch_size=16",
        "train.schedule.warmup_steps=20",
    ),
    _make_shipped("retrieval", "two_towers_docstrings", 120, "recall_at_1"),
)
"""Workloads that need no download and take seconds each."""


@dataclass(frozen=True)
class SearchRange:
    """A searched key, from `low` to `high`, evenly by its logarithm."""

    key: str
    low: float
    high: float

    def choose(self, place: float) -> float:
        """Return the number at a place from 0 to 1: four digits, or more in a narrow range."""
        number = self.low * (self.high / self.low) ** place
        decades = math.log10(self.high) - math.log10((self.high - self.low) / LEAST_NUMBERS)
        rounded = float(f"{number:.{max(DIGITS, math.ceil(decades))}g}")
        return min(max(rounded, self.low), self.high)


@dataclass(frozen=True)
class ContestBudget:
    """How many runs each value gets."""

    trials: int
    seeds: int


@dataclass(frozen=True)
class Contest:
    """Workloads, values of a key, and the budget of each value."""

    key: str
    values: tuple[str, ...]
    baseline: str
    workloads: tuple[Workload, ...]
    trials: int
    num_seeds: int
    """Number of fresh seeds of the final comparison."""
    seed: int
    searches: tuple[tuple[str | None, SearchRange], ...] = ()
    """Ranges by value, in place of the declared ones; None: of all values."""
    tunes_on_fold: bool = True
    """Whether trials are judged on a fold of the training split; else on the evaluation split."""
    earlier_budgets: tuple[ContestBudget, ...] = ()
    """Smaller budgets with which the arena was run before, the first one first."""

    def list_ranges(self, workload: Workload, value: str) -> tuple[SearchRange, ...]:
        """Return the space of a value, empty if nothing is tuned."""
        typed = {(owner, get_key(item.key)): item for owner, item in self.searches}
        ranges: list[SearchRange] = []
        for key in self._list_axes():
            item = typed.get((value, key)) or typed.get((None, key))
            if item is None and key == RATE:
                centre = self._find_centre(workload, value)
                factor = 10**DECADES_EACH_SIDE
                bounds = (float(f"{number:.3g}") for number in (centre / factor, centre * factor))
                item = SearchRange(RATE, *bounds)
            if item is not None:
                ranges.append(item)
        return tuple(ranges)

    def _list_axes(self) -> list[str]:
        """Return the searched keys of all values in the order of the axes of places."""
        rate = [] if get_key(self.key) == RATE else [RATE]
        return list(dict.fromkeys([*(get_key(item.key) for _, item in self.searches), *rate]))

    def _find_centre(self, workload: Workload, value: str) -> float:
        if self.key == OPTIMIZER:
            return CENTRES.get(value, OTHER_CENTRE)
        return _read_rate((*workload.list_keys(), *self.list_value_keys(value)))

    def list_value_keys(self, value: str) -> list[str]:
        """Return the overrides that choose a value."""
        partners = PARTNERS.get(value, ()) if self.key == OPTIMIZER else ()
        return [f"{self.key}={value}", *partners]

    def list_trials(self, workload: Workload, value: str) -> list[dict[str, float]]:
        """Return the numbers of each trial by key; one trial without keys if nothing is tuned."""
        ranges = self.list_ranges(workload, value)
        if not ranges:
            return [{}]
        axes = self._list_axes()
        return [
            {item.key: item.choose(float(row[axes.index(get_key(item.key))])) for item in ranges}
            for row in draw_places(self.seed, self.trials, len(axes))
        ]

    @property
    def tuning_seed(self) -> int:
        """Seed of all trials."""
        return self.seed

    @property
    def final_seeds(self) -> range:
        """Seeds of the final comparison, which no trial has used."""
        return range(self.seed + 1, self.seed + 1 + self.num_seeds)

    def compose(
        self,
        workload: Workload,
        value: str,
        numbers: Mapping[str, float],
        seed: int,
        *,
        is_trial: bool = False,
    ) -> Recipe:
        """Return the recipe of a run. Trials evaluate a fold if the contest tunes on it.

        Raises RecipeError.
        """
        return compose_and_check(
            [
                *workload.list_keys(),
                *self.list_value_keys(value),
                *(f"{key}={number!r}" for key, number in numbers.items()),
                *(FOLD if is_trial and self.tunes_on_fold else ()),
                f"seed={seed}",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what is declared, for JSON."""
        spaces = {
            workload.name: {
                value: {
                    item.key: [item.low, item.high] for item in self.list_ranges(workload, value)
                }
                for value in self.values
            }
            for workload in self.workloads
        }
        return {
            "key": self.key,
            "values": list(self.values),
            "baseline": self.baseline,
            "trials": self.trials,
            "seeds": list(self.final_seeds),
            "tuning_seed": self.tuning_seed,
            "tunes_on_fold": self.tunes_on_fold,
            "earlier_budgets": [vars(budget) for budget in self.earlier_budgets],
            "workloads": {
                item.name: {"keys": item.list_keys(), "metric": item.metric}
                for item in self.workloads
            },
            "spaces": spaces,
        }


@lru_cache(maxsize=64)
def _read_rate(overrides: tuple[str, ...]) -> float:
    return compose_and_check(overrides).train.optimizer.lr


def draw_places(seed: int, count: int, axes: int) -> np.ndarray:
    """Return places in the unit cube, float64 (count, axes); the first ones don't depend on
    `count`."""
    # The root above 1 of x^(axes + 1) = x + 1; for one axis it is the golden ratio.
    ratio = 2.0
    for _ in range(64):
        ratio = (1 + ratio) ** (1 / (axes + 1))
    steps = ratio ** -np.arange(1.0, axes + 1)
    shift = uniforms(np, seed_words(seed), 0, np.zeros(1, np.uint32), 0, axes)[0]
    return (shift.astype(np.float64) + np.outer(np.arange(1, count + 1), steps)) % 1


def make_custom_workload(overrides: Sequence[str], metric: str | None) -> Workload:
    """Return the workload of a user's recipe, with its length in steps.

    Raises RecipeError for a wrong recipe, a key that the arena sets otherwise, a section with such
    a key or a length, or a length in time.
    """
    problems = [
        f"{key}: is set by arena"
        for item in overrides
        if item.lstrip("+") not in QUIET
        for key in _list_set_keys(item)
        if is_in_section(key, SET_HERE)
        or key.startswith("hydra/")
        or (key in LENGTHS and key != get_key(item))
    ]
    if problems:
        raise RecipeError(problems)
    recipe = compose_and_check([*overrides, *QUIET])
    if recipe.train.deadline is not None:
        raise RecipeError(f"train.{recipe.train.deadline}: must be a length in steps for arena")
    if recipe.dataset.folds is not None:
        raise RecipeError("dataset.folds: is set by arena, whose trials evaluate a fold")
    dataset = load_data(recipe)
    steps = schedule_run(recipe.train, dataset.train_order.steps_per_epoch).total
    remaining = tuple(item for item in overrides if get_key(item) not in LENGTHS)
    return Workload(recipe.name, remaining, steps, metric)


def is_in_section(key: str, sections: Iterable[str]) -> bool:
    """Return whether a key is one of `sections` or inside of one."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def _list_set_keys(override: str) -> list[str]:
    """Return the key of an override, or the keys inside of a section that is typed in braces."""
    key = get_key(override)
    if not override.partition("=")[2].startswith("{") or any(find_unparsable([override])):
        return [key]
    try:
        section = OverridesParser.create().parse_override(override).value()
    except HydraException:
        return [key]  # The composition reports it.

    def walk(key: str, value: Any) -> Iterator[str]:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from walk(f"{key}.{name}", inner)
        else:
            yield key

    return list(walk(key, section))


def parse_values(words: str, key: str, text: str) -> tuple[str, ...]:
    """Return the values of a key in a text, as Hydra writes them, so that equal ones are equal.

    Raises UsageError about `words`, the option as typed, if the text can't be parsed.
    """
    try:
        return tuple(list_values(key, text))
    except ValueError as error:
        raise UsageError([words], str(error)) from error


def parse_searches(
    texts: Sequence[str], key: str, values: Sequence[str]
) -> tuple[tuple[str | None, SearchRange], ...]:
    """Parse ranges, at most one for a searched key and a value. Raises UsageError."""
    searches: dict[tuple[str | None, str], tuple[str | None, SearchRange]] = {}
    for text in texts:
        owner, item = parse_search(text, key, values)
        place = (owner, get_key(item.key))
        if place in searches:
            raise UsageError([f"--search {text}"], "must be the only range of its key")
        searches[place] = (owner, item)
    return tuple(searches.values())


def parse_search(text: str, key: str, values: Sequence[str]) -> tuple[str | None, SearchRange]:
    """Parse `[VALUE:]KEY=LOW,HIGH`, in which VALUE is one of the values of `key`.

    Raises UsageError.
    """
    rule = "must be KEY=LOW,HIGH or VALUE:KEY=LOW,HIGH, with numbers 0 < LOW < HIGH"
    words = [f"--search {text}"]
    head, equals, bounds = text.partition("=")
    owner, colon, searched = head.rpartition(":")
    try:
        low, high = (float(word) for word in bounds.split(","))
    except ValueError as error:
        raise UsageError(words, rule) from error
    if not equals or not searched or not 0 < low < high < math.inf:
        raise UsageError(words, rule)
    name, compared = get_key(searched), get_key(key)
    # The rate of a compared section is tuned, if that section isn't the rate itself.
    is_inside = is_in_section(name, [compared]) and (name == compared or name != RATE)
    if is_inside or is_in_section(compared, [name]):
        raise UsageError(words, f"must not search {compared}, which arena compares")
    if any(is_in_section(name, [item]) or is_in_section(item, [name]) for item in KEPT):
        raise UsageError(words, f"must not search {name}, which arena sets")
    if not colon:
        return None, SearchRange(searched, low, high)
    owners = parse_values(words[0], key, owner)
    if len(owners) != 1 or owners[0] not in values:
        raise UsageError(words, f"{owner} must be one of {', '.join(values)}")
    return owners[0], SearchRange(searched, low, high)


def require_values(option: str, values: Sequence[str]) -> None:
    """Raise UsageError if values of an option are too few, too many or equal."""
    words = [f"{option} {','.join(values)}"]
    if not LEAST_VALUES <= len(values) <= MOST_VALUES:
        raise UsageError(words, f"must be {LEAST_VALUES} to {MOST_VALUES} values")
    if len(set(values)) < len(values):
        raise UsageError(words, "must be different values")


def choose_baseline(key: str, values: Sequence[str], typed: str | None) -> str:
    """Return the typed baseline, else adamw or the first value. Raises UsageError."""
    if typed is None:
        return "adamw" if "adamw" in values else values[0]
    words = [f"--baseline {typed}"]
    parsed = parse_values(words[0], key, typed)
    if len(parsed) != 1 or parsed[0] not in values:
        raise UsageError(words, f"must be one of {', '.join(values)}")
    return parsed[0]
