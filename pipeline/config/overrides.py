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
    is_secret_name,
    without_secrets,
)
from pipeline.core.files.safe_yaml import MAX_DEPTH
from pipeline.core.files.value_text import show

STORAGE = "hydra.sweeper.storage"
OUTPUT_SUBDIR = "hydra.output_subdir"
MAX_OVERRIDES = 1_000
MAX_OVERRIDE_LENGTH = 10_000
MAX_NAME_BYTES = 255
"""Longest key: Hydra looks for a file named after every key."""

MAX_QUOTED_LENGTH = 200
"""Longest value that is shown in quotes: a list of 4,000 quoted texts takes seconds to parse."""

_WORDS = tuple(re.compile(rf"""[^\[\](){{}},'"{mark}]+""") for mark in ("", ":"))
"""Words of a value: between the marks of lists and functions, or also of sections."""
_UNQUOTED = re.compile(r"[\w\s/+.$%*@?|:-]*", re.ASCII)
"""Text that Hydra's grammar reads without quotes."""
_STRUCTURE = re.compile(r"""[\[{'"]|\$\{|\w+\(""")
"""Start of a value that isn't a text."""


def key_of(override: str) -> str:
    """Return the key or group of an override: `train.steps` for `++train.steps=3`."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def value_of(overrides: Iterable[str], key: str) -> str | None:
    """Return the value of the last override of a key, as text; None without one."""
    values = [item.partition("=")[2] for item in overrides if key_of(item) == key]
    return values[-1] if values else None


def hide_secret_values(args: Iterable[str]) -> list[str]:
    """Return arguments of a command without passwords, to be written down and printed."""
    words = []
    for arg in args:
        key = key_of(arg)
        # The address of a database may hold a password in ways that only its driver knows.
        is_secret = key == STORAGE or is_secret_name(key.rpartition(".")[2])
        hides = "=" in arg and is_secret
        words.append(f"{arg.partition('=')[0]}={HIDDEN}" if hides else without_secrets(arg))
    return words


def require_hydra_keys(args: Sequence[str]) -> None:
    """Raise RecipeError if one of Hydra's keys is misused.

    An option's name stands in place of the section that it chooses, or Hydra would write a password
    down with its config.
    """
    problems = [
        f"{key} = {value}: is a section; an option of it is chosen by "
        f"{key.replace('.', '/')}={value}"
        for key in ("hydra.sweeper", "hydra.launcher")
        if (value := value_of(args, key)) is not None and not value.startswith("{")
    ]
    folder = value_of(args, OUTPUT_SUBDIR)
    if not problems and folder not in (None, "null") and hide_secret_values(args) != list(args):
        reason = "Hydra would write a password of this command into files there; leave it out"
        problems = [f"{OUTPUT_SUBDIR} = {folder}: {reason}"]
    if problems:
        raise RecipeError(problems)


def quoted(text: str) -> str:
    """Return a text quoted as the value of an override, which Hydra reads literally."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda end: 2 * end[1] + (r"\'" if end[2] else ""), text)
    return f"'{escaped}'"


def sets_key(override: str) -> bool:
    """Return whether an override sets a key of the recipe, not a group or one of Hydra's keys."""
    key = key_of(override)
    grouped = key in {*SECTIONS, "recipe", "train"} or "/" in key or "@" in override.split("=")[0]
    return not grouped and not key.startswith("hydra.")


def parse_problems(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the overrides that Hydra's grammar rejects, with the reason or quotes that help."""
    for number, override in enumerate(overrides):
        if "=" not in override and override[0] != "~":
            previous = overrides[number - 1] if number else ""
            is_split = sets_key(previous) and "=" in previous
            form = _quote_for_shell(f"{previous} {override}") if is_split else None
            hint = f"; a value with a space is typed in quotes, as {form}" if form else ""
            yield override, f"must be KEY=VALUE{hint}"
        elif not key_of(override):
            yield override, "must be KEY=VALUE"
        elif not key_of(override).isascii():
            yield override, "there is no such key"
        elif reason := _refusal(override):
            form = _quote_for_shell(override) if number < MAX_PROBLEMS else None
            yield override, f"must be typed in quotes, as {form}" if form else reason


def _refusal(override: str) -> str | None:
    """Return the reason why Hydra's grammar rejects an override; None if it accepts it."""
    try:
        OverridesParser.create().parse_override(override)
    except (HydraException, ValueError) as error:
        return first_line(error)
    return None


def _quote_for_shell(override: str) -> str | None:
    """Return the override for a shell, with quotes around what Hydra can't read; None if none help.

    Quotes are double ones, which a shell's single quotes can hold, unless the text has some.
    """
    key, _, value = override.partition("=")
    if len(value) > MAX_QUOTED_LENGTH:
        return None

    def quote(text: str) -> str:
        return quoted(text) if re.search(r"""["\\]""", text) else f'"{text}"'

    def quote_word(word: re.Match[str]) -> str:
        text = word[0].strip()
        return word[0] if _UNQUOTED.fullmatch(text) else word[0].replace(text, quote(text))

    values = [words.sub(quote_word, value) for words in _WORDS]
    if not _STRUCTURE.match(value) and not _UNQUOTED.fullmatch(value):
        values.append(quote(value))
    forms = (f"{key}={form}" for form in values)
    return next((shlex.quote(form) for form in forms if _refusal(form) is None), None)


def swept_keys(overrides: Iterable[str]) -> list[str]:
    """Return the keys that a sweep varies."""
    return [key_of(override) for override in overrides if len(_alternatives(override)) != 1]


def unparsable(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a problem for every override that would take Hydra's parser minutes or overflow its
    stack.

    Keys are bounded too, since Hydra looks for a file named after each.
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
        key = show(key_of(override))
        if len(override) > MAX_OVERRIDE_LENGTH:
            yield f"{key}: {len(override):,} characters; write it into a recipe file"
        elif (length := len(override.partition("=")[0].encode(errors="replace"))) > MAX_NAME_BYTES:
            yield f"{key}: a key of {length:,} bytes; there is none of more than {MAX_NAME_BYTES}"
        if key_of(override) in {*SECTIONS, "recipe"}:
            longest = max(len(part.encode(errors="replace")) for part in re.split("[,/]", override))
            if longest > MAX_NAME_BYTES:
                yield (
                    f"{key}: a name of {longest:,} bytes; no file has one of more than "
                    f"{MAX_NAME_BYTES}"
                )
        depth = deepest = 0
        for letter in override:
            depth += (letter in "[{(") - (letter in "]})")
            deepest = max(deepest, depth)
        if deepest > MAX_DEPTH:
            yield f"{key}: nested more than {MAX_DEPTH} levels deep"


def expand_sweeps(overrides: Sequence[str]) -> list[list[str]]:
    """Return the jobs to check before a sweep: each alternative once, the others at their first
    value.

    Open ranges, from which a sweeper draws, are skipped.
    """
    choices = [options for override in overrides if (options := _alternatives(override))]
    jobs = [[options[0] for options in choices]]
    for position, options in enumerate(choices):
        jobs += [[*jobs[0][:position], option, *jobs[0][position + 1 :]] for option in options[1:]]
    return jobs


def _alternatives(override: str) -> list[str]:
    """Return the overrides that a sweep expands one into: itself if it sweeps nothing; none for
    ranges."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except (HydraException, ValueError):
        return [override]
    if not parsed.is_sweep_override():
        return [override]
    if not parsed.is_discrete_sweep():
        return []
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
