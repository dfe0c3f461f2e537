"""The files of an autopsy in a run directory, once the run is resumed."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.checkpoint_folder import set_aside_autopsy


def leave(run_dir: Path, text: str) -> None:
    (run_dir / "autopsy.json").write_text(text)
    (run_dir / "reproducer").mkdir()
    (run_dir / "reproducer" / "step.json").write_text(text)


def test_set_aside_without_autopsy_has_no_effect(tmp_path: Path) -> None:
    assert set_aside_autopsy(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_autopsy_and_reproducer_are_set_aside_together(tmp_path: Path) -> None:
    for text in ("first", "second"):
        leave(tmp_path, text)
        folder = set_aside_autopsy(tmp_path)
        assert folder == tmp_path / "earlier_autopsy"
        assert list(tmp_path.iterdir()) == [folder]
        assert (folder / "autopsy.json").read_text() == text
        assert (folder / "reproducer" / "step.json").read_text() == text
    assert set_aside_autopsy(tmp_path) is None
    assert (folder / "autopsy.json").read_text() == "second"


def test_unfinished_autopsy_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "reproducer").mkdir()
    assert set_aside_autopsy(tmp_path) == tmp_path / "earlier_autopsy"
    assert not (tmp_path / "reproducer").exists()
