"""Composition of a checked `Recipe` from recipe files and overrides, by Hydra."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from pipeline.config.checks import find_conflicts
from pipeline.config.files import find_recipes
from pipeline.config.hydra_options import (
    DEFAULT_RECIPE,
    HYDRA_DEFAULTS,
    LENGTHS,
    find_stored_recipe,
    resolve_recipe,
    store_option,
)
from pipeline.config.overrides import find_parse_problems, get_key, sets_key, value_of
from pipeline.config.recipe import Recipe
from pipeline.config.recipe_file import require_bounded
from pipeline.core.errors import RecipeError, first_line
from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.paths import CONF
from pipeline.core.files.tree_diff import TreePath, find_value, format_key
from pipeline.core.files.value_text import show
from pipeline.core.plugins.loading import suggest_missing_flag

_NOTHING = object()
OTHER_SECTIONS = ("hydra", "expect")
"""Sections of a composed config that no run reads: Hydra's, and the one for the command `test`."""

UNCOMPOSABLE = (
    HydraException,
    OmegaConfBaseException,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
)
"""Errors that Hydra raises for overrides that it can't compose."""
MAX_ROUNDS = 10
"""Most attempts to compose a recipe. Each omits the overrides that earlier attempts reported."""
SEVERAL_VALUES = "Ambiguous value for argument"
"""Beginning of Hydra's message for `key=1,2`."""
_KEY_ERROR = re.compile(
    r"Could not override '|An item is already at '|Could not delete from config"
)
"""Hydra's messages for a key that is missing, or exists already."""


def load_recipe(name: str = DEFAULT_RECIPE, overrides: Sequence[str] = ()) -> Recipe:
    """Compose a recipe by name or YAML file, with overrides as on the command line.

    Raises RecipeError with every problem found, ValueError for one text as `overrides`.
    """
    if isinstance(overrides, str):
        # Each of its letters would be an override.
        raise ValueError(f"overrides = {overrides!r}: must be a list, as in [{overrides!r}]")
    return compose_and_check([f"+recipe={name}", *overrides])


def check(config: DictConfig, overrides: Iterable[str], *, length_replaced: bool = False) -> Recipe:
    """Make a Recipe of a composed config. Raises RecipeError with every problem found.

    If `overrides` set a length, it replaces the config's length, in any unit.
    """
    try:
        require_bounded(cast(dict[str, Any], OmegaConf.to_container(config)))
        tree = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        raise RecipeError([f"{error.full_key}: {first_line(error)}"]) from error
    except ValueError as error:
        raise RecipeError([str(error)]) from error
    plain = {key: value for key, value in tree.items() if key not in OTHER_SECTIONS}
    keys = {get_key(override) for override in overrides}
    lengths = keys & set(LENGTHS)
    if lengths and isinstance(plain.get("train"), dict):
        replaced_keys = {*LENGTHS, "train.end_step", "train.planned_for"} - keys
        unset = {key.removeprefix("train."): None for key in replaced_keys}
        plain["train"] = {**plain["train"], **unset}
    return check_tree(plain, length_replaced=length_replaced or bool(lengths), override_keys=keys)


def check_tree(
    tree: dict[str, Any], *, length_replaced: bool = False, override_keys: Collection[str] = ()
) -> Recipe:
    """Make a Recipe of plain data. Raises RecipeError with every problem found.

    `override_keys` has the keys that the command line sets.
    """
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        from pipeline.config.unfit_components import find_unfit_components

        raise RecipeError(
            describe_problems(error, tree, find_unfit_components(tree, override_keys))
        ) from error
    if problems := find_conflicts(recipe, length_replaced=length_replaced):
        raise RecipeError(problems)
    return recipe


