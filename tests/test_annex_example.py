"""The example of an annex: installed it works, and uninstalled it leaves no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ANNEX = ROOT / "examples" / "annex"
RECIPE = f"+recipe={ANNEX / 'moons.yaml'}"


def run_pipeline(folder: Path, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_annex_adds_a_dataset_a_feature_and_a_command(tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    options = ["--no-build-isolation", "--target", str(site)]
    subprocess.run([*pip, *options, str(ANNEX)], check=True)
    # pip builds in the folder of the sources.
    assert {path.name for path in ANNEX.iterdir()} <= {
        *("README.md", "moons.yaml", "moons_annex", "pyproject.toml"),
    }
    trained = run_pipeline(tmp_path, site, RECIPE, "hydra.run.dir=run")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    lines = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    losses = [line["loss"] for line in lines]
    smallest = [min(losses[: number + 1]) for number in range(len(losses))]
    assert [line["smallest_loss"] for line in lines] == smallest
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["accuracy"] > 0.9
    assert summary["versions"]["moons-annex"] == "1.0"
    best = run_pipeline(tmp_path, site, "best-loss", "run")
    step = 1 + losses.index(min(losses))
    assert best.stdout == f"step {step}: loss {min(losses):.4f}\n"


@pytest.mark.slow
def test_annex_that_is_not_installed_is_refused_in_one_line(tmp_path: Path) -> None:
    refused = run_pipeline(tmp_path, tmp_path, RECIPE)
    assert refused.returncode == 2
    assert "dataset = moons: there is no such dataset" in refused.stderr
    refused = run_pipeline(tmp_path, tmp_path, "best-loss", "run")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: best-loss: there is no such command")
