"""The texts of `--help`: the commands used most, all of them, lists of names, and keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import click

from pipeline.cli.commands.command import PROGRAM, Argument
from pipeline.config.files import SECTIONS as SECTION_PATHS
from pipeline.config.files import find_groups, find_recipes, read_description
from pipeline.core.errors import UsageError, printable
from pipeline.core.files.name_text import explain_other_task

USAGE = """\
usage: python -m pipeline [COMMAND] [+recipe=NAME] [KEY=VALUE ...]
       without a command, it trains; ... stands for a recipe and keys"""
SHORT_WORDS: Mapping[str, str] = {
    "[RUN_DIR | +recipe=NAME] [KEY=VALUE ...]": "[RUN_DIR | ...]",
    "[+recipe=NAME] [KEY=VALUE ...]": "...",
    "+recipe=NAME KEY=RANGE ...": "... KEY=RANGE",
    "| +recipe=NAME [KEY=VALUE ...]": "| ...",
}
"""Shorter texts of arguments in lists of commands."""
TRAINING: Mapping[str, str] = {
    "(no arguments)": "train the default recipe, lenet5_digits",
    "+recipe=NAME KEY=VALUE ...": "train a recipe, or a file such as mine.yaml, with keys changed",
    "... train.resume=auto": "continue the newest run that was stopped",
    "--cfg job +recipe=NAME": "show a recipe with all its keys",
}
SWEEPING: Mapping[str, str] = {
    "-m +recipe=NAME KEY=A,B GROUP=C,D": "a sweep: every combination",
    "-m ... hydra.sweep.dir=DIR": "the rest of a sweep, also by several processes",
}
SECTIONS: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "Run": (TRAINING, ("doctor", "summary")),
    "Sweep": (SWEEPING, ("find-rate", "better", "folds", "recommend")),
    "Look": ({}, ("runs", "report", "diff", "columns")),
    "Predict": ({}, ("infer", "export")),
    "Ask": ({}, ("explain", "forecast", "profile", "autopsy", "reproduce")),
}
"""Lines of the short help, and the commands after them, by heading."""
TOPICS: Mapping[str, str] = {
    "--help recipes|models|datasets|...": "names to choose from; also devices, optimizers, losses",
    "--help KEY": "the type, default and meaning of a key, such as train.sink_size",
    "--help all": "every command, recipe and group",
    "COMMAND --help": "its arguments and options, with an example",
}
FLAGS: Mapping[str, str] = {
    "--plugin FILE ...": "any of these commands, with custom components",
    "--version": "versions of this package, Python and jax",
    "--hydra-help": "Hydra's flags",
}
STATUSES = "Exit status: 0 done, 1 failed, 2 the recipe or its data is wrong, 75 stopped."
EXAMPLES: Mapping[str, str] = {
    "a whole number": "10",
    "a number at least": "1",
    "a number": "0.1",
    "true or false": "true",
}
"""Values of types in words."""
PLURALS: Mapping[str, str] = {"losses": "loss", "launches": "launch"}


def render_help(commands: Mapping[str, click.Command]) -> str:
    """Return the text of `--help`, without composing a recipe."""
    summaries = _summarise_commands(commands)
    sections: dict[str, Mapping[str, str]] = {}
    for title, (calls, names) in SECTIONS.items():
        listed = {call: text for call, text in summaries.items() if call.split()[0] in names}
        sections[title] = {**calls, **listed}
    sections["More"] = TOPICS
    width = max(len(call) for calls in sections.values() for call in calls)
    lines = [USAGE]
    for title, calls in sections.items():
        lines += [title, *_align(calls, width)]
    return "\n".join([*lines, STATUSES, ""])


def render_topic(topic: str, commands: Mapping[str, click.Command]) -> str:
    """Return the text of `--help TOPIC`. Raises UsageError for an unknown topic."""
    if topic == "all":
        return render_all(commands)
    if topic in ("recipe", "recipes"):
        return "\n".join([*_list_files(find_recipes(Path.cwd())), ""])
    groups = find_groups()
    group = PLURALS.get(topic, topic if topic in groups else topic.removesuffix("s"))
    if group in groups and group != "train":
        custom = _list_custom_components(group, groups[group])
        return "\n".join([f"{group}=NAME", *_list_files(groups[group]), *custom, ""])
    return render_key(topic)


def _list_custom_components(kind: str, files: Mapping[str, Path]) -> list[str]:
    """Return a line for each component of a kind that a plug-in has, with its section's key."""
    from pipeline.core.plugins.loading import list_loaded_plugins
    from pipeline.core.registry import list_components

    sources = {plugin.module.__name__: plugin.source for plugin in list_loaded_plugins()}
    if not sources:
        return []
    key = ".".join(SECTION_PATHS.get(kind, (kind,)))
    custom = {
        name: sources[cls.__module__]
        for name, cls in list_components(kind).items()
        if cls.__module__ in sources and name not in files
    }
    return [printable(f"  {name}  {key}.name={name}, of {file}") for name, file in custom.items()]


