"""The output and the exit status of the command line."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import yaml

from pipeline import load_recipe
from pipeline.__main__ import main
from pipeline.cli.commands.key_descriptions import describe_key
from pipeline.cli.commands.root import ROOT
from pipeline.cli.schema import recipe_schema
from pipeline.config.compose import check_tree
from pipeline.config.files import find_groups
from pipeline.config.recipe import Recipe
from pipeline.core.files.paths import PACKAGE, RECIPES
from pipeline.core.files.tree_diff import iterate_leaves
from tests import outcome
from tests.cli.test_commands import all_commands
from tests.conftest import STEPS, TINY
from tests.test_recipes import OWN_TABLES


class Said(NamedTuple):
    """The result of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def say(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Said]:
    """Run a command line in this process, in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    monkeypatch.setattr("sys.argv", ["pipeline"])

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return Said(status, *capsys.readouterr())

    return run


Say = Callable[..., Said]


def test_atexit_callbacks_run_before_process_exit() -> None:
    program = (
        "import atexit, sys, threading\n"
        "from pipeline.__main__ import main\n"
        "sys.argv = ['pipeline', '--help']\n"
        "status = main()\n"
        "threading.Timer(0.2, print, ['waited']).start()\n"
        "atexit.register(print, 'called')\n"
        "sys.exit(status)\n"
    )
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.check=0"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split()[-2:] == ["waited", "called"]


def test_help_is_fast_and_short(command: Callable[..., Any]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said: subprocess.CompletedProcess[str] = command(["--help"])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor: others may use the machine too.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert (said.returncode, said.stderr) == (0, "")
    lines = said.stdout.splitlines()
    assert len(lines) <= 40
    texts = [line for line in lines if line.startswith("  ") and not line.startswith("   ")]
    starts = {re.search(r" {2,}\S", line[2:]).end() for line in texts}  # type: ignore[union-attr]
    assert len(starts) == 1, "the texts are in one column"
    assert not re.search(r"\b[A-Z]-\d\d\b", said.stdout)


def test_all_help_lists_all_options(say: Say) -> None:
    said = say("--help", "all")
    said_out = said.out
    assert (said.status, said.err) == (0, "")
    assert not re.search(r"\([A-Z]-\d\d\)", said_out)
    for recipe in RECIPES.glob("*.yaml"):
        assert re.search(rf"^  {recipe.stem} +\S", said_out, re.MULTILINE)
    groups = find_groups()
    assert len(groups) >= 7
    for group, options in groups.items():
        assert f"Group {group} ({group}=NAME)" in said_out
        for option in options:
            assert re.search(rf"^  {option} +\S", said_out, re.MULTILINE)


def test_help_lists_every_command(say: Say) -> None:
    lines = say("--help", "all").out.splitlines()
    for command in all_commands(ROOT):
        start = f"  {command.words} "
        assert any(line.startswith(start) and command.short_help in line for line in lines)


@pytest.mark.parametrize(
    ("topic", "names"),
    [
        ("recipes", ["lenet5_digits", "gpt_text"]),
        ("models", ["resnet50", "vit_tiny"]),
        ("datasets", ["mnist", "csv"]),
        ("losses", ["mse", "huber"]),
        ("device", ["cpu", "ascend910"]),
    ],
)
def test_help_lists_the_names_of_a_topic(topic: str, names: list[str], say: Say) -> None:
    said = say("--help", topic)
    assert (said.status, said.err) == (0, "")
    for name in names:
        assert re.search(rf"^  {name} +\S", said.out, re.MULTILINE)
    assert "adamw" not in said.out


@pytest.mark.medium
@pytest.mark.parametrize(
    ("key", "lines"),
    [
        (
            "train.sink_size",
            [
                "train.sink_size: a whole number, or auto; default -1",
                "  -1: a sink per epoch; N > 0: N batches, continuing after the last sink; auto: ",
                "example: python -m pipeline +recipe=NAME train.sink_size=-1",
            ],
        ),
        ("train.minutes", ["train.minutes: a number above 0 at most 527,040, or null"]),
        ("monitor.log_level", ["monitor.log_level: one of debug, info, warning, error, or null"]),
        ("train.optimizer.lr", ["train.optimizer.lr: a number above 0; default 0.001  (adabelief"]),
        ("dataset.train.ops.0.padding", ["dataset.train.ops.0.padding: "]),
        ("checkpoint", ["checkpoint: a section of keys", "Keys: every_steps, every_epochs, "]),
    ],
)
def test_help_describes_a_key(key: str, lines: list[str], say: Say) -> None:
    said = say("--help", key)
    assert (said.status, said.err) == (0, "")
    for line in lines:
        assert f"\n{line}" in f"\n{said.out}"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("topic", "guess"),
    [
        ("train.sink_sise", "; did you mean train.sink_size?"),
        ("nothing.like.it", ""),
        ("train.batch_size.more", ""),
    ],
)
def test_unknown_topic_of_help_is_refused(topic: str, guess: str, say: Say) -> None:
    said = say("--help", topic)
    assert (said.status, said.out) == (2, "")
    topics = "is neither a topic (all, recipes, models, datasets, ...) nor a key"
    assert said.err == f"error: --help {topic}: {topics}{guess}\n"


OWN_LOSS = """
from typing import Literal