def compose_and_check(overrides: Sequence[str], *, length_replaced: bool = False) -> Recipe:
    """Compose and check a recipe. Raises RecipeError with every problem found.

    Set `length_replaced` for a finished run, which the command line may have shortened.
    """
    problems: list[str] = []
    remaining = resolve_recipe(overrides)
    tried: list[list[str]] = []
    while True:
        tried.append(remaining)
        try:
            recipe = check(compose_config(remaining), remaining, length_replaced=length_replaced)
        except RecipeError as error:
            raise RecipeError([*problems, *error.problems]) from error
        except UNCOMPOSABLE as error:
            new_problems, valid = _explain(error, remaining)
            problems += new_problems
            if valid in tried or len(tried) == MAX_ROUNDS:
                raise RecipeError(problems or [first_line(error)]) from error
            # If the recipe was omitted, the default recipe is composed instead.
            remaining = valid if value_of(valid, "recipe") else resolve_recipe(valid)
        else:
            if problems:
                raise RecipeError(problems)
            return recipe


def check_new_run(config: DictConfig, overrides: Iterable[str]) -> Recipe:
    """Make the Recipe of a run to start, as `check` does.

    Raises RecipeError also for keys that have no effect: of weights to restore without `restore`,
    of MindSpore's files without a place for them. Recipes of finished runs and of conversions of
    weights may have them.
    """
    recipe = check(config, overrides)
    spec = recipe.checkpoint
    without_weights = {
        f"checkpoint.rules = {spec.rules}": spec.rules != "auto",
        f"checkpoint.renames = {show([rename.match for rename in spec.renames])}": spec.renames,
        "checkpoint.partial = true": spec.partial,
    }
    problems = []
    keys = [key for key, is_set in without_weights.items() if is_set]
    if keys and spec.restore is None and recipe.train.resume is None:
        need = "needs" if len(keys) == 1 else "need"
        problems.append(f"{', '.join(keys)}: {need} checkpoint.restore, the weights to start from")
    if spec.optimizer and spec.prefix is None and spec.directory is None:
        problems.append(
            "checkpoint.optimizer = true: needs checkpoint.prefix or checkpoint.directory, for "
            "MindSpore's files"
        )
    if problems:
        raise RecipeError(problems)
    return recipe


def compose_config(overrides: list[str], *, with_hydra: bool = False) -> DictConfig:
    """Compose a config, with Hydra's section if `with_hydra` is set.

    Raises RecipeError for circular bases, else errors of `UNCOMPOSABLE`.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), job_name="pipeline", **HYDRA_DEFAULTS):
        try:
            return compose("config", overrides, return_hydra_config=with_hydra)
        except RecursionError as error:
            problem = "must not be circular; a file has itself as a base, directly or by others"
            raise RecipeError([f"defaults: {problem}"]) from error


def _explain(error: Exception, overrides: list[str]) -> tuple[list[str], list[str]]:
    """Return the problems that cause an error of Hydra, and the overrides that don't cause it.

    If the cause isn't an override, all overrides are returned. There may be thousands of overrides,
    so all those with the same kind of problem are found at once.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        # GROUP/OPTION: an option may have slashes, as in //etc, and so may Hydra's groups.
        missing = error.missing_cfg_file
        if missing.startswith("hydra/"):
            group, _, option = missing.rpartition("/")
        else:
            group, _, option = missing.partition("/")
        kind = group.rpartition("/")[2]
        options = error.options or (find_recipes(Path.cwd()) if kind == "recipe" else ())
        reason = explain_unknown_name(kind, option, options)
        remaining = [item for item in overrides if get_key(item) != group]
        return [f"{group} = {show(option)}: {reason}; {suggest_missing_flag()}"], remaining
    cause: BaseException | None = error
    while cause is not None and not _KEY_ERROR.search(str(cause)):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        problems, valid = _explain_keys(overrides)
        if valid != overrides:
            return problems, valid
    parse_problems = dict(find_parse_problems(overrides))
    if parse_problems:
        lines = [f"{show(override)}: {problem}" for override, problem in parse_problems.items()]
        return lines, [item for item in overrides if item not in parse_problems]
    culprit, culprit_error = _find_culprit(overrides)
    if isinstance(culprit_error, MissingConfigException):
        return _explain(culprit_error, overrides)
    remaining = [item for item in overrides if item != culprit]
    if mistaken_kinds := _find_mistaken_kinds(overrides):
        return mistaken_kinds, remaining
    reason = first_line(culprit_error or error)
    if reason.startswith(SEVERAL_VALUES) and culprit:
        return [explain_several_values(culprit)], remaining
    return [f"{show(culprit) if culprit else 'overrides'}: {reason}"], remaining


