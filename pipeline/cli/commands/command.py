"""Commands of click, with help and messages in one style, and the options `--json` and `--quiet`.

The modules in this folder declare commands without importing jax, so that help and completion are
fast. `main` of `pipeline.cli.NAME` does the work, and is imported when the command is called.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import click

from pipeline.core.errors import RecipeError, UsageError
from pipeline.core.files.atomic_write import format_json
from pipeline.core.host.signals import raise_interrupts, replace_interrupt_output

PROGRAM = "python -m pipeline"
HELP_WIDTH = 100
SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": HELP_WIDTH,
}

RUN_FOLDER = "hydra.run.dir"
"""Key of the directory of a run, for which some commands have the option `--out` instead."""
STOPPED = '{"status": "stopped"}'
"""The JSON that `--json` prints if the command is interrupted before it has a result."""


@dataclass(frozen=True)
class CommandResult:
    """The result of a command."""

    facts: Mapping[str, Any]
    """Facts that the command has printed as text; `--json` prints them as JSON."""
    exit_status: int = 0


class Option(click.Option):
    """An option. `param` is the name of its parameter in Python; None: the option's name."""

    def __init__(self, name: str, param: str | None = None, **settings: Any) -> None:
        super().__init__([name] if param is None else [name, param], **settings)


def flag(name: str, param: str | None = None, *, text: str) -> Option:
    """Return an option without a value."""
    return Option(name, param, is_flag=True, help=text)


class Argument(click.Argument):
    """An argument with a line of help."""

    def __init__(self, name: str, *, text: str, **settings: Any) -> None:
        super().__init__([name], **settings)
        self.text = text


class LazyCommand(click.Command):
    """A command that calls `main` of a module below `pipeline.cli` with its parameters.

    If `main` returns a CommandResult, the command has the option `--json`, which prints the facts
    on stdout and the text on stderr, or STOPPED if the command is interrupted. A command that
    prints JSON itself declares `--json` among its parameters.
    """

    module_prefix: ClassVar[str] = ""
    """Package of the module, relative to `pipeline.cli`, and a dot."""

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
        """Declare a command. `words` is its name on the command line, and its module's name.

        `convert model` is in `convert/model.py`. `summary` is its line in the list of commands,
        `text` its help. `prints_facts` is whether `main` returns a CommandResult.
        """
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
        self.module = self.module_prefix + words.replace(" ", ".").replace("-", "_")
        self.example = example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments. Raises UsageError for an option that is typed as KEY=VALUE."""
        all_args = list(args)
        try:
            unparsed = super().parse_args(ctx, args)
        except click.UsageError as error:
            # click doesn't set the context of errors in options.
            error.ctx = error.ctx or ctx
            # That an option is typed as KEY=VALUE explains more than click's message.
            self._refuse_keys(all_args, refuses_all=True)
            raise
        except UsageError:
            self._refuse_keys(all_args, refuses_all=False)
            raise
        if not ctx.resilient_parsing:
            words: list[Any] = []
            for param in filter(_is_argument, self.params):
                value = ctx.params[str(param.name)]
                words += value if isinstance(value, tuple) else [value]
            self._refuse_keys(map(str, words), refuses_all=False)
        return unparsed

    def _refuse_keys(self, words: Iterable[str], *, refuses_all: bool) -> None:
        """Raise UsageError for a word KEY=VALUE whose key is an option; if `refuses_all`, for any.

        If the command takes overrides, only `hydra.run.dir` can be refused, and only if the
        command has `--out FOLDER` instead.
        """
        options = {param.opts[0]: param for param in self.params if isinstance(param, Option)}
        takes_overrides = any(param.name == "overrides" for param in self.params)
        # `--out` may also be a file, such as a page.
        writes_folder = "--out" in options and options["--out"].metavar == "FOLDER"
        for word in words:
            key, is_pair, value = word.partition("=")
            if not is_pair or word.startswith("-") or os.path.exists(word):
                continue
            is_folder = writes_folder and key == RUN_FOLDER
            if takes_overrides and not is_folder:
                continue
            name = "--out" if is_folder else f"--{key.replace('_', '-')}"
            if name in options:
                is_flag = options[name].is_flag
                typed = f"{name}, without a value" if is_flag else f"{name} {shlex.quote(value)}"
                raise UsageError([word], f"is an option: {typed}")
            if refuses_all:
                raise UsageError([word], _describe_unknown_option(name, list(options)))

    def invoke(self, ctx: click.Context) -> int:
        """Import the module of the command, call its `main`, and return the exit status."""
        values = dict(ctx.params)
        is_quiet = values.pop("quiet")
        prints_facts = self.collects_facts and values.pop("as_json")
        if prints_facts:
            # An interruption during the import ends the process, after this text is printed.
            replace_interrupt_output(f"{STOPPED}\n")
        main = import_module(f"pipeline.cli.{self.module}").main
        try:
            with raise_interrupts(), ExitStack() as stack:
                if is_quiet:
                    null = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                    stack.enter_context(redirect_stderr(null))
                    if not values.get("as_json"):
                        stack.enter_context(redirect_stdout(null))
                elif prints_facts:
                    stack.enter_context(redirect_stdout(sys.stderr))
                result = main(**values)
        except KeyboardInterrupt:
            if prints_facts:
                print(STOPPED)
            raise
        except (TypeError, ValueError, IndexError) as error:
            if "jax" not in sys.modules:
                raise
            # Imported here, since it imports jax.
            from pipeline.core.host.array_values import explain_value_read, is_value_read

            if not is_value_read(error):
                raise
            raise RecipeError(explain_value_read(error)) from error
        if prints_facts:
            replace_interrupt_output()
            print(format_json(result.facts))
        return result.exit_status if isinstance(result, CommandResult) else int(result)

    def describe_params(self, ctx: click.Context) -> str:
        """Return a sentence such as `export takes RUN_DIR ... FOLDER and --to, --int8`."""
        words = [param.make_metavar(ctx) for param in self.params if _is_argument(param)]
        options = [param.opts[0] for param in self.params if not _is_argument(param)]
        groups = filter(None, (" ".join(words), ", ".join(options)))
        return f"{self.words} takes {' and '.join(groups)}"

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
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


class RunCommand(LazyCommand):
    """A command about runs that are done."""

    module_prefix = "runs."


class ComparingCommand(LazyCommand):
    """A command about two recipes: the overrides after `--` become the parameter `other`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments before `--` and the options after it, and store the overrides there.

        All words between `--` and the next option are overrides, so that wrong ones are reported.
        A word after an option that takes a value is its value. Raises UsageError for a second `--`.
        """
        words = list(args)
        if words.count("--") > 1:
            raise UsageError([self.words, *words], "must have -- once: there are two sides")
        end = words.index("--") if "--" in words else len(words)
        num_values = {
            name: 0 if param.is_flag or param.count else param.nargs
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in param.opts
        }
        overrides: list[str] = []
        options: list[str] = []
        values_left = 0
        for word in words[end + 1 :]:
            is_override = "=" in word or word.startswith("~")
            if values_left > 0:
                values_left -= 1
                options.append(word)
            elif word.startswith("--") or word in num_values:
                values_left = num_values.get(word, 0)
                options.append(word)
            elif not options or (is_override and not word.startswith("-")):
                overrides.append(word)
            else:
                options.append(word)
        unparsed = super().parse_args(ctx, words[:end] + options)
        ctx.params["other"] = tuple(overrides)
        return unparsed


class CommandGroup(click.Group):
    """A command whose first argument names one of several commands."""

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
        """Run the command that the arguments name and return the exit status.

        `click.Command.main` isn't used, since it catches interrupts and closed pipes, which
        `core.report_errors.report_errors` reports. Raises UsageError for invalid arguments.
        """
        try:
            with self.make_context(PROGRAM, list(args)) as context:
                # A command of another distribution may return nothing.
                return int(self.invoke(context) or 0)
        except click.exceptions.Exit as end:
            return end.exit_code
        except click.UsageError as error:
            raise UsageError(*_explain_error(error, args)) from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments. Raises UsageError without arguments."""
        if not args and not ctx.resilient_parsing:
            names = ", ".join(self.commands)
            raise UsageError([str(self.name)], f"must be followed by one of {names}")
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names. Raises UsageError for another word."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            from pipeline.core.files.name_text import explain_unknown_name, show_name

            reason = explain_unknown_name("command", args[0], self.commands)
            raise UsageError([str(self.name), show_name(args[0])], reason)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
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


