"""Runs with a mirror: continued on another machine, refused, and told of at the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, RunError
from pipeline.core.files import storage
from pipeline.core.files.storage import Storage
from pipeline.stages.runner import run_mirror
from pipeline.stages.runner.run_mirror import identify_run
from tests import outcome
from tests.conftest import MLP
from tests.whole_run import run

Compose = Callable[..., Recipe]
KEYS = (*MLP, "checkpoint.every_steps=10", "checkpoint.keep=2", "train.steps=45")


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WAITS_S", (0.0,))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mirror(tmp_path: Path) -> str:
    return f"checkpoint.mirror=file://{tmp_path}/store"


def list_records(tmp_path: Path) -> list[str]:
    """Return the steps of all records, ascending."""
    return sorted(path.name.partition("-")[0] for path in tmp_path.glob("store/*/records/*.json"))


@pytest.mark.medium
def test_run_continues_from_the_mirror_alone(
    tiny: Compose, tmp_path: Path, mirror: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(tiny(*KEYS), tmp_path / "whole")
    assert run(tiny(*KEYS, mirror), tmp_path / "first").status == "done"
    # What was copied before the end.
    for path in list((tmp_path / "store").glob("*/**/45-*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.move(tmp_path / "first", tmp_path / "gone")
    resumed = run(tiny(*KEYS, mirror, "train.resume=auto"))
    assert resumed.resumed_from == {"run": resumed.run_dir, "step": 40}
    assert (resumed.status, resumed.metrics["loss"]) == ("done", whole.metrics["loss"])
    assert resumed.run_dir is not None
    outcome.assert_same_run(Path(resumed.run_dir), tmp_path / "whole")
    assert f"mirror     step 40 and before, from file://{tmp_path}/store" in capsys.readouterr().out
    assert list_records(tmp_path) == ["40", "45"]


@pytest.mark.slow
def test_mirror_of_another_run_is_refused_before_any_write(
    tiny: Compose, tmp_path: Path, mirror: str
) -> None:
    run(tiny(*KEYS, mirror), tmp_path / "first")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RecipeError, match=r"checkpoint\.mirror = .*: holds another run; name anot"):
        run(tiny(*KEYS, mirror), tmp_path / "second")
    with pytest.raises(RecipeError, match=r"(?s)a run of another recipe.*train\.optimizer\.lr"):
        run(tiny(*KEYS, mirror, "train.optimizer.lr=0.5", "train.resume=auto"))
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "store/owner.json").write_text("{")
    with pytest.raises(DataError, match=r"is a mirror of an older version, and holds owner\.json"):
        run(tiny(*KEYS, mirror), tmp_path / "second")
    (tmp_path / "store/owner.json").unlink()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_newer_of_local_run_and_mirror_is_continued(
    tiny: Compose, tmp_path: Path, mirror: str
) -> None:
    run(tiny(*KEYS, mirror), tmp_path / "outputs/day/run")
    (tmp_path / "outputs/day/run/summary.json").unlink()
    as_new = run(tiny(*KEYS, mirror, "train.resume=auto"))
    assert as_new.run_dir == "outputs/day/run"
    (tmp_path / "outputs/day/run/summary.json").unlink()
    shutil.rmtree(tmp_path / "outputs/day/run/checkpoints/45")
    restored = run(tiny(*KEYS, mirror, "train.resume=auto"))
    assert restored.run_dir != "outputs/day/run"
    assert restored.resumed_from == {"run": restored.run_dir, "step": 45}
    assert identify_run(Path(restored.run_dir or "")) == identify_run(Path("outputs/day/run"))
    named = run(tiny(*KEYS, mirror, f"train.resume={restored.run_dir}"))
    assert named.status == "done"
    records = sorted(tmp_path.glob("store/*/records/*"))
    shutil.rmtree(tmp_path / str(restored.run_dir) / "checkpoints/45")
    with pytest.raises(RecipeError, match=r"holds step 45 of .*, which has no checkpoint as new"):
        run(tiny(*KEYS, mirror, f"train.resume={restored.run_dir}"))
    assert sorted(tmp_path.glob("store/*/records/*")) == records


def test_newer_local_run_is_not_replaced_unnoticed(
    tiny: Compose, tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the mirror's run can't be told without its provenance."""
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints/1000").mkdir(parents=True)
    mirrored = SimpleNamespace(
        identity="f" * 16, copies=[1], newest=900, storage=SimpleNamespace(url="file:///store")
    )
    monkeypatch.setattr(run_mirror, "read_mirror", lambda *_: [mirrored])
    monkeypatch.setattr(run_mirror, "_list_changes", lambda *_: [])
    monkeypatch.setattr(run_mirror, "list_saved_steps", lambda _: [1000])
    recipe = tiny(mirror, "train.resume=auto")
    warnings: list[str] = []
    with pytest.raises(RecipeError, match=r"step 900 of a run that may be .*step 1000 and no prov"):
        run_mirror.find_mirrored_run(recipe, run_dir, warnings.append)
    (run_dir / "provenance.json").write_text("{")
    with pytest.raises(DataError, match=r"provenance\.json: can't be read"):
        run_mirror.find_mirrored_run(recipe, run_dir, warnings.append)
    assert warnings == []
    (run_dir / "provenance.json").write_text('{"processes": [{}]}')
    assert run_mirror.find_mirrored_run(recipe, run_dir, warnings.append) is mirrored
    (text,) = warnings
    assert text.endswith(f"is restored; {run_dir}, another run, has step 1000")
    monkeypatch.setattr(run_mirror, "list_saved_steps", lambda _: [800])
    (run_dir / "provenance.json").unlink()
    assert run_mirror.find_mirrored_run(recipe, run_dir, warnings.append) is mirrored
    assert len(warnings) == 1


