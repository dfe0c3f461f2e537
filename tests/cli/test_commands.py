"""All commands: help, options that are written alike, refusals, completion and the reference."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest

from pipeline.__main__ import main
from pipeline.cli.commands.command import PROGRAM, ComparingCommand, LazyCommand, Option, flag
from pipeline.cli.commands.root import ROOT, Root
from pipeline.cli.completion import complete
from pipeline.core.errors import UsageError
from tests.conftest import STEPS, TINY

ROOT_FOLDER = Path(__file__).parents[2]
REFERENCE = ROOT_FOLDER / "docs" / "commands.md"


def all_commands(group: click.Group) -> Iterator[LazyCommand]:
    """Yield the commands of a group and of the groups in it."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from all_commands(command)
        else:
            assert isinstance(command, LazyCommand)
            yield command


COMMANDS = {command.words: command for command in all_commands(ROOT)}
OPTIONS = [
    (words, param)
    for words, command in COMMANDS.items()
    for param in command.params
    if isinstance(param, click.Option)
]


def takes_overrides(command: click.Command) -> bool:
    """Return whether arguments of a command are overrides of a recipe."""
    return any(param.name == "overrides" for param in command.params)


def help_of(command: click.Command, width: int = 100) -> str:
    """Return the text of `--help` at a width in characters."""
    settings = {**command.context_settings, "terminal_width": width, "max_content_width": width}
    context = click.Context(command, **settings)
    return command.get_help(context)


def test_commands_match_modules() -> None:
    folder = ROOT_FOLDER / "pipeline" / "cli"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "self_test", "worker"}
    for package in ("convert", "runs"):
        stems = {path.stem for path in (folder / package).glob("*.py")} - {"__init__"}
        modules |= {f"{package}.{stem}" for stem in stems}
    assert {command.module for command in COMMANDS.values()} == modules - {"train"}


