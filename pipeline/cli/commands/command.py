"""A command of click: its help, its messages, and `--json` and `--quiet` in one style for all.

A command is declared here and in the modules beside this one, without importing jax, so that help
and completion come at once. `main` of `pipeline.cli.NAME` does the work; it is imported when the
command is called.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
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
        """Return how to type the option now, where it was typed with a value after `=`."""
        if not self.is_flag:
            return f"is now {self.opts[0]} {shlex.quote(value)}"
        is_on = (value.lower() == "true") != self.opts[0].startswith("--no-")
        return (
            f"is now {self.opts[0]}" if is_on else f"leave it out; the opposite is {self.opts[0]}"
        )


class Argument(click.Argument):
    """An argument with a line of help."""

    def __init__(self, name: str, *, about: str, **settings: Any) -> None:
        super().__init__([name], **settings)
        self.about = about

    def make_metavar(self, ctx: click.Context) -> str:
        """Return the name in usage lines, as it was declared."""
        return self.metavar or super().make_metavar(ctx)


def quiet_option() -> Option:
    """Return `--quiet`, which every command has."""
    return Option("--quiet", is_flag=True, help="Print nothing but errors, and JSON if asked for.")


def json_option(text: str) -> Option:
    """Return `--json`, which every command that prints facts has."""
    return Option("--json", "as_json", is_flag=True, help=text)


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
        """`words` are those of the command line; `prints_facts` if `main` returns facts."""
        declares_json = any(param.name == "as_json" for param in params)
        self.collects_facts = prints_facts and not declares_json
        shared = [quiet_option()]
        if self.collects_facts:
            shared.insert(0, json_option("Print the facts as one JSON object, the text on stderr."))
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
        """Parse arguments. Raises UsageError for those that are typed otherwise since."""
        typed = list(args)
        try:
            left = super().parse_args(ctx, args)
        except (click.UsageError, UsageError) as error:
            if isinstance(error, click.UsageError):
                # The parser of options leaves it out.
                error.ctx = error.ctx or ctx
            self._refuse_old_spellings(typed)
            takes_recipe = any(param.name == "overrides" for param in self.params)
            if isinstance(error, click.UsageError) and not takes_recipe:
                self._guess_option(typed)
            raise
        if not ctx.resilient_parsing:
            self._refuse_old_spellings(_positional(self, ctx))
        return left

    def _refuse_old_spellings(self, words: Iterable[str]) -> None:
        were = {param.was: param for param in self.params if isinstance(param, Option)}
        for word in words:
            key, equals, value = word.partition("=")
            if equals and key in were and not _exists(word):
                raise UsageError([word], were[key].spell(value))

    def _guess_option(self, words: Iterable[str]) -> None:
        """Raise UsageError with the nearest option for KEY=VALUE in a command without a recipe."""
        names = [param.opts[0] for param in self.params if isinstance(param, Option)]
        for word in words:
            key, equals, _ = word.partition("=")
            if equals and not key.startswith("-") and not _exists(word):
                raise UsageError([word], _no_such_option(f"--{key.replace('_', '-')}", names))

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
        arguments = [param for param in self.params if isinstance(param, Argument)]
        usage = [argument.make_metavar(ctx) for argument in arguments]
        formatter.write_usage(
            f"{PROGRAM} {self.words}", " ".join([*usage, "[OPTIONS]"]), prefix="usage: "
        )
        for paragraph in (self.help or "").split("\n\n"):
            formatter.write_paragraph()
            formatter.write_text(" ".join(paragraph.split()))
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(
                    [(argument.make_metavar(ctx), argument.about) for argument in arguments]
                )
        with formatter.section("Options"):
            options = [param for param in self.get_params(ctx) if not _is_argument(param)]
            records = [option.get_help_record(ctx) for option in options]
            formatter.write_dl([record for record in records if record is not None])
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
            from pipeline.core.files.error_text import no_such, shown

            reason = no_such("command", args[0], self.commands)
            raise UsageError([str(self.name), shown(args[0])], reason)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, text and the commands."""
        formatter.write_usage(f"{PROGRAM} {self.name}", "COMMAND ...", prefix="usage: ")
        formatter.write_paragraph()
        formatter.write_text(self.help or "")
        with formatter.section("Commands"):
            names = list(self.commands)
            formatter.write_dl([(name, self.commands[name].short_help or "") for name in names])
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
        raise _usage_error(error, args) from error


def _usage_error(error: click.UsageError, args: Sequence[str]) -> UsageError:
    """Return an error of click as one line of the form `ARGUMENTS: what would be right`."""
    context = error.ctx
    if context is None:
        return UsageError(args, _sentence(error))
    params = context.command.get_params(context)
    if isinstance(error, click.NoSuchOption):
        known = [name for param in params if not _is_argument(param) for name in param.opts]
        return UsageError([error.option_name], _no_such_option(error.option_name, known))
    command = context.command
    if not isinstance(command, LazyCommand):
        return UsageError(args, _sentence(error))
    if isinstance(error, click.BadOptionUsage):
        option = next(param for param in params if error.option_name in param.opts)
        takes_none = isinstance(option, click.Option) and option.is_flag
        rule = (
            f"takes no value; {command.takes(context)}" if takes_none else "needs a value after it"
        )
        return UsageError([error.option_name], rule)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        missing = error.param
        name = missing.make_metavar(context) if _is_argument(missing) else missing.opts[0]
        return UsageError(args, f"{name} is missing; {command.takes(context)}")
    if isinstance(error, click.BadParameter):
        return UsageError(args, _sentence(error))
    return UsageError(args, command.takes(context))


def _no_such_option(name: str, known: Sequence[str]) -> str:
    from pipeline.core.files.error_text import no_such

    return no_such("option", name, [option for option in known if option.startswith("--")])


def _sentence(error: click.UsageError) -> str:
    text = error.message.rstrip(".")
    return text[:1].lower() + text[1:]


def _is_argument(param: click.Parameter) -> bool:
    return param.param_type_name == "argument"


def _positional(command: click.Command, ctx: click.Context) -> Iterator[str]:
    """Yield the words on the command line that are no options."""
    for param in command.params:
        value = ctx.params.get(str(param.name))
        if _is_argument(param) and value is not None:
            yield from map(str, value) if isinstance(value, tuple) else [str(value)]


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except (OSError, ValueError):
        # It is too long for the name of a file, or has a character that no name has.
        return False