def _explain_error(error: click.UsageError, args: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return the wrong arguments, and the rule that they break."""
    message = error.format_message()
    sentence = message[:1].lower() + message[1:].rstrip(".")
    context = error.ctx
    if context is None:
        return args, sentence
    command = context.command
    params = command.get_params(context)
    if isinstance(error, click.NoSuchOption):
        if error.option_name[1:2].isdecimal():
            number = [word for word in args if word.startswith(error.option_name)]
            return number[:1] or [error.option_name], "must not be negative"
        names = [name for param in params if not _is_argument(param) for name in param.opts]
        return [error.option_name], _describe_unknown_option(error.option_name, names)
    if not isinstance(command, LazyCommand):
        return args, sentence
    params_text = command.describe_params(context)
    if isinstance(error, click.BadOptionUsage):
        option = next(param for param in params if error.option_name in param.opts)
        is_flag = isinstance(option, click.Option) and option.is_flag
        rule = f"takes no value; {params_text}" if is_flag else "needs a value after it"
        return [error.option_name], rule
    if isinstance(error, click.MissingParameter) and error.param is not None:
        missing = error.param
        name = missing.make_metavar(context) if _is_argument(missing) else missing.opts[0]
        return args, f"{name} is missing; {params_text}"
    if isinstance(error, click.BadParameter):
        return args, sentence
    return args, params_text


def _describe_unknown_option(name: str, names: Sequence[str]) -> str:
    from pipeline.core.files.name_text import explain_unknown_name

    long_names = [option for option in names if option.startswith("--")]
    return explain_unknown_name("option", name, long_names)


def _is_argument(param: click.Parameter) -> bool:
    return param.param_type_name == "argument"
