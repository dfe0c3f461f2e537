"""What a user does first, by the command line: .ci/run does it with each version of the packages.

docs/versions.md has the table. Programs are compiled as a user's are.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.outcome import arrays, assert_equal_arrays, metrics, read_summary

Command = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[1]
SHORT = ("train.steps=150", "eval.every_steps=100")
SLOWEST_S = 300.0


def run_directory(folder: Path) -> Path:
    """Return the directory of the only run below a folder."""
    (recipe,) = folder.glob("outputs/*/*/recipe.yaml")
    return recipe.parent


@pytest.mark.usefixtures("optimized_programs_of_module")
@pytest.mark.slow
def test_default_recipe_trains_and_exports(command: Command, tmp_path: Path) -> None:
    ran = command([], timeout=SLOWEST_S)
    assert ran.returncode == 0, ran.stderr
    summary = read_summary(run_directory(tmp_path))
    assert (summary["status"], summary["steps"]) == ("done", 1760)
    assert summary["metrics"]["accuracy"] > 0.97

    ran = command(
        ["export", str(run_directory(tmp_path)), "exported", "--to=onnx"], timeout=SLOWEST_S
    )
    assert ran.returncode == 0, ran.stderr
    assert "model.onnx: logits differ from the run's by" in ran.stdout
    assert (tmp_path / "exported" / "model.onnx").stat().st_size > 100_000


@pytest.fixture(scope="module")
def sinks_of_100(
    optimized_programs_of_module: None, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory of a run in sinks of 100 steps."""
    folder = tmp_path_factory.mktemp("sinks_of_100")
    command = [sys.executable, "-m", "pipeline", *SHORT, "train.sink_size=100"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=SLOWEST_S)
    return run_directory(folder)


@pytest.mark.usefixtures("optimized_programs_of_module")
@pytest.mark.slow
def test_killed_run_in_sinks_of_7_resumes_with_the_losses_of_sinks_of_100(
    command: Command, sinks_of_100: Path, cache: Path, tmp_path: Path
) -> None:
    often = ["train.sink_size=7", "checkpoint.every_steps=20"]
    arguments = [*SHORT, *often, "train.resume=auto"]
    with subprocess.Popen(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(cache.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + SLOWEST_S
        # The first one is complete once the second one is there.
        while not list(tmp_path.glob("outputs/*/*/checkpoints/40")):
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline, "the run has saved nothing"
            time.sleep(0.001)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (run_directory(tmp_path) / "summary.json").exists()

    ran = command(arguments, timeout=SLOWEST_S)
    assert ran.returncode == 0, ran.stderr
    resumed = run_directory(tmp_path)
    assert read_summary(resumed)["resumed_from"]["step"] >= 20
    assert len(metrics(resumed)) == 150
    assert metrics(resumed) == metrics(sinks_of_100)
    assert_equal_arrays(arrays(resumed), arrays(sinks_of_100))


@pytest.mark.usefixtures("optimized_programs_of_module")
@pytest.mark.slow
def test_sweep_of_two_jobs_runs_both(command: Command, tmp_path: Path) -> None:
    ran = command(["-m", *SHORT, "train.optimizer.lr=0.01,0.05"], timeout=SLOWEST_S)
    assert ran.returncode == 0, ran.stderr
    (table,) = tmp_path.rglob("sweep.csv")
    with table.open() as opened:
        rows = list(csv.DictReader(opened))
    assert [row["status"] for row in rows] == ["done", "done"]


@pytest.mark.slow
def test_installed_command_equals_the_module(tmp_path: Path) -> None:
    """Its help, its refusals and its restart with settings of the allocator."""
    script = str(Path(sys.executable).with_name("pipeline"))
    environment = {name: text for name, text in os.environ.items() if name != "GLIBC_TUNABLES"}
    (tmp_path / "components.py").write_text(
        "import os, sys\nprint(os.environ.get('GLIBC_TUNABLES'), file=sys.stderr)\n"
    )
    for arguments in (
        ["--help"],
        ["doctor", "--help"],
        ["--plugin", "components.py", "train.stepz=1"],
    ):
        by_script, by_module = (
            subprocess.run(
                [*program, *arguments],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
            )
            for program in ([script], [sys.executable, "-m", "pipeline"])
        )
        assert by_script.returncode == by_module.returncode
        assert by_script.stdout == by_module.stdout
        assert by_script.stderr == by_module.stderr
    assert by_script.returncode == 2
    assert "glibc.malloc" in by_script.stderr


def test_lock_has_every_dependency_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    packages = tomllib.loads((ROOT / "pylock.toml").read_text())["packages"]
    locked = {row["name"]: row["version"] for row in packages}
    needed = list(map(Requirement, [*project["dependencies"], *extras["dev"]]))
    (nested,) = [line for line in needed if line.name == project["name"]]
    needed += [Requirement(line) for extra in nested.extras for line in extras[extra]]
    names = {line.name.lower().replace("_", "-"): line.specifier for line in needed}
    del names[project["name"]]
    assert [name for name in names if not names[name].contains(locked.get(name, "0"))] == []


def test_lock_has_hashes_and_only_public_urls() -> None:
    packages = tomllib.loads((ROOT / "pylock.toml").read_text())["packages"]
    files = [file for row in packages for file in [*row.get("wheels", []), row.get("sdist")]]
    assert len(files) > len(packages)
    for file in filter(None, files):
        assert file["url"].startswith("https://files.pythonhosted.org/packages/")
        assert len(file["hashes"]["sha256"]) == 64


def test_dependencies_have_both_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    for line in map(Requirement, [*project["dependencies"], *extras]):
        operators = {bound.operator for bound in line.specifier}
        assert line.name == project["name"] or operators >= {">=", "<"}, str(line)
