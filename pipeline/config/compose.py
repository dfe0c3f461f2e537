"""From recipe files and overrides to a checked `Recipe`. Hydra composes, `check` decides."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from pipeline.config.checks import conflicts
from pipeline.config.chosen import DEFAULT_RECIPE, LENGTHS, resolve_recipe
from pipeline.config.hydra_versions import HYDRA_DEFAULTS
from pipeline.config.overrides import key_of, parse_problems, sets_key, value_of
from pipeline.config.recipe import Recipe
from pipeline.config.references import require_bounded
from pipeline.config.unfit_parts import unfit_parts
from pipeline.core.errors import RecipeError, first_line
from pipeline.core.files.error_text import describe, no_such
from pipeline.core.files.package_paths import CONF
from pipeline.core.files.value_text import show
from pipeline.core.plugins.loading import missing_flag_hint

UNCOMPOSABLE = (
    *(HydraException, OmegaConfBaseException, ValueError),
    *(TypeError, AttributeError, LookupError, AssertionError),
)
"""Errors that Hydra raises for overrides that it can't compose."""

MAX_ROUNDS = 10
"""Attempts to compose, each without the problems found so far, to find the remaining ones."""

_OF_KEYS = re.compile(r"Could not override '|An item is already at '|Could not delete from config")
"""Hydra's messages for a key that is missing, or exists already."""


def load_recipe(name: str = DEFAULT_RECIPE, overrides: Sequence[str] = ()) -> Recipe:
    """Compose a recipe by name or YAML file, with overrides as on the command line.

    Raises RecipeError with every problem found.
    """
    return compose_and_check([f"+recipe={name}", *overrides])


def check(config: DictConfig, overrides: Iterable[str], *, length_replaced: bool = False) -> Recipe:
    """Turn a composed config into a Recipe. Raises RecipeError with every problem found."""
    try:
        require_bounded(cast(dict[str, Any], OmegaConf.to_container(config)))
        tree = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise RecipeError([f"{error.full_key}: {first_line(error)}"]) from error
    except ValueError as error:
        raise RecipeError([str(error)]) from error
    plain = {key: value for key, value in cast(dict[str, Any], tree).items() if key != "hydra"}
    keys = {key_of(override) for override in overrides}
    given = keys & set(LENGTHS)
    checked = _with_length(plain, given) if given else plain
    return check_tree(checked, length_replaced=length_replaced or bool(given), typed=keys)


def check_tree(
    tree: dict[str, Any], *, length_replaced: bool = False, typed: Collection[str] = ()
) -> Recipe:
    """Turn plain data into a Recipe. Raises RecipeError with every problem found.

    `typed` are the keys that the command line gives.
    """
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        unfit = unfit_parts(tree, typed)
        raise RecipeError(describe(error, tree, unfit)) from error
    problems = conflicts(recipe, length_replaced=length_replaced)
    if problems:
        raise RecipeError(problems)
    return recipe


def _with_length(tree: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The tree without the recipe's length, in whatever unit, where the command line gives one."""
    if not isinstance(tree.get("train"), dict):
        return tree
    dropped = {key.removeprefix("train."): None for key in LENGTHS if key not in given}
    return {**tree, "train": {**tree["train"], **dropped}}


def compose_and_check(overrides: Sequence[str], *, length_replaced: bool = False) -> Recipe:
    """Compose and check a recipe, continuing after each problem to report all at once.

    `length_replaced` for a run that exists, which the command line may have shortened. Raises
    RecipeError with every problem found.
    """
    problems: list[str] = []
    remaining = resolve_recipe(overrides)
    tried: list[list[str]] = []
    while True:
        tried.append(remaining)
        try:
            recipe = check(_compose(remaining), remaining, length_replaced=length_replaced)
        except RecipeError as error:
            raise RecipeError([*problems, *error.problems]) from error
        except UNCOMPOSABLE as error:
            found, rest = _explain(error, remaining)
            problems += found
            if rest in tried or len(tried) == MAX_ROUNDS:
                raise RecipeError(problems or [first_line(error)]) from error
            # Once a recipe file is registered under a name, only that name is left.
            remaining = rest if value_of(rest, "recipe") else resolve_recipe(rest)
        else:
            break
    if problems:
        raise RecipeError(problems)
    return recipe


def _compose(overrides: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), job_name="pipeline", **HYDRA_DEFAULTS):
        try:
            return compose("config", overrides)
        except RecursionError as error:
            problem = "`defaults` go in a circle: a file starts from itself, or from one that does"
            raise RecipeError([problem]) from error


