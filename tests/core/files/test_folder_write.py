"""Of a folder whose writing fails, what it had and what others write stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.files.folder_write import make_folder, remove_if_failed


@pytest.mark.parametrize("is_new", [True, False])
def test_failed_folder_keeps_what_it_had(tmp_path: Path, is_new: bool) -> None:
    folder = tmp_path / "made" if is_new else tmp_path
    earlier = [] if is_new else [tmp_path / "earlier"]
    for path in earlier:
        path.touch()

    def stop_between_files() -> None:
        with make_folder(folder), remove_if_failed(folder, ("inner", "file", "earlier")):
            (folder / "inner").mkdir()
            (folder / "inner" / "file").touch()
            (folder / "file").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_between_files()
    assert list(tmp_path.rglob("*")) == earlier
    with make_folder(folder), remove_if_failed(folder, ("file",)):
        (folder / "file").touch()
    assert (folder / "file").exists()


def test_failed_folder_keeps_what_others_write_meanwhile(tmp_path: Path) -> None:
    folder = tmp_path / "made"

    def fail_beside_another() -> None:
        with make_folder(folder), remove_if_failed(folder, ("file",)):
            (folder / "file").touch()
            (folder / "of another").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_beside_another()
    assert [path.name for path in folder.iterdir()] == ["of another"]
