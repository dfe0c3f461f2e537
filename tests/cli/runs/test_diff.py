from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from tests.conftest import MLP, compose_tiny
from tests.whole_run import run


@pytest.fixture(scope="module")
def runs(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of which one has another rate and another seed."""
    one, other = (tmp_path_factory.mktemp("runs") / name for name in ("one", "other"))
    run(compose_tiny(cache, *MLP), one)
    run(compose_tiny(cache, *MLP, "train.optimizer.lr=0.02", "seed=2"), other)
    return one, other


Say = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    monkeypatch.setenv("COLUMNS", "200")

    def say(*args: object) -> str:
        capsys.readouterr()
        assert main(["diff", *map(str, args)]) == 0
        return capsys.readouterr().out

    return say


def rows(text: str) -> dict[str, list[str]]:
    """The cells of every line by its first."""
    lines = [line.split() for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells}


@pytest.mark.slow
def test_changed_keys_and_outcome_are_shown(runs: tuple[Path, Path], said: Say) -> None:
    text = said(*runs)
    found = rows(text)
    assert found["A"] == [f"{runs[0]}:", "done,", "45", "steps"]
    assert found["train.optimizer.lr"] == ["0.01", "0.02", "+100.00%"]
    assert found["seed"] == ["1", "2", "+100.00%"]
    assert found["data"] == found["code"] == found["environment"] == ["the", "same"]
    assert {"metrics.accuracy", "metrics.loss", "time.step_ms"} <= set(found)
    assert found["steps"][:3] == ["45", "of", "45"]
    assert "from step 1: loss " in text


@pytest.mark.medium
def test_run_does_not_differ_from_itself(runs: tuple[Path, Path], said: Say) -> None:
    found = rows(said(runs[0], runs[0]))
    for section in ("config", "data", "code", "environment", "outcome"):
        assert found[section] == ["the", "same"]
    assert " ".join(found["steps"]) == "45 are the same, bit for bit"


@pytest.mark.medium
def test_json_output_is_one_object(runs: tuple[Path, Path], said: Say) -> None:
    facts = json.loads(said(*runs, "--json"))
    config = {entry["key"]: [entry["a"], entry["b"]] for entry in facts["config"]}
    assert config == {"train.optimizer.lr": [0.01, 0.02], "seed": [1, 2]}
    assert (facts["data"], facts["steps"]["differing"]) == ([], 45)


def edit(run_dir: Path, act: Callable[[Any], None]) -> None:
    file = run_dir / "provenance.json"
    tree = json.loads(file.read_text())
    act(tree["processes"][0])
    file.write_text(json.dumps(tree))


def test_data_code_and_environment_are_distinguished(
    runs: tuple[Path, Path], said: Say, tmp_path: Path
) -> None:
    other = shutil.copytree(runs[0], tmp_path / "other")

    def as_elsewhere(process: Any) -> None:
        process["data"]["eval"]["label"]["sha256"] = 64 * "0"
        process["code"] = {"sha256": 64 * "1", "git": {"changed": ["a.py", "b.py"]}}
        process["versions"]["jaxlib"] = "9.0.0"
        process["machine"]["cores"] = 96
        process["settings"] = {"XLA_FLAGS": "--fast"}

    edit(other, as_elsewhere)
    found = rows(said(runs[0], other))
    assert found["eval.label.sha256"][1] == 12 * "0"
    assert found["sha256"][1] == 12 * "1"
    assert found["versions.jaxlib"][1] == "9.0.0"
    assert found["machine.cores"][1] == "96"
    assert found["settings.XLA_FLAGS"][-1] == "--fast"
    assert found["config"] == ["the", "same"]


def test_missing_lines_are_reported(runs: tuple[Path, Path], said: Say, tmp_path: Path) -> None:
    """Of a run that was killed before it had a step."""
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(runs[0] / "recipe.yaml", other)
    found = rows(said(runs[0], other))
    assert found["B"] == [f"{other}:", "killed"]
    assert found["data"] == found["code"] == ["not", "kept", "by", "both", "runs"]
    assert found["status"][:2] == ["done", "killed"]
    assert found["steps"] == ["not", "kept", "by", "both", "runs"]


def test_control_characters_are_escaped(runs: tuple[Path, Path], said: Say, tmp_path: Path) -> None:
    """A run may come from a stranger, and numbers may be beyond what a float can be."""
    other = shutil.copytree(runs[0], tmp_path / "other")
    summary = {"status": "\x1b[2J", "steps": 10**400, "metrics": {"\x1b[2J": 1}}
    (other / "summary.json").write_text(json.dumps(summary))
    text = said(runs[0], other)
    assert r"\x1b[2J" in text
    assert r"metrics.\x1b[2J" in text
    assert "\x1b" not in text


def test_unreadable_log_prints_only_the_error(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = shutil.copytree(runs[0], tmp_path / "other")
    with (other / "metrics.jsonl").open("a") as log:
        log.write("nothing\n")
    assert main(["diff", str(runs[0]), str(other)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(
        "metrics.jsonl, line 46: isn't a step of a run; remove the file to continue without it\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "diff: RUN_A is missing; diff takes RUN_A RUN_B"),
        (["one"], "diff one: RUN_B is missing; diff takes RUN_A RUN_B"),
        (["--all", "one"], "--all: there is no such option. Choose from --help"),
        (["nowhere", "nowhere"], "nowhere: there is no such run, looked in "),
    ],
)
def test_wrong_arguments_are_reported(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *args]) == 2
    assert message in capsys.readouterr().err