@pytest.mark.parametrize("words", COMMANDS)
def test_command_has_help_with_an_example(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ROOT([*words.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {PROGRAM} {words} ")
    assert COMMANDS[words].short_help
    for param in COMMANDS[words].params:
        assert (param.opts[0] if isinstance(param, click.Option) else param.metavar) in text
    assert re.search(rf"^example: {PROGRAM} .*{words}", text, re.MULTILINE)
    assert ROOT([*words.split(), "-h"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("words", COMMANDS)
def test_command_parameters_match_function_parameters(words: str) -> None:
    """`bind` raises TypeError for a missing and an unknown parameter. The words after -- are
    `other`."""
    command = COMMANDS[words]
    main = import_module(f"pipeline.cli.{command.module}").main
    names = {param.name for param in command.params} - {"quiet"}
    names -= {"as_json"} if command.collects_facts else set()
    signature = inspect.signature(main)
    signature.bind(**dict.fromkeys(names))
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    named = {name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_KEYWORD}
    assert named - names == ({"other"} if words == "better" else set())


@pytest.mark.parametrize(
    ("words", "option"), OPTIONS, ids=lambda value: getattr(value, "name", value)
)
def test_options_have_consistent_names_and_types(words: str, option: click.Option) -> None:
    assert re.fullmatch(r"--[a-z0-9]+(-[a-z0-9]+)*", option.opts[0])
    assert option.help
    assert option.help.endswith(".")
    same = [other for _, other in OPTIONS if other.opts[0] == option.opts[0]]
    assert {other.is_flag for other in same} == {option.is_flag}
    # dump takes several steps.
    assert option.opts[0] == "--step" or len({type(other.type) for other in same}) == 1


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_has_quiet_and_json(words: str) -> None:
    names = {option.opts[0] for command, option in OPTIONS if command == words}
    assert "--quiet" in names
    assert "--json" in names or words in ("completion", "schema")


@pytest.mark.parametrize(
    ("words", "option"),
    [(words, option) for words, option in OPTIONS if not takes_overrides(COMMANDS[words])],
    ids=lambda value: getattr(value, "name", value),
)
def test_option_typed_as_a_key_is_refused(words: str, option: click.Option) -> None:
    name = option.opts[0]
    word = f"{name.removeprefix('--').replace('-', '_')}=3"
    typed = f"{name}, without a value" if option.is_flag else f"{name} 3"
    for before in ([], ["a"], ["a", "b"]):
        with pytest.raises(UsageError) as caught:
            ROOT([*words.split(), *before, word])
        assert str(caught.value) == f"{word}: is an option: {typed}"


@pytest.mark.parametrize("words", ["explain", "reproduce RUN"])
def test_run_directory_of_other_commands_is_an_option(words: str) -> None:
    with pytest.raises(UsageError, match=r"hydra\.run\.dir=x: is an option: --out x"):
        ROOT([*words.split(), "hydra.run.dir=x"])


@pytest.mark.parametrize("words", ["find-rate", "better"])
def test_run_directory_is_a_key_if_out_is_a_page(words: str) -> None:
    with COMMANDS[words].make_context(PROGRAM, ["hydra.run.dir=x"]) as context:
        assert context.params["overrides"] == ("hydra.run.dir=x",)


REFUSED = {
    "runs --mteric loss": "--mteric: there is no such option; did you mean --metric? Choose from ",
    "runs --metric": "--metric: needs a value after it",
    "runs --html=page.html": "--html: takes no value; runs takes [FOLDER] and --html, --out, ",
    "runs a b": "runs a b: runs takes [FOLDER] and --html",
    "dump RUN": "dump RUN: --step is missing; dump takes RUN_DIR and --step, ",
    "step RUN -12": "-12: must not be negative",
    "dump RUN stpe=3": "stpe=3: there is no such option; did you mean --step? Choose from --app",
    "infer RUN a.png --top 0": "--top 0: must be a whole number from 1 to 999,999,999",
    "infer RUN --prompt a --temperature nan": "--temperature nan: must be a number from 0 to 1e+06",
    "export RUN OUT --to onyx": "--to onyx: must be one of onnx, ckpt; did you mean onnx?",
    "job --to slrum": "--to slrum: must be one of slurm, jobset, trainjob, ray, skypilot; did ",
    "job --to lsf": "--to lsf: must be one of slurm, jobset, trainjob, ray, skypilot",
    "export RUN OUT int8=false": "int8=false: is an option: --int8, without a value",
    "report RUN --out=": "--out '': must be a path",
    "attack RUN --attacks=": "--attacks '': must be words with commas between them",
    "attack RUN --attacks fgsm,,pgd": "--attacks fgsm,,pgd: must be words with commas between them",
    "convert --all": "--all: there is no such option. Choose from --help",
    "convert weihgts": "convert weihgts: there is no such command; did you mean weights? Choose",
    "convert": "convert: must be followed by one of weights, records, model",
}


@pytest.mark.parametrize(("line", "message"), REFUSED.items(), ids=REFUSED)
def test_wrong_command_line_is_refused_with_a_hint(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ROOT(line.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_json_option_prints_only_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("size,colour\n1,red\n2,blue\n")
    assert ROOT(["columns", "a.csv", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["rows"] == 2
    assert err.startswith("a.csv: 2 rows, 2 columns\n")
    assert ROOT(["columns", "--quiet", "a.csv", "--json"]) == 0
    assert capfd.readouterr() == (out, "")
    assert ROOT(["--plugin=x.py", "columns", "--quiet", "a.csv"][1:]) == 0
    assert capfd.readouterr() == ("", "")


def test_interrupted_command_prints_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(**values: object) -> None:
        print("text")
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.cli.columns.main", interrupt)
    for words, out in ((["--json"], '{"status": "stopped"}\n'), ([], "text\n")):
        with pytest.raises(KeyboardInterrupt):
            ROOT(["columns", "a.csv", *words])
        assert capsys.readouterr().out == out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "keys"),
    [("forecast", {"step_ms", "interval_ms"}), ("explain", {"recipe", "sink", "why"})],
)
def test_emulated_device_metrics_are_json(
    words: str, keys: set[str], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = [*TINY, STEPS, f"cache.root={cache}", "device=ascend910"]
    assert ROOT([words, "--json", "--quiet", *recipe]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out).keys() >= keys
    assert err == ""


COMPLETIONS = {
    "pipeline ex": ["explain", "export"],
    "pipeline convert we": ["weights"],
    "pipeline export a b --t": ["--to"],
    "pipeline export a b --to o": ["onnx"],
    "pipeline +recipe=resnet2": ["resnet20_cifar10"],
    "pipeline summary optimizer=lam": ["lamb"],
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash isn't installed")
@pytest.mark.parametrize(("line", "words"), COMPLETIONS.items(), ids=COMPLETIONS)
def test_bash_completes_commands_options_and_recipes(
    line: str, words: list[str], tmp_path: Path
) -> None:
    """As bash calls the function of the script, with its words, `=` being one of them."""
    script = subprocess.run(
        [sys.executable, "-m", "pipeline", "completion", "bash"], capture_output=True, text=True
    )
    assert (script.returncode, script.stderr) == (0, "")
    pieces = re.findall(r"=|[^ =]+", line)
    quoted = " ".join(f"'{piece}'" for piece in pieces)
    program = (
        f"{script.stdout}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(pieces) - 1}\n"
        "complete -p pipeline >/dev/null || exit 1\n_pipeline_completion pipeline\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == words


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_scripts_exist_for_other_shells(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ROOT(["completion", shell]) == 0
    assert f"_PIPELINE_COMPLETE={shell}_complete" in capsys.readouterr().out


def drop_common_parameters(text: str) -> str:
    """Return the help of a command without the arguments and options that many commands have."""
    common = re.compile(
        r" +(--json +Print the facts as .*|--quiet +Print nothing but .*|-h, --help .*"
        r"|\[\+recipe=NAME\] \[KEY=VALUE \.\.\.\] +Recipe \(default: lenet5_digits\) and .*)"
    )
    text = "\n".join(line for line in text.splitlines() if not common.fullmatch(line))
    return re.sub(r"\n\n(Arguments|Options):(?=\n\n|$)", "", text)


def reference() -> str:
    """Return the page of all commands, as `--help` prints them."""
    parts = [
        "# Commands",
        "What `python -m pipeline COMMAND --help` prints, written by "
        "`pytest tests/cli/test_commands.py --update-golden`. Options may stand before or after "
        "arguments, and `--name=VALUE` is the same as `--name VALUE`. `KEY=VALUE` is always a key "
        "of the recipe. Without a command the arguments are a recipe, which is trained "
        "([recipes.md](recipes.md)). Left out below are `[+recipe=NAME] [KEY=VALUE ...]` (a "
        "recipe, by default lenet5_digits, and its keys), and the options `--help`, `--json` (the "
        "facts as one JSON object, the text on stderr) and `--quiet` (nothing but errors).",
    ]
    for words, command in COMMANDS.items():
        parts.append(f"## {words}\n\n```text\n{drop_common_parameters(help_of(command))}\n```")
    return "\n\n".join(parts) + "\n"


def test_command_reference_is_current(golden: Callable[[Path, str], str]) -> None:
    assert golden(REFERENCE, reference()) == reference()


def test_root_completes_groups() -> None:
    assert isinstance(ROOT, Root)
    context = click.Context(ROOT)
    assert [item.value for item in ROOT.shell_complete(context, "loss=ms")] == ["loss=mse"]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("pipeline -m +recipe = lenet5_di", "lenet5_digits"),
        ("pipeline --resolve +recipe = lenet5_di", "lenet5_digits"),
    ],
)
def test_recipes_are_completed_after_hydra_flags(
    words: str, completed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert complete(ROOT, "bash_complete") in (0, None)
    assert completed in capsys.readouterr().out


def test_table_without_a_header_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.csv"
    file.write_text("a,b\n1,2\n3,4\n")
    assert ROOT(["columns", str(file)]) == 0
    assert "2 rows, 2 columns" in capsys.readouterr().out
    assert ROOT(["columns", str(file), "--no-header"]) == 0
    assert "3 rows, 2 columns" in capsys.readouterr().out
    assert ROOT(["columns", str(file), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    with pytest.raises(UsageError, match="--delimiter ab: "):
        ROOT(["columns", str(file), "--delimiter", "ab"])


@pytest.mark.parametrize(
    ("after", "overrides", "options"),
    [
        ("a=1 --out d/lr=0.1", ("a=1",), {"out": "d/lr=0.1"}),
        ("a=1 --pairs 3 b=2 --out ~mine", ("a=1", "b=2"), {"pairs": "3", "out": "~mine"}),
        ("a=1 --out=c=1 b=2", ("a=1", "b=2"), {"out": "c=1"}),
        ("a=1 --fast b=2", ("a=1", "b=2"), {"fast": True}),
        ("wrong -3 a=1 --fast", ("wrong", "-3", "a=1"), {"fast": True}),
    ],
)
def test_value_of_an_option_is_no_override(
    after: str, overrides: tuple[str, ...], options: dict[str, object]
) -> None:
    params = [Option("--out"), Option("--pairs"), flag("--fast", text="")]
    command = ComparingCommand("better", "", "", params, example="")
    context = command.make_context("better", ["--", *after.split()])
    assert context.params["other"] == overrides
    assert options.items() <= context.params.items()


@pytest.mark.parametrize("name", ["-h", "--help"])
def test_help_is_asked_for_after_the_second_side(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["better", "--", "train.steps=3", name]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m pipeline better")
