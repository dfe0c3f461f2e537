"""Runs beside the recorded figures of the original training (G-05)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeline import run
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.files.paths import RECIPES
from pipeline.engine.monitors.log_lines import read_lines
from pipeline.stages.record.recorded_recipe import describe_comparison, find_reference
from pipeline.stages.record.summary import Summary, read_summary

FIGURES = {"source": "a laptop", "metrics": {"accuracy": 0.5}, "step_ms": 2, "losses": [2.5, 2.25]}


def write_reference(folder: Path, text: str, name: str = "lenet5_digits") -> Path:
    (folder / "references").mkdir(parents=True, exist_ok=True)
    file = folder / "references" / f"{name}.yaml"
    file.write_text(text)
    return file


@pytest.mark.slow
def test_run_is_compared_with_its_reference(
    tiny: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_reference(tmp_path / "recipes", yaml.safe_dump(FIGURES))
    summary = run(tiny("train.steps=12"), tmp_path / "run")
    standing = read_summary(tmp_path / "run").reference
    assert standing == summary.reference
    accuracy = summary.metrics["accuracy"]
    assert standing["figures"] == {
        "accuracy": {"reference": 0.5, "run": accuracy},
        "step_ms": {"reference": 2.0, "run": summary.time["step_ms"]},
    }
    first = [line.numbers()["loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")][:2]
    assert None not in first
    apart = max(abs(a - b) for a, b in zip(first, FIGURES["losses"], strict=True))
    assert standing["losses"] == {"steps": 2, "largest_difference": apart}
    line = next(line for line in capsys.readouterr().out.splitlines() if "reference" in line)
    assert line.startswith(f"reference  accuracy {accuracy:.4g} ({accuracy - 0.5:+.2g}), ")
    assert line.endswith(f"the first 2 losses at most {apart:.2g} apart; from a laptop")


def test_recipe_without_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_reference("lenet5_digits") is None


def test_component_file_is_read_beside_the_recipe_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_reference(tmp_path / "recipes", yaml.safe_dump(FIGURES))
    write_reference(tmp_path / "mine", yaml.safe_dump({"source": "mine"}))
    found = find_reference("lenet5_digits", tmp_path / "mine")
    assert found is not None
    assert found.source == "mine"
    assert find_reference("lenet5_digits", tmp_path) is None


def test_missing_figures_are_reported(tmp_path: Path) -> None:
    write_reference(tmp_path, yaml.safe_dump({**FIGURES, "metrics": {"f1": 0.9, "recall": 1.0}}))
    found = find_reference("lenet5_digits", tmp_path)
    assert found is not None
    metrics = {"f1": {"macro": 0.75, "class": [1.0, 0.5]}}
    summary = Summary("lenet5_digits", "cpu", 1, ("train",), None, metrics=metrics)
    standing = found.compare(summary, tmp_path)
    assert describe_comparison(standing) == "f1 0.75 (-0.15), no recall, no step_ms; from a laptop"
    json.dumps(standing)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("accuracy: 1\nstep_ms: -1", ["source", "accuracy = 1", "step_ms = -1"]),
        ("source: a\nlosses: [x]", ["losses"]),
        ("source: a\nmetrics: 0.9", ["metrics = 0.9"]),
        ("- a", ["must hold keys and values"]),
        ("a: [", ["can't be read"]),
    ],
)
def test_invalid_reference_file_is_refused(text: str, problems: list[str], tmp_path: Path) -> None:
    file = write_reference(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        find_reference("lenet5_digits", tmp_path)
    assert caught.value.exit_status == 2
    for problem in problems:
        assert f"{file}: {problem}" in str(caught.value)


@pytest.mark.parametrize("file", sorted((RECIPES / "references").iterdir()), ids=lambda f: f.stem)
def test_shipped_references_belong_to_recipes(file: Path) -> None:
    assert (RECIPES / file.name).is_file()
    assert find_reference(file.stem) is not None
