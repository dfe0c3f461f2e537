"""Search space of a study: Optuna's distributions for Hydra's sweep syntax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from pipeline.config.defaults import mark_optional_keys
from pipeline.config.overrides import find_parse_problems, get_key
from pipeline.core.errors import RecipeError
from pipeline.core.files.value_text import show

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def read_space(arguments: Sequence[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
    """Return the keys to search with their distributions, and the fixed overrides.

    Raises RecipeError for an invalid override or range, and without a key to search.
    """
    problems = [
        f"{show(override)}: {problem}" for override, problem in find_parse_problems(arguments)
    ]
    if problems:
        raise RecipeError(problems)
    space: dict[str, BaseDistribution] = {}
    fixed: list[str] = []
    for override in OverridesParser.create().parse_overrides(list(arguments)):
        if override.is_sweep_override():
            space[_name_key(override)] = _make_distribution(override)
        else:
            assert override.input_line is not None
            fixed.append(override.input_line)
    if not space:
        examples = "'train.optimizer.lr=tag(log,interval(0.001,0.1))' or train.batch_size=16,32"
        raise RecipeError(f"hydra/sweeper = optuna: must have a key to search, such as {examples}")
    return space, fixed


def _name_key(override: Override) -> str:
    """Return a key's name for Optuna, without a prefix `++` if `to_overrides` adds it."""
    name = override.get_key_element()
    plain = get_key(name)
    return plain if mark_optional_keys([f"{plain}="]) != [f"{plain}="] else name


def _make_distribution(override: Override) -> BaseDistribution:
    """Return the distribution of a sweep: an interval, a range with its steps, or a list."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    try:
        if isinstance(value, IntervalSweep):
            low = value.start
            high = value.end
            assert low is not None
            assert high is not None
            log = "log" in value.tags
            if isinstance(low, int) and isinstance(high, int):
                return IntDistribution(low, high, log=log)
            return FloatDistribution(low, high, log=log)
        if not isinstance(value, RangeSweep) or value.shuffle:
            return CategoricalDistribution(list(override.sweep_string_iterator()))
        values = list(value.range())
        if not values:
            raise ValueError("the range has no values; must have one")
        step = abs(value.step)
        if all(isinstance(item, int) for item in values):
            return IntDistribution(int(min(values)), int(max(values)), step=int(step))
        return FloatDistribution(float(min(values)), float(max(values)), step=float(step))
    except ValueError as error:
        raise RecipeError(f"{override.input_line}: {error}") from error


def to_overrides(params: Mapping[str, Any]) -> list[str]:
    """Return the overrides for a trial's values."""
    return mark_optional_keys(f"{key}={value}" for key, value in params.items())


def vary_one_at_a_time(space: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    """Return values of trials, so that every listed choice is in a trial.

    Each trial varies one key; the other keys have their first value. A range has only its lowest
    value: if a recipe can be composed with one number, it can be with any.
    """
    values_by_key = {key: _list_values(distribution) for key, distribution in space.items()}
    first = {key: values[0] for key, values in values_by_key.items()}
    trials = [first]
    for key, values in values_by_key.items():
        trials += [{**first, key: value} for value in values[1:]]
    return trials


def _list_values(distribution: BaseDistribution) -> Sequence[Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return (distribution.low,)
