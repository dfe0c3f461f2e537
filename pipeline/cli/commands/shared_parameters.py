"""Arguments and options that several commands have, with one name and meaning."""

from __future__ import annotations

from typing import Any

from pipeline.cli.commands.command import Argument, Option
from pipeline.cli.commands.value_types import CommaList, FilePath, OneOf, Override, WholeNumber

MAX_SEED = 2**31 - 1


def run_dir(name: str = "run_dir", *, metavar: str = "RUN_DIR", about: str) -> Argument:
    """Return the argument that names a run."""
    return Argument(name, metavar=metavar, type=FilePath(is_folder=True), about=about)


def overrides(
    metavar: str = "[+recipe=NAME] [KEY=VALUE ...]",
    about: str = "Recipe, lenet5_digits unless it is given, and its keys and parts, as for a run.",
    *,
    may_be_run: bool = False,
) -> Argument:
    """Return the argument of a recipe: the only one that is typed KEY=VALUE."""
    return Argument(
        "overrides", nargs=-1, type=Override(may_be_run=may_be_run), metavar=metavar, about=about
    )


def layers_option() -> Option:
    """Return `--layers`."""
    return Option(
        "--layers",
        type=CommaList(),
        metavar="PATTERN,...",
        default=(),
        show_default=False,
        was="layers",
        help="Layers by glob pattern, such as conv_*; all unless it is given.",
    )


def what_option(default: str, text: str) -> Option:
    """Return `--what`."""
    choices = OneOf(["input", "output", "all"])
    return Option("--what", type=choices, default=default, was="what", help=text)


def out_option(metavar: str, text: str, **settings: Any) -> Option:
    """Return `--out`, where a command writes."""
    is_folder = metavar == "FOLDER"
    return Option(
        "--out", type=FilePath(is_folder=is_folder), metavar=metavar, help=text, **settings
    )


def seed_option(text: str, default: int | None = 0) -> Option:
    """Return `--seed`."""
    return Option("--seed", type=WholeNumber(0, MAX_SEED), default=default, metavar="N", help=text)


def metric_option(text: str, default: str | None = None) -> Option:
    """Return `--metric`."""
    return Option("--metric", metavar="NAME", default=default, help=text)
