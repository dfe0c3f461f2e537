"""The wheel: what it holds beside the code, and that its code is that of the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pipeline
from pipeline.stages.record.provenance import describe_code
from tests.release import build

ROOT = Path(__file__).parents[1]


def test_package_is_typed() -> None:
    assert Path(pipeline.__file__).with_name("py.typed").read_bytes() == b""


@pytest.mark.slow
def test_distributions_of_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a copy without its commits builds no release")
    first, second = (build(tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert {name.rpartition(".")[2] for name in first} == {"gz", "whl"}


@pytest.mark.slow
def test_wheel_has_types_conf_recipes_and_the_lock(tmp_path: Path) -> None:
    # The builder itself: pip would download one.
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    package = tmp_path / "pipeline"
    assert (package / "py.typed").read_bytes() == b""
    for name in ("pylock.toml", "conf/config.yaml", "recipes/lenet5_digits.yaml"):
        assert (package / name).read_bytes() == (ROOT / name).read_bytes()
    assert (package / "examples" / "project" / "components.py").exists()
    assert describe_code(package)["sha256"] == describe_code()["sha256"]

    # The installed command looks for these files beside its modules.
    check = "from pipeline.core.files.paths import *; print(PACKAGE, CONF, LOCK, LOCK.exists())"
    printed = subprocess.run(
        [sys.executable, "-c", check],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.split() == [
        *(str(package / name) for name in ("", "conf", "pylock.toml")),
        "True",
    ]