def explain_several_values(override: str) -> str:
    """Return the problem of an override such as `key=1,2`, which is a sweep without -m."""
    form = f"""'{override.replace("=", '="', 1)}"'"""
    return (
        f"{show(override)}: has several values; must have one, a list in brackets, or a text in "
        f"quotes, as {form}; -m runs each"
    )


def _explain_keys(overrides: list[str]) -> tuple[list[str], list[str]]:
    """Return problems of keys that are missing or exist already, and the overrides without them.

    An override that sets a missing key is returned with `++`, so that the key is added, and the
    check of the recipe reports it.
    """
    try:
        tree = OmegaConf.to_container(
            compose_config([item for item in overrides if not sets_key(item)])
        )
    except UNCOMPOSABLE:
        return [], overrides
    problems: dict[str, None] = {}  # an ordered set
    valid = []
    is_set: dict[str, bool] = {}  # by earlier overrides, false if removed
    for override in overrides:
        key = get_key(override)
        exists = is_set.get(key, find_value(tree, key.split("."), _NOTHING) is not _NOTHING)
        bare = override.lstrip("+")
        if sets_key(override) and override.startswith("~") and not exists:
            problems[f"{show(f'~{key}')}: there is no such key"] = None
            continue
        must_be_new = override.startswith("+") and not override.startswith("++")
        if sets_key(override) and must_be_new and exists:
            problems[f"{show(f'+{key}')}: the key exists already; leave out the +"] = None
        is_set[key] = not override.startswith("~")
        valid.append(f"++{bare}" if sets_key(override) and bare[0] != "~" else override)
    return list(problems), valid


def _find_mistaken_kinds(overrides: list[str]) -> list[str]:
    """Return a problem for each list of a recipe file that must be a section, or the reverse."""
    recipe = value_of(overrides, "recipe") or ""
    keys = find_stored_recipe(recipe)
    if not keys:
        return []
    register = partial(store_option, group="recipe", name=recipe, package="_global_")
    try:
        # A recipe with nothing but `defaults` composes its bases.
        register(node={"defaults": keys["defaults"]} if "defaults" in keys else {})
        base = OmegaConf.to_container(compose_config(overrides))
    except UNCOMPOSABLE:
        return []
    finally:
        register(node=keys)
    return list(_list_mistaken_kinds(base, keys, ()))


def _list_mistaken_kinds(base: Any, keys: Any, path: TreePath) -> Iterator[str]:
    """Yield a problem for each list in `keys` that replaces a section of `base`, and vice versa."""
    if isinstance(base, dict) and isinstance(keys, dict):
        for key, value in keys.items():
            if key in base:
                yield from _list_mistaken_kinds(base[key], value, (*path, key))
    elif isinstance(base, dict) and isinstance(keys, list):
        yield f"{format_key(path)} = {show(keys)}: must be a section of keys"
    elif isinstance(base, list) and isinstance(keys, dict):
        yield f"{format_key(path)} = {show(keys)}: must be a list"


def _find_culprit(overrides: list[str]) -> tuple[str | None, Exception | None]:
    """Return the first override that can't be composed, and Hydra's error; else (None, None).

    Groups are tried before keys, since their options decide which keys exist.
    """
    ordered = sorted(overrides, key=sets_key)
    errors: dict[int, Exception] = {}

    def is_refused(count: int) -> bool:
        try:
            compose_config(ordered[:count])
        except UNCOMPOSABLE as error:
            errors[count] = error
        return count in errors

    index = bisect_left(range(1, len(ordered) + 1), True, key=is_refused)
    if index == len(ordered):
        return None, None
    return ordered[index], errors[index + 1]