def _explain(error: Exception, overrides: list[str]) -> tuple[list[str], list[str]]:
    """The problems that an error of Hydra's stands for, and the overrides without those.

    The overrides are returned unchanged where none can be removed. There may be thousands of them,
    so all with the same kind of problem are found at once.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, problem = _missing_option(error, error.missing_cfg_file)
        return [problem], [item for item in overrides if key_of(item) != group]
    if any(_OF_KEYS.search(str(link)) for link in _chain(error)):
        found, rest = _of_keys(overrides)
        if rest != overrides:
            return found, rest
    wrong = dict(parse_problems(overrides))
    if wrong:
        lines = [f"{show(override)}: {problem}" for override, problem in wrong.items()]
        return lines, [item for item in overrides if item not in wrong]
    culprit, reason = _culprit(overrides)
    if isinstance(reason, MissingConfigException):
        return _explain(reason, overrides)
    problem = f"{show(culprit) if culprit else 'overrides'}: {first_line(reason or error)}"
    return [problem], [item for item in overrides if item != culprit]


def _missing_option(error: MissingConfigException, file: str) -> tuple[str, str]:
    """The group that lacks an option, and the problem."""
    # An option may have slashes, as in //etc.
    group, _, option = file.partition("/")
    problem = f"{group} = {show(option)}: {no_such(group, option, error.options or ())}"
    return group, f"{problem}; {missing_flag_hint()}"


def _of_keys(overrides: list[str]) -> tuple[list[str], list[str]]:
    """Problems of keys that are missing, or exist already, and the overrides without them.

    A missing key is set nevertheless: the check reports what is wrong with it.
    """
    try:
        tree = OmegaConf.to_container(_compose([one for one in overrides if not sets_key(one)]))
    except UNCOMPOSABLE:
        return [], overrides
    problems, rest, added = [], [], set[str]()
    for override in overrides:
        key = key_of(override)
        there = key in added or _has(tree, key.split("."))
        if sets_key(override) and override.startswith("~") and not there:
            problems.append(f"{show(f'~{key}')}: there is no such key")
            continue
        if sets_key(override) and override[0] == "+" and override[1:2] != "+" and there:
            problems.append(f"{show(f'+{key}')}: the key is there already; leave out the +")
        added.add(key)
        typed = override.lstrip("+")
        rest.append(f"++{typed}" if sets_key(override) and typed[0] != "~" else override)
    return list(dict.fromkeys(problems)), rest


def _has(tree: Any, path: Sequence[str]) -> bool:
    """Return whether the tree has a value at the path."""
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _culprit(overrides: list[str]) -> tuple[str | None, Exception | None]:
    """The first override that can't be composed with those before it, and Hydra's error.

    Groups come first, since keys depend on them. Found by bisection.
    """
    ordered = sorted(overrides, key=sets_key)
    composed, refused, reason = 0, len(ordered), None
    while refused - composed > 1:
        middle = (composed + refused) // 2
        try:
            _compose(ordered[:middle])
        except UNCOMPOSABLE as error:
            refused, reason = middle, error
        else:
            composed = middle
    try:
        _compose(ordered[:refused])
    except UNCOMPOSABLE as error:
        reason = error
    return (ordered[refused - 1] if reason else None), reason


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
