"""The group of all commands, and the call of the command that the arguments name."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from pipeline.cli.commands.audit_commands import AUDIT_COMMANDS
from pipeline.cli.commands.command import Argument, CommandGroup, LazyCommand, Option
from pipeline.cli.commands.parameters import OneOf, complete_override
from pipeline.cli.commands.recipe_commands import CONVERT, RECIPE_COMMANDS
from pipeline.cli.commands.run_commands import RUN_COMMANDS
from pipeline.config.files import find_recipes
from pipeline.core.errors import UsageError

VERSION = "--version"
DISTRIBUTION = "recipe-pipeline"
# fmt: off
HYDRA_FLAGS = (
    ("-m", "--multirun"), ("-c", "--cfg"), ("-p", "--package"), ("-cp", "--config-path"),
    ("-cn", "--config-name"), ("-cd", "--config-dir"), ("-r", "--run"), ("-i", "--info"),
    ("--resolve",), ("--hydra-help",),
)
# fmt: on
WITHOUT_VALUE = ("--multirun", "--run", "--resolve", "--hydra-help")
"""Flags of Hydra that take no value."""

COMPLETION = LazyCommand(
    "completion",
    "a script that completes commands, options and recipes",
    """Print the script that completes commands, options, recipes and groups of `pipeline` in a
    shell.""",
    [
        Argument(
            "shell",
            metavar="bash|zsh|fish",
            type=OneOf(["bash", "zsh", "fish"]),
            text="The shell; bash 4.4 or later.",
        )
    ],
    example='completion bash > ~/.pipeline-completion && echo ". ~/.pipeline-completion" >> '
    "~/.bashrc",
    prints_facts=False,
)


class Root(CommandGroup):
    """All commands."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from pipeline.cli.commands.help import render_help

        formatter.write(render_help(self.commands))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Complete commands, flags, and keys that choose a component of a recipe."""
        return complete_override(incomplete) or super().shell_complete(ctx, incomplete)


def show_versions(context: click.Context, param: click.Parameter, is_typed: bool) -> None:
    """Print the versions of this package, Python and jax, and exit, if `--version` is typed."""
    if not is_typed or context.resilient_parsing:
        return
    from pipeline.core.host.tested_versions import find_installed_version

    installed = find_installed_version(DISTRIBUTION) or "not installed"
    jax = find_installed_version("jax")
    print(f"{DISTRIBUTION} {installed}, Python {platform.python_version()}, jax {jax}")
    context.exit()


ROOT = Root(
    "pipeline", "", "", [*RECIPE_COMMANDS, *RUN_COMMANDS, *AUDIT_COMMANDS, CONVERT, COMPLETION]
)
ROOT.params += [
    Option("--plugin", metavar="FILE", multiple=True, help="A file with custom components."),
    Option(VERSION, is_flag=True, is_eager=True, expose_value=False, callback=show_versions),
    *(click.Option(names, is_flag=names[-1] in WITHOUT_VALUE) for names in HYDRA_FLAGS),
]


def run_command(args: Sequence[str]) -> int:
    """Run the command that the arguments name, or print help; return the exit status."""
    if args and args[0] in ROOT.commands:
        return ROOT(args)
    if VERSION in args:
        return ROOT([VERSION])
    if "--help" in args or "-h" in args:
        topics = [word for word in args if word[:1] not in "-+~" and "=" not in word]
        if not topics:
            return ROOT(["--help"])
        # Imported late, here and below, since looking for other distributions takes time.
        from pipeline.cli.commands.help import render_topic
        from pipeline.cli.commands.installed_commands import list_installed_commands

        commands = {**list_installed_commands(), **ROOT.commands}
        print(render_topic(topics[0], commands), end="")
        return 0
    from pipeline.cli.commands.installed_commands import find_installed_command

    command = find_installed_command(args[0])
    if command is None:
        _refuse_words(args)
    ROOT.add_command(command, args[0])
    return ROOT(args)


def _refuse_words(args: Sequence[str]) -> NoReturn:
    """Raise UsageError for arguments whose first isn't a command, such as a recipe's name."""
    from pipeline.core.files.name_text import explain_unknown_name, join_at_equals, show_name

    name = args[0]
    if (joined := join_at_equals(args[:3])) is not None:
        raise UsageError(
            [show_name(name)], f"must have no space at its =, as {show_name(joined[0])}"
        )
    if name in find_recipes(Path.cwd()) or name.endswith(".yaml"):
        raise UsageError(
            [show_name(name)], f"is a recipe; to train it, type +recipe={show_name(name)}"
        )
    if name == "train":
        raise UsageError([name], "must be left out; arguments without a command train")
    reason = explain_unknown_name("command", name, ROOT.commands)
    raise UsageError([show_name(name)], f"{reason}; a key is typed as KEY=VALUE")
