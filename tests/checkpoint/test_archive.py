"""The files of an autopsy in a run directory, once the run is resumed."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.archive import set_aside_autopsy


def leave(run_dir: Path, text: str) -> None:
    (run_dir / "autopsy.json").write_text(text)
    (run_dir / "reproducer").mkdir()
    (run_dir / "reproducer" / "step.json").write_text(text)


def test_without_an_autopsy_nothing_is_done(tmp_path: Path) -> None:
    assert set_aside_autopsy(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_both_parts_go_together_and_the_newest_is_kept(tmp_path: Path) -> None:
    for text in ("first", "second"):
        leave(tmp_path, text)
        folder = set_aside_autopsy(tmp_path)
        assert folder == tmp_path / "earlier_autopsy"
        assert list(tmp_path.iterdir()) == [folder]
        assert (folder / "autopsy.json").read_text() == text
        assert (folder / "reproducer" / "step.json").read_text() == text
    assert set_aside_autopsy(tmp_path) is None
    assert (folder / "autopsy.json").read_text() == "second"


def test_one_that_was_not_finished_is_put_aside_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "reproducer").mkdir()
    assert set_aside_autopsy(tmp_path) == tmp_path / "earlier_autopsy"
    assert not (tmp_path / "reproducer").exists()
