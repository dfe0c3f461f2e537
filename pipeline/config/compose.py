"""From recipe files and overrides to a checked `Recipe`. Hydra composes, `check` decides."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from pipeline.config.checks import conflicts
from pipeline.config.defaults import fill_missing, names_every_part
from pipeline.config.files import SECTIONS, find_recipes
from pipeline.config.optional_keys import settable
from pipeline.config.recipe import Recipe
from pipeline.config.recipe_file import (
    kept_to_its_own,
    read_part_file,
    read_recipe_file,
    user_keys,
)
from pipeline.config.references import require_bounded
from pipeline.errors import RecipeError, first_line
from pipeline.plain_yaml import MAX_DEPTH
from pipeline.problems import describe, no_such, show
from pipeline.shipped import CONF

DEFAULT_RECIPE = "lenet5_digits"
YAML = (".yaml", ".yml")
UNCOMPOSABLE = (
    *(HydraException, OmegaConfBaseException, ValueError),
    *(TypeError, AttributeError, LookupError, AssertionError),
)
"""What Hydra raises on overrides that it can't make a recipe of, and does not expect itself."""

MAX_OVERRIDE_LENGTH = 10_000
MAX_NAME_LENGTH = 255

LENGTHS = ("train.epochs", "train.passes", "train.steps")

_UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
_KNOWN_KEY = re.compile(r"An item is already at '([^']+)'")


def load_recipe(name: str = DEFAULT_RECIPE, overrides: Sequence[str] = ()) -> Recipe:
    """Compose a recipe by name or YAML file, with overrides as on the command line.

    Raises RecipeError with every problem found.
    """
    return diagnose([f"+recipe={name}", *overrides])


def with_recipe(overrides: Sequence[str]) -> list[str]:
    """The overrides with a recipe named, the default one if none was; a file becomes a name, and
    optional keys are added where conf/ lacks them.

    Hydra must know a recipe before it composes, so all that can be found are made known to it
    here; so are the files that a part is chosen by, as in `device=./mine.yaml`. Raises RecipeError
    when one that is named can't be read.
    """
    if problems := list(_unparsable(overrides)):
        raise RecipeError(problems)
    known = [_with_part_known(override) for override in settable(overrides)]
    named, asked, files = _name_recipe(known)
    chosen = {key_of(override) for override in named if override[0] != "~"} & set(SECTIONS)
    if not _make_recipes_known(files, asked, chosen):
        return named
    return [*(f"~{group}" for group in {*SECTIONS, "train"} - chosen), *named]


def _name_recipe(overrides: list[str]) -> tuple[list[str], str, dict[str, Path]]:
    """The overrides with the recipe by name, that name, and the files of all recipes by theirs."""
    files = dict(find_recipes(Path.cwd()))
    asked = value_of(overrides, "recipe")
    if asked is None:
        return [f"+recipe={DEFAULT_RECIPE}", *overrides], DEFAULT_RECIPE, files
    if asked.endswith(YAML):
        file = Path(asked)
        asked = file.stem
        files[asked] = file
        overrides = [f"+recipe={asked}" if key_of(o) == "recipe" else o for o in overrides]
    return [f"+{o}" if o.startswith("recipe=") else o for o in overrides], asked, files


def _make_recipes_known(files: Mapping[str, Path], asked: str, chosen: Collection[str]) -> bool:
    """Make every recipe an option that Hydra knows; does the one that is asked for name all parts?

    Raises RecipeError where that one can't be read; others are passed over.
    """
    names_all = False
    for name, file in files.items():
        try:
            whole = _make_known(name, file, chosen)
        except RecipeError:
            if name == asked:
                raise
        else:
            names_all |= whole and name == asked
    return names_all


