from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.stages.record import environment
from pipeline.stages.record.environment import describe_code, describe_imported_code


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "package"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "inner" / "code.py").write_text("one = 1\n")
    return folder


def git(root: Path, *args: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, *args]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(package: Path) -> Path:
    for args in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        git(package.parent, *args)
    return package


def test_digest_covers_names_and_contents(package: Path) -> None:
    before = describe_code(package)["sha256"]
    copied = shutil.copytree(package, package.parent / "elsewhere")
    assert describe_code(copied)["sha256"] == before
    (copied / "inner" / "code.py").rename(copied / "inner" / "other.py")
    assert describe_code(copied)["sha256"] != before
    (package / "inner" / "code.py").write_text("one = 2\n")
    assert describe_code(package)["sha256"] != before


def test_digest_ignores_wheel_files_and_bytecode(package: Path) -> None:
    before = describe_code(package)["sha256"]
    for folder in ("conf", "examples", "recipes", "inner/__pycache__"):
        (package / folder).mkdir()
        (package / folder / "file").write_text("x")
    (package / "pylock.toml").write_text("x")
    assert describe_code(package)["sha256"] == before


def test_code_without_a_checkout_has_no_git_state(package: Path) -> None:
    assert set(describe_code(package)) == {"sha256"}


def test_checkout_has_its_commit(checkout: Path) -> None:
    commit = git(checkout.parent, "rev-parse", "HEAD").strip()
    assert describe_code(checkout)["git"] == {"commit": commit, "dirty": False, "changed": []}


def test_checkout_has_its_changed_files(checkout: Path) -> None:
    (checkout / "inner" / "code.py").write_text("one = 2\n")
    (checkout / "new.py").write_text("")
    state = describe_code(checkout)["git"]
    assert state["dirty"] is True
    assert state["changed"] == ["package/inner/code.py", "package/new.py"]


def test_checkout_around_an_installed_package_is_ignored(checkout: Path) -> None:
    """A virtual environment inside somebody's repository."""
    inner = shutil.copytree(checkout, checkout.parent / "venv" / "site" / "package")
    assert "git" not in describe_code(inner)


def test_git_failure_is_recorded_with_its_reason(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "GIT", ("git", "nonsense"))
    state = describe_code(checkout)["git"]
    assert state["commit"] is None
    assert "non-zero exit status" in state["why"]
    monkeypatch.setattr(environment, "GIT", ("no-such-program",))
    assert "No such file" in describe_code(checkout)["git"]["why"]


def test_code_is_described_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run in the process was made from what the first one was."""
    first = describe_imported_code()
    assert set(first) >= {"sha256"}
    monkeypatch.setattr(environment, "GIT", ("git", "nonsense"))
    assert describe_imported_code() == first
