"""Parsing of overrides as typed: `train.steps=3`, `+train.k=1`, `model=mlp,lenet5`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pipeline.config.files import SECTIONS
from pipeline.core.errors import (
    HIDDEN,
    MAX_PROBLEMS,
    RecipeError,
    first_line,
    hide_secrets,
    is_secret_name,
)
from pipeline.core.files.safe_yaml import MAX_DEPTH
from pipeline.core.files.value_text import show

STORAGE = "hydra.sweeper.storage"
OUTPUT_SUBDIR = "hydra.output_subdir"
MAX_OVERRIDES = 1_000
MAX_OVERRIDE_LENGTH = 10_000
"""In characters."""
MAX_NAME_BYTES = 255
"""Limit of file systems for names: Hydra looks for a file named after every key."""
MAX_QUOTED_LENGTH = 200
"""Characters of the longest value that is tried in quotes: a list of 4,000 quoted texts takes
seconds to parse."""

_WORDS = tuple(re.compile(rf"""[^\[\](){{}},'"{mark}]+""") for mark in ("", ":"))
"""Patterns of the words of a value: between the punctuation of lists, or also of sections."""
_UNQUOTED = re.compile(r"[\w\s/+.$%*@?|:-]*", re.ASCII)
"""Text that Hydra's grammar reads without quotes."""
_STRUCTURE = re.compile(r"""[\[{'"]|\$\{|\w+\(""")
"""Start of a value that isn't a text."""


def get_key(override: str) -> str:
    """Return the key or group of an override: `train.steps` for `++train.steps=3`."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def value_of(overrides: Iterable[str], key: str) -> str | None:
    """Return the value of the last override of a key, as text; None if no override sets it."""
    values = [item.partition("=")[2] for item in overrides if get_key(item) == key]
    return values[-1] if values else None


def hide_secret_values(args: Iterable[str]) -> list[str]:
    """Return the arguments of a command without passwords, for files and printed lines."""
    words = []
    for arg in args:
        key = get_key(arg)
        name, equals, _ = arg.partition("=")
        # The address of a database may hold a password in the format of its driver.
        is_secret = key == STORAGE or is_secret_name(key.rpartition(".")[2])
        words.append(f"{name}={HIDDEN}" if equals and is_secret else hide_secrets(arg))
    return words


def require_hydra_keys(args: Sequence[str]) -> None:
    """Raise RecipeError if one of Hydra's sections has an option's name in place of keys.

    Also raises it if Hydra would write a password into files of `hydra.output_subdir`.
    """
    problems = [
        f"{key} = {value}: is a section; an option of it is chosen by "
        f"{key.replace('.', '/')}={value}"
        for key in ("hydra.sweeper", "hydra.launcher")
        if (value := value_of(args, key)) is not None and not value.startswith("{")
    ]
    folder = value_of(args, OUTPUT_SUBDIR)
    if not problems and folder not in (None, "null") and hide_secret_values(args) != list(args):
        reason = "Hydra would write a password of this command into files there; leave the key out"
        problems = [f"{OUTPUT_SUBDIR} = {folder}: {reason}"]
    if problems:
        raise RecipeError(problems)


def quote_value(text: str) -> str:
    """Return a text in quotes, so that Hydra reads it literally as the value of an override."""
    # Hydra reads backslashes as escapes only before a quote, such as the closing one.
    escaped = re.sub(r"(\\*)('|\Z)", lambda end: 2 * end[1] + (r"\'" if end[2] else ""), text)
    return f"'{escaped}'"


def sets_key(override: str) -> bool:
    """Return whether an override sets a key of the recipe, not a group or one of Hydra's keys."""
    key = get_key(override)
    is_group = key in {*SECTIONS, "recipe", "train"} or "/" in key or "@" in override.split("=")[0]
    return not is_group and not key.startswith("hydra.")


def find_parse_problems(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the overrides that Hydra's grammar rejects, each with its problem."""
    for position, override in enumerate(overrides):
        if "=" not in override and override[0] != "~":
            previous = overrides[position - 1] if position else ""
            is_split = sets_key(previous) and "=" in previous
            form = _quote_for_shell(f"{previous} {override}") if is_split else None
            hint = f"; a value with a space is typed in quotes, as {form}" if form else ""
            yield override, f"must be KEY=VALUE{hint}"
        elif not get_key(override):
            yield override, "must be KEY=VALUE"
        elif not get_key(override).isascii():
            yield override, "there is no such key"
        elif reason := _explain_refusal(override):
            # Trying quotes is slow. A message shows no more than MAX_PROBLEMS.
            form = _quote_for_shell(override) if position < MAX_PROBLEMS else None
            yield override, f"must be typed in quotes, as {form}" if form else reason


def _explain_refusal(override: str) -> str | None:
    """Return the reason why Hydra's grammar rejects an override; None if it accepts it."""
    try:
        OverridesParser.create().parse_override(override)
    except (HydraException, ValueError) as error:
        return first_line(error)
    return None


def _quote_for_shell(override: str) -> str | None:
    """Return an override for a shell, with quotes around text that Hydra can't read.

    Returns None if quotes don't help. The quotes are double, since the shell's are single, unless
    the text has double quotes.
    """
    key, _, value = override.partition("=")
    if len(value) > MAX_QUOTED_LENGTH:
        return None

    def quote(text: str) -> str:
        return quote_value(text) if re.search(r"""["\\]""", text) else f'"{text}"'

    def quote_word(word: re.Match[str]) -> str:
        text = word[0].strip()
        return word[0] if _UNQUOTED.fullmatch(text) else word[0].replace(text, quote(text))

    values = [words.sub(quote_word, value) for words in _WORDS]
    if not _STRUCTURE.match(value) and not _UNQUOTED.fullmatch(value):
        values.append(quote(value))
    forms = (f"{key}={form}" for form in values)
    return next((shlex.quote(form) for form in forms if _explain_refusal(form) is None), None)


def list_swept_keys(overrides: Iterable[str]) -> list[str]:
    """Return the keys that a sweep varies."""
    return [get_key(override) for override in overrides if len(_list_alternatives(override)) != 1]


def find_unparsable(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a problem for too many overrides, and for each that is empty, too long or too deep.

    Hydra's parser would take minutes for them, or overflow its stack.
    """
    if len(overrides) > MAX_OVERRIDES:
        yield (
            f"{len(overrides):,} overrides; must be at most {MAX_OVERRIDES:,}; write them into a "
            "recipe file"
        )
        return
    for override in overrides:
        if not override:
            yield "an argument is empty; must be KEY=VALUE"
        key = show(get_key(override))
        if len(override) > MAX_OVERRIDE_LENGTH:
            yield (
                f"{key}: {len(override):,} characters; must be at most {MAX_OVERRIDE_LENGTH:,}; "
                "write the value into a recipe file"
            )
        elif (length := len(override.partition("=")[0].encode(errors="replace"))) > MAX_NAME_BYTES:
            yield f"{key}: a key of {length:,} bytes; must be at most {MAX_NAME_BYTES}"
        if get_key(override) in {*SECTIONS, "recipe"}:
            longest = max(len(part.encode(errors="replace")) for part in re.split("[,/]", override))
            if longest > MAX_NAME_BYTES:
                yield f"{key}: a name of {longest:,} bytes; must be at most {MAX_NAME_BYTES}"
        depth = deepest = 0
        for letter in override:
            depth += (letter in "[{(") - (letter in "]})")
            deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            yield f"{key}: nested more than {MAX_DEPTH} levels deep"


def expand_sweeps(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of jobs that cover all values of a sweep.

    Each value of a key is in one job, with the first values of the other keys. The first job has
    all first values. Ranges, from which a sweeper draws, are left out.
    """
    choices = [options for override in overrides if (options := _list_alternatives(override))]
    jobs = [[options[0] for options in choices]]
    for position, options in enumerate(choices):
        jobs += [[*jobs[0][:position], option, *jobs[0][position + 1 :]] for option in options[1:]]
    return jobs


def _list_alternatives(override: str) -> list[str]:
    """Return an override for each value that is swept, [] for a range, else only the override."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except (HydraException, ValueError):
        return [override]
    if not parsed.is_sweep_override():
        return [override]
    if not parsed.is_discrete_sweep():
        return []
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