def _unparsable(overrides: Iterable[str]) -> Iterator[str]:
    """A problem for every override that Hydra's parser would take minutes over, or its stack."""
    for override in overrides:
        key = show(key_of(override))
        if len(override) > MAX_OVERRIDE_LENGTH:
            yield f"{key}: {len(override):,} characters; write it into a recipe file"
        if key_of(override) in {*SECTIONS, "recipe"}:
            longest = max(len(part.encode()) for part in re.split("[,/]", override))
            if longest > MAX_NAME_LENGTH:
                yield (
                    f"{key}: a name of {longest:,} bytes; no file has one of more than "
                    f"{MAX_NAME_LENGTH}"
                )
        depth = deepest = 0
        for letter in override:
            depth += (letter in "[{(") - (letter in "]})")
            deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            yield f"{key}: nested more than {MAX_DEPTH} levels deep"


def _with_part_known(override: str) -> str:
    """The override with the files that it names as names that Hydra knows."""
    group, options = key_of(override), override.partition("=")[2].split(",")
    if group not in SECTIONS or not any(option.endswith(YAML) for option in options):
        return override
    return f"{group}={','.join(_make_part_known(group, option) for option in options)}"


def _make_part_known(group: str, option: str) -> str:
    """Make a file an option of a group and return its name; the name of an option stays."""
    if not option.endswith(YAML):
        return option
    file = Path(option).expanduser()
    if (CONF / group / f"{file.stem}.yaml").is_file():
        problem = f"{group} = {option}: {file.stem} is a shipped {group}; call the file otherwise"
        raise RecipeError([problem])
    tree, package = read_part_file(file, group), ".".join(SECTIONS[group])
    ConfigStore.instance().store(group=group, name=file.stem, package=package, node=tree)
    return file.stem


def _make_known(name: str, file: Path, chosen: Collection[str]) -> bool:
    """Make a file an option of Hydra's group `recipe`; true if it leaves nothing to defaults.

    Such are the recipe.yaml of a run and what `--cfg job` shows; keys that there were not when they
    were written are filled in. A part chosen on the command line comes with its own defaults: what
    the recipe says of the one it would have had goes.
    """
    tree = {"name": name, **read_recipe_file(file)}
    whole = names_every_part(tree)
    if whole:
        tree = fill_missing(kept_to_its_own(tree))
    if problems := [f"{file}: {problem}" for problem in user_keys(tree)]:
        raise RecipeError(problems)
    for group in chosen:
        *path, last = SECTIONS[group]
        section: Any = tree
        for key in path:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(last, None)
    ConfigStore.instance().store(group="recipe", name=name, package="_global_", node=tree)
    return whole


def key_of(override: str) -> str:
    """The key or group that an override speaks of: `train.steps` for `++train.steps=3`."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def value_of(overrides: Iterable[str], key: str) -> str | None:
    """The text that the last override of a key gives it; None where there is no such override."""
    values = [item.partition("=")[2] for item in overrides if key_of(item) == key]
    return values[-1] if values else None


def quoted(text: str) -> str:
    """A text as the value of an override, which Hydra reads as it stands."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda end: 2 * end[1] + (r"\'" if end[2] else ""), text)
    return f"'{escaped}'"


def swept_keys(overrides: Iterable[str]) -> list[str]:
    """The keys that a sweep varies."""
    return [key_of(override) for override in overrides if len(_alternatives(override)) != 1]


def check(config: DictConfig, overrides: Iterable[str]) -> Recipe:
    """Turn a composed config into a Recipe. Raises RecipeError with every problem found."""
    try:
        require_bounded(cast(dict[str, Any], OmegaConf.to_container(config)))
        tree = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise RecipeError([f"{error.full_key}: {first_line(error)}"]) from error
    except ValueError as error:
        raise RecipeError([str(error)]) from error
    plain = {key: value for key, value in cast(dict[str, Any], tree).items() if key != "hydra"}
    given = {key_of(override) for override in overrides} & set(LENGTHS)
    return check_tree(_with_length(plain, given) if given else plain, length_replaced=bool(given))


