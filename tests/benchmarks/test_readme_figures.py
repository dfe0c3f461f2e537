"""The rows of README's figures: complete, current, and old if their code has changed since."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import readme_figures
from benchmarks.readme_figures import (
    FIGURES,
    LIST,
    README,
    ROOT,
    FigureAge,
    ReadmeFigure,
    find_unlisted,
    format_list,
    main,
    read_age,
)

TEXT = README.read_text(encoding="utf-8")


def test_every_figure_of_readme_has_a_row() -> None:
    assert find_unlisted(TEXT) == []
    assert [e for figure in FIGURES for e in figure.excerpts if TEXT.count(e) != 1] == []


def test_figure_without_a_row_is_found() -> None:
    added = TEXT + "\nA step takes 3.25 ms, 1.7x of before, accuracy 0.91.\n"
    assert find_unlisted(added) == ["3.25 ms", "1.7x", "accuracy 0.91"]
    changed = TEXT.replace("0.75 ms", "0.74 ms")
    assert "0.74 ms" in find_unlisted(changed)
    assert find_unlisted("    python -m pipeline ... lr=0.01,0.05    # a sweep") == []


def test_file_has_the_rows() -> None:
    command = "python -m benchmarks.readme_figures --save"
    assert LIST.read_text(encoding="utf-8") == format_list(), f"written by {command}"


def test_code_and_results_of_rows_exist() -> None:
    for figure in FIGURES:
        paths = [*figure.code, *([f"benchmarks/results/{figure.result}"] if figure.result else [])]
        assert [path for path in paths if not (ROOT / path).exists()] == []


def run_git(root: Path, *arguments: str, date: str = "2026-01-01") -> None:
    stamp = f"{date}T12:00:00+00:00"
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
    dates = {"GIT_AUTHOR_DATE": stamp, "GIT_COMMITTER_DATE": stamp, "GIT_COMMITTER_EMAIL": "a@b"}
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(root), **names, **dates}
    subprocess.run(["git", *arguments], cwd=root, env=environment, check=True, capture_output=True)


def commit(root: Path, date: str, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_md", ".md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    run_git(root, "add", ".")
    run_git(root, "commit", "-m", "x", date=date)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    run_git(tmp_path, "init")
    commit(tmp_path, "2026-01-01", README_md="A step takes 3 ms.", code="1")
    return tmp_path


ROW = ReadmeFigure(("A step takes 3 ms",), "measure", ("code",))


def test_figure_is_old_if_its_code_has_changed_since(repository: Path) -> None:
    assert "not younger" in read_age(ROW, repository).verdict  # of the same day
    commit(repository, "2026-01-03", code="2")
    commit(repository, "2026-01-04", code="3")
    assert read_age(ROW, repository) == FigureAge("2026-01-01", "2026-01-04", 2)
    assert "changed 2026-01-04 (2 later commits)" in read_age(ROW, repository).verdict
    commit(repository, "2026-01-05", README_md="A step takes 4 ms.", other="1")
    newer = ReadmeFigure(("A step takes 4 ms",), "measure", ("code",))
    assert read_age(newer, repository).verdict == "younger than its code"


def test_date_of_a_result_is_in_its_file(repository: Path) -> None:
    commit(repository, "2026-01-09", benchmarks__results__time_md="# T\n\n2026-01-02; a CPU\n")
    row = ReadmeFigure(("A step takes 3 ms",), "measure", ("code",), "time.md")
    assert read_age(row, repository) == FigureAge("2026-01-02", "2026-01-01", 0)


def test_missing_history_is_refused(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    with pytest.raises(SystemExit, match="not a git repository"):
        read_age(ROW, outside)
    commit(repository, "2026-01-02", code="2")
    shallow = outside / "shallow"
    run_git(outside, "clone", "--depth", "1", f"file://{repository}", str(shallow))
    with pytest.raises(SystemExit, match="this checkout is shallow"):
        read_age(ROW, shallow)


def test_figure_without_a_row_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("It takes 77 minutes.\n", encoding="utf-8")
    monkeypatch.setattr(readme_figures, "README", readme)
    monkeypatch.setattr(readme_figures, "LIST", tmp_path / "LIST.md")
    monkeypatch.setattr("sys.argv", ["readme_figures", "--save"])
    assert main() == 1
    assert "README.md has 77 minutes, which no row of FIGURES has" in capsys.readouterr().err
