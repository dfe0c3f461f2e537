"""The text of `--help`: commands, groups with their options, and recipes, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from pipeline.cli.commands.command import PROGRAM, Argument
from pipeline.config.files import find_groups, find_recipes, read_description
from pipeline.core.errors import printable

TRAINING: Mapping[str, str] = {
    "": "the default recipe, lenet5_digits",
    "+recipe=NAME KEY=VALUE ...": "a recipe, with keys overridden",
    "+recipe=path/to/mine.yaml": "a custom recipe",
    "device=path/to/mine.yaml": "a custom device; likewise for every group",
    "-m +recipe=NAME KEY=A,B GROUP=C,D": "a sweep: every combination",
    "-m ... hydra.sweep.dir=DIR": "the rest of a sweep, also by several processes",
    "--cfg job +recipe=NAME": "show the resolved recipe",
}
FLAGS: Mapping[str, str] = {
    "--plugin FILE ...": "any of these commands, with custom components",
    "COMMAND --help": "its arguments and options, with an example",
    "--version": "versions of this package, Python and jax",
    "--hydra-help": "Hydra's flags",
}
STATUSES = "Exit status: 0 done, 1 failed, 2 the recipe or its data is wrong, 75 stopped."
KEYS = """\
Keys: see --cfg job; the ones typed most are train.batch_size, train.epochs |
train.epochs | train.steps, train.sink, train.sink_size, train.optimizer.lr,
train.precision, train.resume, stages, seed, dataset.root, checkpoint.every_steps,
checkpoint.keep, checkpoint.restore, debug.
"""
WIDTH = 37
"""Width, in characters, of the column of commands and their arguments."""


def render_help(commands: Mapping[str, click.Command]) -> str:
    """Return the text of `--help`, without composing a recipe."""
    calls = {**TRAINING, **_summarise_commands(commands), **FLAGS}
    lines = [f"  {PROGRAM} {call:<{WIDTH}} {text}" for call, text in calls.items()]
    recipes = _list_files(find_recipes(Path.cwd()))
    parts = ["Train what a YAML recipe describes.", "", *lines, "", STATUSES, ""]
    parts += ["Recipes (+recipe=NAME)", *recipes, ""]
    for group, options in find_groups().items():
        parts += [f"Group {group} ({group}=NAME)", *_list_files(options), ""]
    return "\n".join([*parts, KEYS])


def _summarise_commands(commands: Mapping[str, click.Command]) -> dict[str, str]:
    """Return the help line of each command, also of those in groups, by its name and arguments."""
    lines: dict[str, str] = {}
    for name, command in commands.items():
        if isinstance(command, click.Group):
            nested = _summarise_commands(command.commands)
            lines |= {f"{name} {words}": line for words, line in nested.items()}
        else:
            metavars = [param.metavar for param in command.params if isinstance(param, Argument)]
            lines[" ".join([name, *filter(None, metavars)])] = command.short_help or ""
    return lines


def _list_files(files: Mapping[str, Path]) -> list[str]:
    """Return a line for each YAML file, of its name and its description."""
    width = max(map(len, files), default=0)
    lines = (f"  {name:<{width}}  {read_description(file)}" for name, file in files.items())
    return [printable(line) for line in lines]