def render_all(commands: Mapping[str, click.Command]) -> str:
    """Return all commands, recipes and groups with their options."""
    calls = {**TRAINING, **SWEEPING, **_summarise_commands(commands), **FLAGS}
    calls |= TOPICS
    parts = [USAGE, "", *_align(calls, max(map(len, calls))), "", STATUSES, ""]
    parts += ["Recipes (+recipe=NAME)", *_list_files(find_recipes(Path.cwd())), ""]
    for group, options in find_groups().items():
        parts += [f"Group {group} ({group}=NAME)", *_list_files(options), ""]
    return "\n".join(parts)


def render_key(key: str) -> str:
    """Return type, default and meaning of a key, with an example; of a section, its keys. Raises
    UsageError if no recipe has such a key."""
    # Imported here, since the classes of all components take a second.
    from pipeline.cli.commands.key_descriptions import UnknownKeyError, describe_key, find_key

    path = [part for part in key.split(".") if not part.isdecimal()]
    try:
        descriptions = describe_key(path)
    except UnknownKeyError as error:
        guesses = find_key(path)
        if len(guesses) == 1 and len(path) == 1:
            return render_key(guesses[0])
        beside = get_close_matches(path[-1], error.known, n=1)
        guesses = guesses or [".".join([*path[:-1], name]) for name in beside]
        question = f"; did you mean {', '.join(guesses)}?" if guesses else ""
        reason = f"is neither a topic (all, recipes, models, datasets, ...) nor a key{question}"
        reason = explain_other_task(key) or reason
        raise UsageError([f"--help {printable(key)}"], reason) from error
    lines = []
    by_text: dict[tuple[str, str, str], list[str]] = {}
    for item in descriptions:
        default = "" if item.default is None else f"; default {json.dumps(item.default)}"
        text = (item.type_text, default, item.meaning)
        by_text.setdefault(text, []).append(item.component or "")
    for (type_text, default, meaning), components in by_text.items():
        names = ", ".join(filter(None, dict.fromkeys(components)))
        lines.append(f"{key}: {type_text}{default}{f'  ({names})' if names else ''}")
        lines += [f"  {meaning}"] if meaning else []
    keys = dict.fromkeys(name for item in descriptions for name in item.keys if name != "name")
    if keys:
        lines += ["", "Keys: " + ", ".join(keys)]
    else:
        value = next((item.default for item in descriptions if item.default is not None), None)
        shown = _make_value(descriptions[0].type_text) if value is None else _show_value(value)
        lines += ["", f"example: {PROGRAM} +recipe=NAME {key}={shown}"]
    return "\n".join([*lines, ""])


def _make_value(type_text: str) -> str:
    """Return an example of a value of a type in words, for a key without a default."""
    for words, value in EXAMPLES.items():
        if type_text.startswith(words):
            return value
    return type_text.removeprefix("one of ").split(",")[0] if "one of" in type_text else "VALUE"


def _show_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _align(calls: Mapping[str, str], width: int) -> list[str]:
    """Return a line for each call and its text, in two columns, the first of `width` characters."""
    return [f"  {call:<{width}}  {text}" for call, text in calls.items()]


def _summarise_commands(commands: Mapping[str, click.Command]) -> dict[str, str]:
    """Return the help line of each command, also of those in groups, by its name and arguments."""
    lines: dict[str, str] = {}
    for name, command in commands.items():
        if isinstance(command, click.Group):
            nested = _summarise_commands(command.commands)
            lines |= {f"{name} {words}": line for words, line in nested.items()}
        else:
            metavars = [param.metavar for param in command.params if isinstance(param, Argument)]
            call = " ".join([name, *filter(None, metavars)])
            for words, shorter in SHORT_WORDS.items():
                call = call.replace(words, shorter)
            lines[call] = command.short_help or ""
    return lines


def _list_files(files: Mapping[str, Path]) -> list[str]:
    """Return a line for each YAML file, of its name and its description."""
    width = max(map(len, files), default=0)
    lines = (f"  {name:<{width}}  {read_description(file)}" for name, file in files.items())
    return [printable(line) for line in lines]
