"""Sides of a test: a commit in a folder of its own, and runs of it in processes."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from pipeline.core.errors import UsageError
from pipeline.core.files.paths import PACKAGE
from pipeline.study.expect.sides import (
    CodeSide,
    SideError,
    make_keys,
    open_commit,
    read_figure,
    read_series,
)
from tests.study.expect.runs import write_run


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", *names, *words]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose first commit has another file than its second."""
    folder = tmp_path / "repository"
    (folder / "inner").mkdir(parents=True)
    git(folder, "init", "--quiet")
    for text in ("first", "second"):
        (folder / "inner" / "file").write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", text)
    monkeypatch.chdir(folder / "inner")
    return folder


@pytest.mark.medium
def test_commit_is_opened_beside_the_checkout(repository: Path) -> None:
    with open_commit("HEAD~1") as side:
        assert (side.folder / "file").read_text() == "first"
        assert side.folder.name == "inner"
        assert side.package_parent == PACKAGE.parent
        assert side.label == f"HEAD~1 ({git(repository, 'rev-parse', 'HEAD~1')[:10]})"
    assert not side.folder.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert (repository / "inner" / "file").read_text() == "second"


@pytest.mark.medium
def test_commit_of_the_package_has_its_own_code(repository: Path) -> None:
    (repository / "pipeline").mkdir()
    (repository / "pipeline" / "__main__.py").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "package")
    with open_commit("HEAD") as side:
        assert side.package_parent == side.folder.parent


@pytest.mark.medium
def test_checkout_of_a_killed_test_is_removed_at_the_next_start(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout in use stays, and so does the user's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stale = tmp_path / "pipeline-test-stale" / "commit"
    users = tmp_path / "other" / "commit"
    for folder in (stale, users):
        git(repository, "worktree", "add", "--detach", str(folder))
    with open_commit("HEAD") as first, open_commit("HEAD~1") as second:
        assert not stale.parent.exists()
        assert first.folder.is_dir()
        assert second.folder.is_dir()
        assert len(git(repository, "worktree", "list").splitlines()) == 4
    assert len(git(repository, "worktree", "list").splitlines()) == 2
    assert users.is_dir()


@pytest.mark.medium
@pytest.mark.parametrize("ref", ["nothing", "--help", "HEAD~9", ""])
def test_unknown_commit_is_refused(repository: Path, ref: str) -> None:
    with (
        pytest.raises(UsageError, match="must be a run or a commit of the folder's repository"),
        open_commit(ref),
    ):
        pass
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.medium
def test_folder_without_repository_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match="repository"), open_commit("HEAD"):
        pass


@pytest.mark.medium
@pytest.mark.parametrize(("status", "is_refused"), [(1, False), (2, True)])
def test_failed_run_is_explained(tmp_path: Path, status: int, is_refused: bool) -> None:
    """A package that ends with a status and a message takes the place of this one."""
    (tmp_path / "pipeline").mkdir()
    program = f"import sys; print('no data', file=sys.stderr); sys.exit({status})"
    (tmp_path / "pipeline" / "__main__.py").write_text(program)
    (tmp_path / "pipeline" / "__init__.py").write_text("")
    side = CodeSide("there", tmp_path, tmp_path)
    with pytest.raises(SideError, match=f"mine ended with status {status} in there: no data") as e:
        side.train("mine", (), tmp_path / "run")
    assert e.value.is_refused is is_refused


def test_short_run_ends_at_its_step() -> None:
    assert "train.end_step=7" in make_keys(7)
    assert not any(key.startswith("train.end_step") for key in make_keys(None))


def test_figures_are_read_from_log_and_summary(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [3.0, 2.0, 1.0], {"accuracy": 0.5}, step_ms=4.0)
    assert read_series(run_dir, "loss", 2) == {1: 3.0, 2: 2.0}
    assert read_figure(run_dir, "loss", 3) == 1.0
    assert read_figure(run_dir, "accuracy", None) == 0.5
    assert read_figure(run_dir, "step_ms", None) == 4.0
    assert read_figure(run_dir, "loss", 4) is None
    assert read_figure(run_dir, "top5", None) is None
    assert read_figure(tmp_path / "nothing", "loss", 1) is None