from pipeline.api import LossSpec, component


@component("loss")
class Mine(LossSpec):
    name: Literal["mine"] = "mine"

    def build(self):
        return None
"""


@pytest.mark.medium
def test_help_lists_the_components_of_plugins(tmp_path: Path) -> None:
    """In another process, since components stay registered."""
    (tmp_path / "own.py").write_text(OWN_LOSS)
    command = [sys.executable, "-m", "pipeline", "--plugin", "own.py", "--help", "losses"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    last = said.stdout.splitlines()[-1]
    assert last.startswith("  mine  train.loss.name=mine, of ")
    assert last.endswith("own.py")


@pytest.mark.slow
def test_every_key_of_a_recipe_has_help() -> None:
    """Of its sections and of the components of the default recipe."""
    tree = load_recipe("lenet5_digits").model_dump(mode="json")
    for path, _ in iterate_leaves(tree):
        names = [str(part) for part in path if not isinstance(part, int)]
        if names[-1] != "name" and names[:2] != ["monitor", "lineage"]:
            assert describe_key(names), names


def test_help_does_not_import_slow_libraries() -> None:
    program = (
        "import sys\n"
        "from pipeline.__main__ import main\n"
        "main(['--help'])\n"
        "slow = 'hydra', 'jax', 'numpy', 'pydantic', 'yaml', 'rich', 'importlib.metadata'\n"
        "print([name for name in slow if name in sys.modules])\n"
    )
    # Without the .pth files of site-packages, which may import anything.
    command = [sys.executable, "-S", "-c", program]
    ended = subprocess.run(
        command,
        cwd=PACKAGE.parent,
        env={**os.environ, "PYTHONPATH": str(Path(click.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.splitlines()[-1] == "[]"


def test_version_option_prints_package_versions(say: Say) -> None:
    said = say("--version")
    assert (said.status, said.err) == (0, "")
    python = re.escape(platform.python_version())
    assert re.fullmatch(rf"recipe-pipeline \S.*, Python {python}, jax {version('jax')}\n", said.out)


UNKNOWN = {
    "a misspelled command": (
        ["repot", "x"],
        "error: repot: there is no such command; did you mean report? Choose from adopt, ",
    ),
    "a key without a value": (["seed"], ", without; a key is typed as KEY=VALUE\n"),
    "spaces at the equals sign": (
        ["train.epochs", "=", "3"],
        "error: train.epochs: must have no space at its =, as train.epochs=3\n",
    ),
    "an override with spaces in quotes": (
        ["train.epochs = 3"],
        "train.epochs = 3: must have no space at its =, as train.epochs=3\n",
    ),
    "training": (["train", "train.steps=3"], "train: must be left out; arguments without a com"),
    "a recipe": (["lenet5_digits"], "is a recipe; to train it, type +recipe=lenet5_digits"),
    "a flag": (["--foo=3", "device=cpu"], "error: --foo=3: there is no such flag; --help and "),
    "a value of a flag": (["--cfg", "jobs"], "error: --cfg/-c: invalid choice: 'jobs'"),
    "an empty argument": ([""], "an argument is empty; must be KEY=VALUE"),
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["checkpoint.rules=torch"], "checkpoint.rules = torch: needs checkpoint.restore, the wei"),
        (
            ["checkpoint.partial=true", "checkpoint.renames=[{match: fc, to: head}]"],
            "checkpoint.renames = ['fc'], checkpoint.partial = true: need checkpoint.restore",
        ),
        (["checkpoint.optimizer=true"], "needs checkpoint.prefix or checkpoint.directory, for"),
    ],
)
def test_key_without_its_partner_is_refused(keys: list[str], message: str, say: Say) -> None:
    said = say(*keys)
    assert (said.status, said.out) == (2, "")
    assert message in said.err
    assert said.err.count("\n") == 2


@pytest.mark.parametrize(("arguments", "message"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown_argument_is_named(arguments: list[str], message: str, say: Say) -> None:
    said = say(*arguments)
    assert (said.status, said.out) == (2, "")
    assert message in said.err
    assert "__main__" not in said.err
    assert "usage:" not in said.err


def test_help_lists_the_recipes_of_the_working_folder(say: Say, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("# @package _global_\n# My own network\n")
    assert re.search(r"^  mine +My own network$", say("-h", "recipes").out, re.MULTILINE)


@pytest.mark.slow
def test_command_works_from_any_folder(command: Callable[..., Any], tmp_path: Path) -> None:
    said: subprocess.CompletedProcess[str] = command([*TINY, STEPS, "train.sink_size=20"])
    assert (said.returncode, said.stderr) == (0, "")
    (run_dir,) = tmp_path.glob("outputs/*/*_lenet5_digits")
    told = dict.fromkeys(line.split()[0] for line in said.stdout.splitlines())
    stages = ["recipe", "data", "build", "compile"]
    classes = ["class", *map(str, range(10))]
    assert list(told) == [*stages, "train", "eval", *classes, "time", "done"]
    assert sorted(path.name for path in run_dir.iterdir()) == [
        ".lock",
        "checkpoints",
        "evals.jsonl",
        "lowerings.json",
        "metrics.jsonl",
        "provenance.json",
        "recipe.yaml",
        "run.log",
        "summary.json",
    ]
    log = [line.partition(" ")[2] for line in (run_dir / "run.log").read_text().splitlines()]
    printed = said.stdout.splitlines()
    assert [line for line in log if line in printed] == printed
    # Details of the programs are in the log alone.
    assert {line.split()[0] for line in log if line not in printed} == {"lower", "compile"}


@pytest.mark.medium
def test_refused_recipe_leaves_no_directory(say: Say, tmp_path: Path) -> None:
    assert say(*TINY, "train.sink_size=0", "hydra.run.dir=deep/mine").status == 2
    assert say(*TINY, "train.sink_size=0").status == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_run_directory_can_be_named(say: Say, tmp_path: Path) -> None:
    assert say(*TINY, "stages=[data]", "hydra.run.dir=deep/mine").status == 0
    assert (tmp_path / "deep" / "mine" / "summary.json").is_file()
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_stages_may_end_early(say: Say, tmp_path: Path) -> None:
    said = say(*TINY, STEPS, "stages=[data,build,compile]", "hydra.run.dir=run")
    assert said.status == 0
    summary = outcome.read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["metrics"]) == ("done", 0, {})
    assert summary["time"]["compile_s"] > 0
    assert summary["stages"] == ["data", "build", "compile"]
    assert summary["exit_status"] == 0
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_failed_run_returns_1(say: Say) -> None:
    said = say(*TINY, STEPS, "model=mlp", "+model.hidden=[8]", "train.optimizer.lr=1e30")
    assert said.status == 1
    assert said.err.startswith("error: epoch: 1 step: ")
    assert said.err.count("\n") == 1


@pytest.mark.slow
def test_step_without_room_on_the_device_returns_1(say: Say) -> None:
    small = ["device.hbm_gib.value=1e-3", "device.feature_map_memory_gib.value=1e-3"]
    said = say(*TINY, STEPS, "device=ascend910", *small)
    assert said.status == 1
    assert said.err.startswith("error: Device(id:0) memory isn't enough: kernel name: ")
    assert "Traceback" not in said.err


BAD = {
    "unknown option": (["model=lenet6"], "model = lenet6: there is no such model"),
    "unknown recipe": (["+recipe=nothing"], "recipe = nothing: there is no such recipe"),
    "recipe file that is not there": (["+recipe=no.yaml"], "recipe = no.yaml: there is no such"),
    "wrong value": (["train.batch_size=0"], "train.batch_size = 0: must be greater than 0"),
    "no key": (["=3"], "=3"),
    "no equals sign": (["device=cpu", "seed"], "seed: must be KEY=VALUE"),
    "open bracket": (["stages=[data"], "no viable alternative at input '[data'"),
    "name for a section of Hydra's": (
        ["hydra.sweeper=optuna"],
        "hydra.sweeper = optuna: is a section; an option of it is chosen by hydra/sweeper=optuna",
    ),
    "null for a group": (["model=null"], "must be a string"),
    "text for a section": (
        ["train.optimizer=adam"],
        "train.optimizer = adam: the section lacks lr, weight_decay, decay_rules, b1, b2, eps; "
        "choose it whole: optimizer=adam (in",
    ),
    "no stages": (["stages=[]"], "stages = []: "),
    "data that is not there": (
        ["dataset=mnist", "dataset.root=nowhere", "dataset.name=mnist", STEPS],
        "nowhere lacks train-images-idx3-ubyte.gz",
    ),
    "run that is not there": (
        ["train.resume=nowhere"],
        "train.resume = nowhere: must be a run directory",
    ),
    "checkpoint that is not there": (
        [*TINY, STEPS, "stages=[data,build,compile,eval]", "checkpoint.restore=nowhere"],
        "nowhere: holds no checkpoint",
    ),
    "no device": (
        ["device=ascend910", "parallel.devices=0"],
        "parallel.devices = 0: must be greater than 0",
    ),
    "type that the chip lacks": (
        ["device=ascend910", "train.precision=bf16"],
        "train.precision = bf16: Ascend 910A supports float16, float32,",
    ),
    "figure without its unit": (
        ["device=ascend910", "+device.hbm={value: 16, source: mine, confidence: assumed}"],
        "device.hbm = ",
    ),
    "figure without its source": (
        ["device=ascend910", "device.hbm_gib=16"],
        "device.hbm_gib: must be {value: NUMBER, source: where it is from,",
    ),
    "batch over the queue": (
        [*TINY, STEPS, "device=ascend910", "device.data_queue_gib.value=1e-5"],
        "train.batch_size = 16: makes a batch of 6.11e-05 GiB, more than the 1e-05 GiB of the",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_error_message_has_no_traceback(arguments: list[str], message: str, say: Say) -> None:
    said = say(*arguments)
    assert said.status == 2
    assert message in said.err
    assert "Traceback" not in said.err
    assert "debug=true" not in said.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "mine.yaml: not readable as YAML: "),
        ("- 1", "mine.yaml: must hold keys and values, not a list"),
        ("train: {sink_sise: 3}", "train.sink_sise = 3: there is no such key"),
        ("defaults: [override /model: lenet6]", "model = lenet6: there is no such model"),
        ("hydra: {run: {dir: x}}", "mine.yaml: hydra: must not be in a file"),
    ],
    ids=["yaml", "list", "key", "default", "hydra"],
)
def test_error_in_recipe_file_is_named(text: str, message: str, say: Say, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    said = say("+recipe=mine.yaml")
    assert said.status == 2
    assert message in said.err
    assert "Traceback" not in said.err


@pytest.mark.slow
def test_unknown_name_error_lists_choices(say: Say) -> None:
    said = say("+recipe=zzz")
    # Hydra keeps what other tests in this process have made known.
    assert re.search(r"there is no such recipe[.;] Choose from (\w+, )*lenet5_digits, ", said.err)


@pytest.mark.slow
def test_all_problems_are_reported_at_once(say: Say) -> None:
    said = say("model=lenet6", "train.sink_sise=5", "train.batch_siz=3")
    assert said.err.startswith("error: the recipe has 3 problems:\n  ")
    assert said.err.count("\n") == 4


@pytest.mark.slow
def test_debug_shows_the_traceback(say: Say) -> None:
    said = say("train.batch_size=0", "debug=true")
    assert said.status == 2
    assert said.err.startswith("Traceback (most recent call last)")
    assert said.err.endswith("train.batch_size = 0: must be greater than 0\n")


@pytest.mark.slow
def test_unwritable_run_directory_is_named(say: Say, tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file")
    for arguments in ([], ["hydra.run.dir=outputs/run"]):
        said = say(*TINY, "stages=[data]", *arguments)
        assert said.status == 1
        assert "can't make the run directory: " in said.err


@pytest.mark.slow
def test_error_of_a_bug_has_a_hint_to_the_traceback(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("pipeline.stages.run.load_data", broken)
    said = say(*TINY)
    assert said.status == 1
    assert said.err == (
        "error: ZeroDivisionError: division by zero (debug=true shows the traceback)\n"
    )


@pytest.mark.slow
def test_interrupt_is_recorded_without_error_message(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.stages.run.load_data", interrupted)
    said = say(*TINY, "hydra.run.dir=run")
    assert (said.status, said.err) == (75, "interrupted\n")
    summary = outcome.read_summary(tmp_path / "run")
    assert (summary["status"], summary["reason"]) == ("stopped", "KeyboardInterrupt")


ALL_RECIPES = sorted(file.stem for file in RECIPES.glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_RECIPES)
def test_shown_recipe_is_complete_and_resolved(name: str, say: Say) -> None:
    keys = ["train.steps=20_000", *OWN_TABLES.get(name, ())]
    said = say("--cfg", "job", f"+recipe={name}", *keys)
    assert (said.status, said.err) == (0, "")
    tree = yaml.safe_load(said.out)
    tree["train"] |= {"epochs": None, "sink_epochs": None}
    assert check_tree(tree) == load_recipe(name, keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet5_digits", "mlp_quickstart"])
def test_shown_recipe_can_be_run(name: str, say: Say, tmp_path: Path) -> None:
    """And so is recipe.yaml of a run directory, which holds the same."""
    (tmp_path / "shown.yaml").write_text(say("--cfg", "job", f"+recipe={name}").out)
    assert load_recipe(str(tmp_path / "shown.yaml")) == load_recipe(name)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["elsewhere", "recipes"])
def test_file_named_as_shipped_recipe_is_shown(where: str, say: Say, tmp_path: Path) -> None:
    """Whole, as the recipe.yaml of a run is, with and without a component chosen beside it."""
    whole = say("--cfg", "job", "+recipe=mlp_mnist", "seed=77").out
    folder = tmp_path / where
    folder.mkdir()
    (folder / "lenet5_digits.yaml").write_text(whole)
    named = f"+recipe={folder / 'lenet5_digits.yaml'}"
    for beside in ([], ["optimizer=adam"]):
        shown = yaml.safe_load(say("--cfg", "job", named, *beside).out)
        assert (shown["seed"], shown["model"]["name"]) == (77, "mlp")
    told = say("--cfg", "job", named, "train.sink_sise=1").err
    assert "train.sink_sise = 1: there is no such key" in told
    assert "problems" not in told


@pytest.mark.slow
def test_schema_is_json_with_valid_references(say: Say) -> None:
    said = say("schema")
    schema = json.loads(said.out)
    assert (said.status, schema) == (0, json.loads(json.dumps(recipe_schema())))
    assert set(schema["properties"]) == {*Recipe.model_fields, "defaults", "hydra", "expect"}
    references = re.findall(r'"\$ref": "#/\$defs/([^"]+)"', said.out)
    assert len(references) > 40
    assert set(references) <= set(schema["$defs"])
