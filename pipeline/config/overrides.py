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
from pipeline.core.files.name_text import join_at_equals
from pipeline.core.files.safe_yaml import MAX_DEPTH
from pipeline.core.files.value_text import show

STORAGE = "hydra.sweeper.storage"
OUTPUT_SUBDIR = "hydra.output_subdir"
MAX_OVERRIDES = 1_000
MAX_OVERRIDE_LENGTH = 10_000
"""In characters."""
MAX_NAME_BYTES = 255
"""Longest name of a file in most file systems. Hydra looks for a file named after every key."""
MAX_QUOTED_LENGTH = 200
"""Characters of the longest value for which quotes are suggested. To parse a list of 4,000 quoted
texts takes seconds."""
MAX_SPLIT_WORDS = 40
"""Most words that are tried as one override which the shell has split."""

_WORDS = (re.compile(r"""[^\[\](){},'"]+"""), re.compile(r"""[^\[\](){},'":]+"""))
"""Patterns of the words of a value: the texts in a list, and the keys and texts in a section."""
_UNQUOTED = re.compile(r"[\w\s/+.$%*@?|:-]*", re.ASCII)
"""Text that Hydra's grammar reads without quotes."""
_STRUCTURE = re.compile(r"""[\[{'"]|\$\{|\w+\(""")
"""Start of a value that isn't a text."""

_QUOTED_OR_NESTED = re.compile(r"""[\[\]{}'"]""")


def get_key(override: str) -> str:
    """Return the key or group of an override: `train.steps` for `++train.steps=3`."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def value_of(overrides: Iterable[str], key: str) -> str | None:
    """Return the value of the last override of a key, as text; None if no override sets it."""
    values = [item.partition("=")[2] for item in overrides if get_key(item) == key]
    return values[-1] if values else None


def hide_secret_values(args: Iterable[str]) -> list[str]:
    """Return the arguments of a command without passwords, for files and printed lines."""
    shown = []
    for arg in args:
        key = get_key(arg)
        name, equals, _ = arg.partition("=")
        # The address of a database may hold a password in any format, so all of it is hidden.
        is_secret = key == STORAGE or is_secret_name(key.rpartition(".")[2])
        shown.append(f"{name}={HIDDEN}" if equals and is_secret else hide_secrets(arg))
    return shown


def require_hydra_keys(args: Sequence[str]) -> None:
    """Raise RecipeError if an override sets one of Hydra's sections to the name of an option. Also
    raises it if Hydra would write a password into files of `hydra.output_subdir`."""
    problems = []
    for key in ("hydra.sweeper", "hydra.launcher"):
        value = value_of(args, key)
        if value is not None and not value.startswith("{"):
            choice = f"{key.replace('.', '/')}={value}"
            problems.append(f"{key} = {value}: is a section; an option of it is chosen by {choice}")
    folder = value_of(args, OUTPUT_SUBDIR)
    if not problems and folder not in (None, "null") and hide_secret_values(args) != list(args):
        reason = "Hydra would write a password of this command into files there; leave the key out"
        problems = [f"{OUTPUT_SUBDIR} = {folder}: {reason}"]
    if problems:
        raise RecipeError(problems)


def quote_value(text: str) -> str:
    """Return a text in quotes, so that Hydra reads it literally as the value of an override."""
    # Hydra reads a backslash as an escape only before a quote, such as the one that ends the value.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\*)\Z", r"\1\1", escaped)
    return f"'{escaped}'"


def sets_key(override: str) -> bool:
    """Return whether an override sets a key of the recipe, not a group or one of Hydra's keys."""
    key = get_key(override)
    has_package = "@" in override.partition("=")[0]
    is_group = key in {*SECTIONS, "recipe", "train"} or "/" in key or has_package
    return not is_group and not key.startswith("hydra.")