@pytest.mark.slow
def test_failing_mirror_sets_the_exit_status(
    tiny: Compose,
    tmp_path: Path,
    mirror: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(self: Storage, file: Path, name: str) -> None:
        raise RunError("s3://b/x?X-Amz-Signature=s3ntinel: can't be written: no route to host")

    monkeypatch.setattr(Storage, "upload", fail)
    recipe = tiny(*KEYS, mirror)
    summary = run(recipe, tmp_path / "run")
    out = capsys.readouterr().out
    assert out.count("checkpoint.mirror: s3://b/x?X-Amz-Signature=*** can't be written") == 1
    assert (summary.status, summary.exit_status, summary.steps) == ("failed", 1, 45)
    assert "loss" in summary.metrics
    assert "lacks the last checkpoints" in (summary.reason or "")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    resumed = run(tiny(*KEYS, mirror, f"train.resume={tmp_path / 'run'}"))
    assert (resumed.status, resumed.exit_status) == ("done", 0)
    assert list_records(tmp_path) == ["40", "45"]
    texts = [file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()]
    assert not any("s3ntinel" in text for text in texts)


@pytest.mark.slow
def test_failing_restoration_leaves_no_directory(
    tiny: Compose, tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny(*KEYS, mirror), tmp_path / "first")
    shutil.move(tmp_path / "first", tmp_path / "gone")

    def fail(self: Storage, name: str, file: Path) -> None:
        file.write_bytes(b"half")
        raise RunError("can't be read: reset")

    monkeypatch.setattr(Storage, "download", fail)
    with pytest.raises(RunError, match="reset"):
        run(tiny(*KEYS, mirror, "train.resume=auto"))
    assert list(tmp_path.glob("outputs/*/*")) == []


@pytest.mark.slow
def test_damaged_mirror_is_copied_again_by_its_run(
    tiny: Compose, tmp_path: Path, mirror: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a mirror with two runs, the run of the recipe is restored."""
    run(tiny(*KEYS, mirror), tmp_path / "outputs/day/run")
    for record in tmp_path.glob("store/*/records/*.json"):
        record.write_text('{"step": 1}')
    (tmp_path / "outputs/day/run/summary.json").unlink()
    assert run(tiny(*KEYS, mirror, "train.resume=auto")).status == "done"
    assert "isn't a record of a checkpoint; skipped" in capsys.readouterr().out
    assert list_records(tmp_path) == ["40", "45"]
    other = f"checkpoint.mirror=file://{tmp_path}/other"
    run(tiny(*KEYS, other, "train.optimizer.lr=0.5"), tmp_path / "another")
    (folder,) = (tmp_path / "other").iterdir()
    folder.rename(tmp_path / "store" / folder.name.replace("00000001", "00000009"))
    shutil.move(tmp_path / "outputs", tmp_path / "gone")
    restored = run(tiny(*KEYS, mirror, "train.resume=auto"))
    assert restored.resumed_from == {"run": restored.run_dir, "step": 45}
    assert identify_run(Path(restored.run_dir or "")) == identify_run(tmp_path / "gone/day/run")
    assert len(list((tmp_path / "store").iterdir())) == 2
