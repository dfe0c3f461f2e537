"""The Containerfile: what it copies is enough to install the project, by the command it runs."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Containerfile").read_text()
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
INSTRUCTIONS = [tuple(line.split(" ", 1)) for line in LINES]
SOURCE = "/src"


def arguments(name: str) -> list[str]:
    """Return the texts after an instruction."""
    return [text for instruction, text in INSTRUCTIONS if instruction == name]


def test_image_python_is_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (image,) = arguments("FROM")
    version = image.partition("python:")[2].removesuffix("-slim")
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]


def test_image_name_matches_job_files() -> None:
    from pipeline.stages.launch.job_file import IMAGE

    assert TEXT.startswith(f"# podman build -t {IMAGE} .")
    assert arguments("WORKDIR") == ["/work"]


def test_image_has_an_ordinary_user_who_can_write_results_and_caches() -> None:
    names = [instruction for instruction, _ in INSTRUCTIONS]
    (user,) = arguments("USER")
    assert user == "1000:1000"
    assert names.index("USER") > max(n for n, name in enumerate(names) if name == "RUN")
    assert "install -d -o 1000 -g 1000 /work" in arguments("RUN")
    (variables,) = arguments("ENV")
    assert "HOME=/work" in variables.split()


@pytest.mark.slow
def test_copied_files_install_by_the_command(tmp_path: Path) -> None:
    """Without the dependencies, which a test must not download."""
    pytest.importorskip("pip", reason="pip isn't installed here")
    for text in arguments("COPY"):
        *sources, target = text.split()
        folder = tmp_path / Path(target).relative_to("/")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder, ignore=shutil.ignore_patterns("*.pyc"))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, folder)
    run = arguments("RUN")[0]
    words = shlex.split(run.replace("${EXTRAS}", "").replace(SOURCE, f"{tmp_path}{SOURCE}"))
    assert words[0] == "pip"
    installed = tmp_path / "installed"
    offline = ["--no-deps", "--no-build-isolation", "--quiet", "--target", str(installed)]
    subprocess.run([sys.executable, "-m", *words, *offline], check=True)
    check = "import pipeline, pipeline.core.files.paths as p; print(pipeline.__file__, p.CONF)"
    printed = subprocess.run(
        [sys.executable, "-c", check],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    package = installed / "pipeline"
    assert printed.stdout.split()[-1] == str(package / "conf")
    assert (package / "conf" / "job" / "slurm.sh.j2").exists()