def check_tree(tree: dict[str, Any], *, length_replaced: bool = False) -> Recipe:
    """Turn plain data into a Recipe. Raises RecipeError with every problem found."""
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(describe(error, tree)) from error
    problems = conflicts(recipe, length_replaced=length_replaced)
    if problems:
        raise RecipeError(problems)
    return recipe


def _with_length(tree: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """A length given on the command line replaces the recipe's, in whatever unit that was."""
    if not isinstance(tree.get("train"), dict):
        return tree
    dropped = {key.removeprefix("train."): None for key in LENGTHS if key not in given}
    return {**tree, "train": {**tree["train"], **dropped}}


def diagnose(overrides: Sequence[str]) -> Recipe:
    """Compose and check, going on after each problem, so that all are reported at once."""
    problems: list[str] = []
    remaining = with_recipe(overrides)
    tried: list[list[str]] = []
    while True:
        tried.append(remaining)
        try:
            recipe = check(_compose(remaining), remaining)
        except RecipeError as error:
            raise RecipeError([*problems, *error.problems]) from error
        except UNCOMPOSABLE as error:
            problem, rest = _explain(error, remaining)
            problems += [problem] if problem else []
            if rest in tried:
                raise RecipeError(problems or [first_line(error)]) from error
            # Once a recipe is known by its name, the name says no more which file it was.
            remaining = rest if value_of(rest, "recipe") else with_recipe(rest)
        else:
            break
    if problems:
        raise RecipeError(problems)
    return recipe


def _compose(overrides: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), job_name="pipeline", version_base="1.3"):
        try:
            return compose("config", overrides)
        except RecursionError as error:
            problem = "`defaults` go in a circle: a file starts from itself, or from one that does"
            raise RecipeError([problem]) from error


def _explain(error: Exception, overrides: list[str]) -> tuple[str | None, list[str]]:
    """What an error of Hydra's means, and the overrides to go on with: the same if none are."""
    message = "\n".join(str(link) for link in _chain(error))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        problem = f"{group} = {option}: {no_such(group, option, error.options or ())}"
        return problem, [item for item in overrides if key_of(item) != group]
    if unknown := _UNKNOWN_KEY.search(message):
        return None, _rewritten(overrides, unknown[1], "+")
    if known := _KNOWN_KEY.search(message):
        problem = f"+{known[1]}: the key is there already; leave out the +"
        return problem, _rewritten(overrides, known[1], "")
    culprit = _culprit(overrides, message)
    problem = f"{culprit or 'overrides'}: {first_line(error)}"
    return problem, [item for item in overrides if item != culprit]


def _culprit(overrides: list[str], message: str) -> str | None:
    """The override without which the others compose; most often the message has its key."""
    for suspect in sorted(overrides, key=lambda override: key_of(override) not in message):
        try:
            _compose([item for item in overrides if item != suspect])
        except UNCOMPOSABLE:
            continue
        return suspect
    return None


def _rewritten(overrides: Iterable[str], key: str, prefix: str) -> list[str]:
    return [f"{prefix}{item.lstrip('+')}" if key_of(item) == key else item for item in overrides]


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def expand_sweeps(overrides: Sequence[str]) -> list[list[str]]:
    """The jobs to check before a sweep: each alternative once, the others at their first value.

    Open ranges, from which a sweeper draws, are left out.
    """
    choices = [options for override in overrides if (options := _alternatives(override))]
    jobs = [[options[0] for options in choices]]
    for position, options in enumerate(choices):
        jobs += [[*jobs[0][:position], option, *jobs[0][position + 1 :]] for option in options[1:]]
    return jobs


def _alternatives(override: str) -> list[str]:
    """What a sweep makes of an override: itself where it is none, nothing for an open range."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return [override]
    if not parsed.is_sweep_override():
        return [override]
    if not parsed.is_discrete_sweep():
        return []
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