def find_parse_problems(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the overrides that Hydra's grammar rejects, each with its problem.

    Words that are one override without quotes, whose spaces split it, are one problem.
    """
    end = 0
    for position, override in enumerate(overrides):
        if position < end:
            continue
        if (joined := join_at_equals(overrides[position : position + 3])) is not None:
            override_text, count = joined
            end = position + count
            yield (
                " ".join(overrides[position:end]),
                f"must have no space at its =, as {override_text}",
            )
            continue
        end = _find_split_end(overrides, position)
        if end > position + 1:
            quoted = shlex.quote(" ".join(overrides[position:end]))
            yield override, f"was split at its spaces by the shell; type it in quotes, as {quoted}"
        elif "=" not in override and override[0] != "~":
            previous = overrides[position - 1] if position else ""
            is_split = sets_key(previous) and "=" in previous
            override_text = f"{previous.lstrip('+')} {override}"
            form = _quote_for_shell(override_text) if is_split else None
            hint = f"; a value with a space is typed in quotes, as {form}" if form else ""
            yield override, f"must be KEY=VALUE{hint}"
        elif not get_key(override):
            yield override, "must be KEY=VALUE"
        elif not get_key(override).isascii():
            yield override, "there is no such key"
        elif reason := _explain_refusal(override):
            # Trying quotes is slow, and a message shows at most MAX_PROBLEMS problems.
            form = _quote_for_shell(override) if position < MAX_PROBLEMS else None
            yield override, f"must be typed in quotes, as {form}" if form else reason


def _find_split_end(overrides: Sequence[str], position: int) -> int:
    """Return the end of the words from `position` on that are one override with open brackets; the
    next position if the override isn't split."""
    for end in range(position + 1, min(len(overrides), position + MAX_SPLIT_WORDS) + 1):
        text = " ".join(overrides[position:end])
        if len(text) > MAX_QUOTED_LENGTH or "=" not in overrides[position]:
            break
        if sum(letter in "[{(" for letter in text) <= sum(letter in "]})" for letter in text):
            is_split = end > position + 1 and _explain_refusal(text) is None
            return end if is_split else position + 1
    return position + 1


def _explain_refusal(override: str) -> str | None:
    """Return why Hydra's grammar rejects an override; None if the grammar accepts it."""
    try:
        OverridesParser.create().parse_override(override)
    except (HydraException, ValueError) as error:
        return first_line(error)
    return None


def _quote_for_shell(override: str) -> str | None:
    """Return an override for a shell, with quotes around text that Hydra can't read without them.

    Returns None if quotes don't help. Double quotes are used, unless the text has some, since the
    whole override is in single quotes for the shell.
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
    for quoted_value in values:
        form = f"{key}={quoted_value}"
        if _explain_refusal(form) is None:
            return shlex.quote(form)
    return None


def list_swept_keys(overrides: Iterable[str]) -> list[str]:
    """Return the keys that a sweep varies."""
    return [get_key(override) for override in overrides if len(_list_alternatives(override)) != 1]


def find_unparsable(overrides: Sequence[str]) -> Iterator[str]:
    """Yield the problems of overrides that Hydra's parser can't read in time or within its stack.

    These are too many overrides, and overrides that are empty, too long or nested too deeply.
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
        name_bytes = _count_bytes(override.partition("=")[0])
        if len(override) > MAX_OVERRIDE_LENGTH:
            yield (
                f"{key}: {len(override):,} characters; must be at most {MAX_OVERRIDE_LENGTH:,}; "
                "write the value into a recipe file"
            )
        elif name_bytes > MAX_NAME_BYTES:
            yield f"{key}: a key of {name_bytes:,} bytes; must be at most {MAX_NAME_BYTES}"
        if get_key(override) in {*SECTIONS, "recipe"}:
            name_bytes = max(map(_count_bytes, re.split("[,/]", override)))
            if name_bytes > MAX_NAME_BYTES:
                yield f"{key}: a name of {name_bytes:,} bytes; must be at most {MAX_NAME_BYTES}"
        if _measure_depth(override) > MAX_DEPTH:
            yield f"{key}: nested more than {MAX_DEPTH} levels deep"


def _count_bytes(name: str) -> int:
    return len(name.encode(errors="replace"))


def _measure_depth(override: str) -> int:
    """Return the largest number of brackets that are open at once."""
    depth = deepest = 0
    for letter in override:
        depth += (letter in "[{(") - (letter in "]})")
        deepest = max(deepest, depth)
    return deepest


def expand_sweeps(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of jobs that together have each value of a sweep.

    The first job has the first values of all keys. Each other job has another value for one of the
    keys. A range, from which a sweeper draws values, is left out.
    """
    choices = [options for override in overrides if (options := _list_alternatives(override))]
    first_job = [options[0] for options in choices]
    jobs = [first_job]
    for position, options in enumerate(choices):
        before = first_job[:position]
        after = first_job[position + 1 :]
        jobs += [[*before, option, *after] for option in options[1:]]
    return jobs


def _list_alternatives(override: str) -> list[str]:
    """Return an override for each value of a sweep, [] for a range, else the override alone."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except (HydraException, ValueError):
        return [override]
    if not parsed.is_sweep_override():
        return [override]
    if not parsed.is_discrete_sweep():
        return []
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]


def list_values(key: str, text: str) -> list[str]:
    """Return the values of a key in a text with commas between them, as Hydra writes them: 1e+30
    for 1e30.

    Raises ValueError with the reason for a text that can't be parsed, or for a range.
    """
    override = f"{key}={text}"
    for problem in find_unparsable([override]):
        raise ValueError(problem)
    if reason := _explain_refusal(override):
        words = text.split(",")
        form = ",".join(word if _UNQUOTED.fullmatch(word) else quote_value(word) for word in words)
        is_plain = all(words) and not _QUOTED_OR_NESTED.search(text)
        if is_plain and _explain_refusal(f"{key}={form}") is None:
            raise ValueError(f"must be typed in quotes, as {shlex.quote(form)}")
        raise ValueError(f"must be values with commas between them: {reason}")
    parsed = OverridesParser.create().parse_override(override)
    if not parsed.is_sweep_override():
        return [parsed.get_value_element_as_str() or ""]
    if not parsed.is_discrete_sweep():
        raise ValueError("must be values, not a range")
    return list(parsed.sweep_string_iterator())
