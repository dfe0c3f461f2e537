"""A command of click: its help, its messages, and `--json` and `--quiet` in one style for all.

A command is declared here and in the modules beside this one, without importing jax, so that help
and completion come at once. `main` of `pipeline.cli.NAME` does the work; it is imported when the
command is called.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from pipeline.core.errors import UsageError
from pipeline.core.files.strict_json import json_text

PROGRAM = "python -m pipeline"
HELP_WIDTH = 100
SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": HELP_WIDTH,
}


@dataclass(frozen=True)
class CommandResult:
    """Facts that a command has printed, which `--json` prints instead, and its exit status."""

    facts: Mapping[str, Any]
    exit_status: int = 0


class Option(click.Option):
    """An option. `was` is its name before options had dashes, as `to` of `to=onnx`."""

    def __init__(self, *names: str, was: str | None = None, **settings: Any) -> None:
        super().__init__(list(names), **settings)
        self.was = was

    def spell(self, value: str) -> str:
        """Return how to type the option that was typed with a value after `=`."""
        name = self.opts[0]
        if not self.is_flag:
            return f"is now {name} {shlex.quote(value)}"
        is_on = (value.lower() == "true") != name.startswith("--no-")
        return f"is now {name}" if is_on else f"leave it out; the opposite is {name}"


def flag(*names: str, text: str, was: str | None = None) -> Option:
    """Return an option without a value."""
    return Option(*names, is_flag=True, help=text, was=was)


class Argument(click.Argument):
    """An argument with a line of help."""

    def __init__(self, name: str, *, text: str, **settings: Any) -> None:
        super().__init__([name], **settings)
        self.text = text

    def make_metavar(self, ctx: click.Context) -> str:
        """Return the name in usage lines, as it was declared."""
        return self.metavar or super().make_metavar(ctx)


class LazyCommand(click.Command):
    """A command, which calls `main` of `pipeline.cli.MODULE` with the values of its parameters.

    If `main` returns a CommandResult, `--json` prints its facts on stdout, and the text on stderr.
    One that prints JSON lines itself declares `--json` among its parameters.
    """

    def __init__(
        self,
        words: str,
        summary: str,
        text: str,
        params: Sequence[click.Parameter],
        *,
        example: str,
        prints_facts: bool = True,
    ) -> None:
        """`words` are typed on the command line; `prints_facts` if `main` returns facts."""
        declares_json = any(param.name == "as_json" for param in params)
        self.collects_facts = prints_facts and not declares_json
        shared = [flag("--quiet", text="Print nothing but errors, and JSON if asked for.")]
        if self.collects_facts:
            facts = "Print the facts as one JSON object, the text on stderr."
            shared.insert(0, flag("--json", "as_json", text=facts))
        super().__init__(
            words.split()[-1],
            params=[*params, *shared],
            help=text,
            short_help=summary,
            context_settings=dict(SETTINGS),
        )
        self.words = words
        self.module = words.replace(" ", "_")
        self.example = example

    def __call__(self, args: Sequence[str]) -> int:  # type: ignore[override]
        """Run the command with these arguments and return the exit status."""
        return call(self, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments. Raises UsageError for an option that is typed as KEY=VALUE."""
        typed = list(args)
        try:
            left = super().parse_args(ctx, args)
        except click.UsageError as error:
            # The parser of options leaves it out.
            error.ctx = error.ctx or ctx
            takes_recipe = any(param.name == "overrides" for param in self.params)
            self._refuse_keys(typed, guess=not takes_recipe)
            raise
        except UsageError:
            self._refuse_keys(typed, guess=False)
            raise
        if not ctx.resilient_parsing:
            values = [ctx.params[str(param.name)] for param in self.params if _is_argument(param)]
            words = [item for value in values for item in _as_tuple(value)]
            self._refuse_keys(map(str, words), guess=False)
        return left

    def _refuse_keys(self, words: Iterable[str], *, guess: bool) -> None:
        """Raise UsageError for KEY=VALUE of an option; for any other key too if `guess` is true."""
        options = [param for param in self.params if isinstance(param, Option)]
        were = {option.was: option for option in options}
        pairs = [word for word in words if "=" in word and not os.path.exists(word)]
        for word in pairs:
            key, _, value = word.partition("=")
            if key in were:
                raise UsageError([word], were[key].spell(value))
        unknown = [word for word in pairs if guess and not word.startswith("-")]
        if unknown:
            name = unknown[0].partition("=")[0].replace("_", "-")
            names = [option.opts[0] for option in options]
            raise UsageError([unknown[0]], _no_such_option(f"--{name}", names))

    def invoke(self, ctx: click.Context) -> int:
        """Import the module of the command and call it; the exit status."""
        main = import_module(f"pipeline.cli.{self.module}").main
        values = dict(ctx.params)
        is_quiet = values.pop("quiet")
        prints_facts = self.collects_facts and values.pop("as_json")
        with ExitStack() as stack:
            if is_quiet:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect_stderr(nowhere))
                if not values.get("as_json"):
                    stack.enter_context(redirect_stdout(nowhere))
            elif prints_facts:
                stack.enter_context(redirect_stdout(sys.stderr))
            outcome = main(**values)
        if prints_facts:
            print(json_text(outcome.facts))
        return outcome.exit_status if isinstance(outcome, CommandResult) else int(outcome)

    def takes(self, ctx: click.Context) -> str:
        """Return the arguments and options in one sentence."""
        words = [param.make_metavar(ctx) for param in self.params if _is_argument(param)]
        options = [param.opts[0] for param in self.params if not _is_argument(param)]
        return f"{self.words} takes {' '.join(words)}{' and ' * bool(words)}{', '.join(options)}"

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, text, arguments, options and an example."""
        arguments = [
            (argument.make_metavar(ctx), argument.text)
            for argument in self.params
            if isinstance(argument, Argument)
        ]
        usage = " ".join([*(metavar for metavar, _ in arguments), "[OPTIONS]"])
        formatter.write_usage(f"{PROGRAM} {self.words}", usage, prefix="usage: ")
        for paragraph in (self.help or "").split("\n\n"):
            formatter.write_paragraph()
            formatter.write_text(" ".join(paragraph.split()))
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        self.format_options(ctx, formatter)
        formatter.write_paragraph()
        formatter.write(f"example: {PROGRAM} {self.example}\n")


class CommandGroup(click.Group):
    """A command whose first argument names one of several."""

    def __init__(
        self, name: str, summary: str, text: str, commands: Sequence[click.Command]
    ) -> None:
        super().__init__(
            name,
            commands={str(command.name): command for command in commands},
            help=text,
            short_help=summary,
            context_settings=dict(SETTINGS),
            no_args_is_help=False,
        )

    def __call__(self, args: Sequence[str]) -> int:  # type: ignore[override]
        """Run the command that the arguments name and return the exit status."""
        return call(self, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments. Raises UsageError if they name no command."""
        if not args and not ctx.resilient_parsing:
            names = ", ".join(self.commands)
            raise UsageError([str(self.name)], f"must be followed by one of {names}")
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is named first. Raises UsageError for any other word."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            from pipeline.core.files.error_text import no_such, show_name

            reason = no_such("command", args[0], self.commands)
            raise UsageError([str(self.name), show_name(args[0])], reason)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, text and the commands."""
        formatter.write_usage(f"{PROGRAM} {self.name}", "COMMAND ...", prefix="usage: ")
        formatter.write_paragraph()
        formatter.write_text(self.help or "")
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.short_help or "") for name, command in self.commands.items()]
            )
        formatter.write_paragraph()
        first = next(iter(self.commands.values()))
        formatter.write(f"example: {PROGRAM} {getattr(first, 'example', '')}\n")


def call(command: click.Command, args: Sequence[str]) -> int:
    """Run a command with these arguments and return the exit status.

    `click.Command.main` isn't used: it catches interrupts and closed pipes, which
    `pipeline.core.errors.report_errors` reports. Raises UsageError for arguments of another form.
    """
    try:
        with command.make_context(PROGRAM, list(args)) as context:
            status: int = command.invoke(context)
            return status
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        raise UsageError(*_refusal(error, args)) from error


def _refusal(error: click.UsageError, args: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return the wrong arguments by an error of click, and what would be right."""
    sentence = error.message[:1].lower() + error.message[1:].rstrip(".")
    context = error.ctx
    if context is None:
        return args, sentence
    command = context.command
    params = command.get_params(context)
    if isinstance(error, click.NoSuchOption):
        names = [name for param in params if not _is_argument(param) for name in param.opts]
        return [error.option_name], _no_such_option(error.option_name, names)
    if not isinstance(command, LazyCommand):
        return args, sentence
    if isinstance(error, click.BadOptionUsage):
        option = next(param for param in params if error.option_name in param.opts)
        is_flag = isinstance(option, click.Option) and option.is_flag
        rule = f"takes no value; {command.takes(context)}" if is_flag else "needs a value after it"
        return [error.option_name], rule
    if isinstance(error, click.MissingParameter) and error.param is not None:
        missing = error.param
        name = missing.make_metavar(context) if _is_argument(missing) else missing.opts[0]
        return args, f"{name} is missing; {command.takes(context)}"
    return args, sentence if isinstance(error, click.BadParameter) else command.takes(context)


def _no_such_option(name: str, names: Sequence[str]) -> str:
    from pipeline.core.files.error_text import no_such

    return no_such("option", name, [option for option in names if option.startswith("--")])


def _is_argument(param: click.Parameter) -> bool:
    return param.param_type_name == "argument"


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the values of an argument; none if it wasn't typed."""
    return value if isinstance(value, tuple) else () if value is None else (value,)
