"""Types of values with their completion, and the parameters that several commands share."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from pipeline.cli.commands.command import Argument, Option, flag
from pipeline.config.files import find_groups, find_recipes
from pipeline.core.errors import UsageError

MAX_SEED = 2**31 - 1
MAX_COUNT = 999_999_999


def _refuse(param: click.Parameter | None, value: Any, rule: str) -> NoReturn:
    """Raise UsageError with the option, the value, and the rule that it breaks."""
    from pipeline.core.files.name_text import show_name

    option = param.opts[0] if isinstance(param, click.Option) else ""
    raise UsageError([f"{option} {show_name(str(value))}".strip()], rule)


class Number(click.ParamType):
    """A number from `least` to `most`."""

    name = "x"

    def __init__(self, least: float, most: float) -> None:
        self.least = least
        self.most = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number. Raises UsageError if it isn't a number in the range."""
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not self.least <= number <= self.most:
            _refuse(param, value, f"must be a number from {self.least:g} to {self.most:g}")
        return number


class WholeNumber(Number):
    """A whole number from `least` to `most`, in decimal digits only."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Raises UsageError if it isn't a whole number in the range."""
        text = str(value)
        is_whole = text.isascii() and text.isdecimal() and len(text) <= len(str(self.most))
        if not is_whole or not self.least <= int(text) <= self.most:
            _refuse(param, value, f"must be a whole number from {self.least:,} to {self.most:,}")
        return int(text)


class Size(WholeNumber):
    """A size of a sample. The error for NAME=VALUE advises to write `--argument NAME=VALUE`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number. Raises UsageError if it isn't a whole number in the range."""
        if "=" in str(value):
            raise UsageError([str(value)], f"is an option: --argument {shlex.quote(str(value))}")
        return super().convert(value, param, ctx)


class OneOf(click.Choice[str]):
    """One of several words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word. Raises UsageError if it isn't one of the choices."""
        if value not in self.choices:
            from pipeline.core.files.name_text import find_nearest

            guess = find_nearest(str(value), self.choices)
            question = f"; did you mean {guess}?" if guess else ""
            _refuse(param, value, f"must be one of {', '.join(self.choices)}{question}")
        return str(value)


class FilePath(click.ParamType):
    """A path, which need not exist; with `is_folder`, the shell completes folders only.

    With `checks_folder` its parent folder must exist: the command may compute for hours before it
    writes the file.
    """

    def __init__(self, *, is_folder: bool = False, checks_folder: bool = False) -> None:
        self.name = "folder" if is_folder else "file"
        self.checks_folder = checks_folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path. Raises UsageError if it is empty or fails the check of its folder."""
        if not str(value):
            _refuse(param, "''", "must be a path")
        path = Path(value)
        try:
            is_refused = self.checks_folder and (path.is_dir() or not path.parent.is_dir())
        except OSError:  # such as a name that is too long
            is_refused = True
        if is_refused:
            _refuse(param, value, "must be a file in a folder that exists")
        return path

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Return the item that makes the shell complete files or folders."""
        return [CompletionItem(incomplete, type="dir" if self.name == "folder" else "file")]


class CommaList(click.ParamType):
    """Words with commas between them, as a tuple."""

    name = "list"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Return the words. Raises UsageError if there are none, or if a word is empty."""
        words = value if isinstance(value, tuple) else tuple(str(value).split(","))
        if not all(words):
            _refuse(param, value or "''", "must be words with commas between them")
        return words


class Override(click.ParamType):
    """A text KEY=VALUE, or with `may_be_run` also the path of a run.

    Key and value are checked later, with the recipe.
    """

    name = "override"

    def __init__(self, *, may_be_run: bool = False) -> None:
        self.may_be_run = may_be_run

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text as it is. Raises UsageError if it isn't KEY=VALUE."""
        text = str(value)
        if not self.may_be_run and "=" not in text and text[:1] not in ("+", "~"):
            _refuse(param, value, "must be KEY=VALUE")
        return text

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Complete names of recipes and of groups' options, else a path."""
        return complete_override(incomplete) or [CompletionItem(incomplete, type="file")]


def complete_override(incomplete: str) -> list[CompletionItem[str]]:
    """Return the recipes after `+recipe=`, a group's options after `GROUP=`, [] for other words."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        return []
    names = find_recipes(Path.cwd()) if key == "+recipe" else find_groups().get(key, {})
    return [CompletionItem(f"{key}={name}") for name in names if name.startswith(value)]


def path_argument(name: str, text: str, *, metavar: str = "", is_folder: bool = False) -> Argument:
    """Return an argument that names a file or a folder."""
    path_type = FilePath(is_folder=is_folder)
    return Argument(name, metavar=metavar or name.upper(), type=path_type, text=text)


def run_argument(name: str = "run_dir", *, metavar: str = "", text: str) -> Argument:
    """Return the argument that names a run."""
    return path_argument(name, text, metavar=metavar, is_folder=True)


def overrides_argument(
    metavar: str = "[+recipe=NAME] [KEY=VALUE ...]",
    text: str = "Recipe (default: lenet5_digits) and its keys.",
    *,
    may_be_run: bool = False,
) -> Argument:
    """Return the argument for a recipe and its keys, typed as KEY=VALUE."""
    return Argument(
        "overrides", nargs=-1, type=Override(may_be_run=may_be_run), metavar=metavar, text=text
    )


def approximate_option() -> Option:
    return flag(
        "--approximate", text="If the run's bits can't be had, go on and mark every figure."
    )


def layers_option() -> Option:
    return Option(
        "--layers",
        type=CommaList(),
        metavar="PATTERN,...",
        default=(),
        show_default=False,
        help="Layers by glob pattern, such as conv_* (default: all).",
    )


def what_option(default: str, text: str) -> Option:
    choices = OneOf(["input", "output", "all"])
    return Option("--what", type=choices, default=default, help=text)


def out_option(metavar: str, text: str) -> Option:
    """Return `--out`, the file or folder that a command writes."""
    path_type = FilePath(is_folder=metavar == "FOLDER")
    return Option("--out", type=path_type, metavar=metavar, help=text)


def page_option(text: str) -> Option:
    """Return `--out` for a page, whose folder must exist."""
    return Option("--out", type=FilePath(checks_folder=True), metavar="FILE", help=text)


def count_option(
    name: str, text: str, *, least: int = 1, most: int = MAX_COUNT, default: int | None = None
) -> Option:
    """Return an option whose value is a whole number from `least` to `most`."""
    return Option(name, type=WholeNumber(least, most), default=default, help=text)


def seed_option(text: str, default: int | None = 0) -> Option:
    return count_option("--seed", text, least=0, most=MAX_SEED, default=default)


def metric_option(text: str, default: str | None = None) -> Option:
    return Option("--metric", metavar="NAME", default=default, help=text)
