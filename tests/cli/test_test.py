"""The command `test`, as a project and its CI call it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from pipeline.__main__ import main
from pipeline.cli.commands.root import ROOT as COMMANDS
from pipeline.cli.test import _open_side
from pipeline.core.files.paths import RECIPES
from pipeline.study.expect.sides import CodeSide
from tests.conftest import ROOT
from tests.study.expect.test_sides import git

PAGE = (ROOT / "docs" / "testing-recipes.md").read_text()
DOCUMENTED = re.findall(r"^    python -m pipeline (test[^#\n]*)", PAGE, re.MULTILINE)
WORKFLOW = ROOT / "examples" / "test_recipes.yml"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the document's recipe, and a run of it."""
    text = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert text is not None
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(text[1])
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "recipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_documented_commands_run(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ["+recipe=recipes/mine.yaml", "hydra.run.dir=outputs/mine", "monitor.tensorboard=false"]
    assert main(run) == 0
    assert len(DOCUMENTED) == 5
    capfd.readouterr()
    for words in map(shlex.split, DOCUMENTED):
        assert main(words) == 0, words
        lines = capfd.readouterr().out.splitlines()
        assert [line.split()[1] for line in lines[:-1]] == ["loss@100:", "accuracy:", "learns:"]
        is_first = words == ["test"]
        assert lines[-1].startswith(f"3 expectations: {2 if is_first else 3} met") or is_first
        assert ("not comparable" in lines[0]) is is_first
    suite = ElementTree.parse(project / "results.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("3", "0")
    assert (project / "recipes" / "expected" / "mine.json").exists()


def test_file_of_a_recipe_does_not_make_the_folder_a_run(project: Path) -> None:
    """A run's folder has a recipe.yaml, too, but HEAD isn't in it."""
    (project / "recipe.yaml").write_text("name: mine\n")
    with _open_side("HEAD") as side:
        assert isinstance(side, CodeSide)


@pytest.mark.slow
def test_difference_from_a_commit_is_found(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A learning rate that is 5 % too high: other bits, then pairs of short runs."""
    recipe = project / "recipes" / "mine.yaml"
    section = "expect: {loss@100: null, loss@20: recorded, accuracy: null, learns: null}"
    head = recipe.read_text().partition("expect:")[0]
    recipe.write_text(f"{head}{section}\n")
    git(project, "commit", "--quiet", "-am", "short")
    recipe.write_text(head.replace("epochs: 4", "epochs: 4, optimizer: {lr: 0.021}") + section)
    assert main(["test", "--against", "HEAD", "--json"]) == 1
    (facts,) = json.loads(capfd.readouterr().out)["expectations"]
    assert facts["verdict"] == "not met"
    assert "bits differ, and mean loss of 20 steps is -" in facts["figure"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["lenet6"], "lenet6"),
        (["resnet50_cifar10"], "has no section expect"),
        (["lenet5_digits", "--against", "nothing"], "--against nothing: must be a run or a commit"),
        (["lenet5_digits", "--pairs", "8"], "9"),
        (["lenet5_digits", "--junit", "missing/x.xml"], "must be a file in a folder that exists"),
        ([], "none of them has a section expect"),
    ],
)
def test_wrong_input_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert main(["test", *words]) == 2
    output = capsys.readouterr()
    assert problem in output.err
    assert output.out == ""
    assert list(tmp_path.iterdir()) == []


def test_workflow_calls_commands_that_exist() -> None:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["expectations"]["steps"]
    commands = [shlex.split(step["run"]) for step in steps if "pipeline" in step.get("run", "")]
    assert len(commands) == 2
    for words in commands:
        assert words[:3] == ["python", "-m", "pipeline"]
        with COMMANDS.make_context("pipeline", words[3:]) as context:
            _, command, rest = COMMANDS.resolve_command(context, words[3:])
            assert command is not None
            command.make_context("test", list(rest))
            recipes = [word for word in rest if (RECIPES / f"{word}.yaml").exists()]
    assert recipes == ["lenet5_digits"]


def test_continuous_integration_meets_expectations() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    (line,) = [line for line in lines if "pipeline test" in line]
    recipes = line.split()[4:]
    assert len(recipes) >= 4
    for recipe in recipes:
        assert "expect" in yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
