from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.cache import cache_root, find_program_folder
from pipeline.config.recipe import CacheSpec, Recipe
from pipeline.core.errors import RecipeError
from tests.whole_run import run

UNSAID = CacheSpec(root=None, compiled=True)


def test_recipe_sets_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root(CacheSpec(root=Path("/here"), compiled=True)) == Path("/here")


def test_cache_root_uses_xdg_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root(UNSAID) == Path("/elsewhere/pipeline")


@pytest.mark.parametrize("xdg", [None, ""])
def test_cache_root_falls_back_to_home(xdg: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache_root(UNSAID) == Path("/home/someone/.cache/pipeline")


def test_missing_home_error_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(RecipeError, match=r"cache\.root: missing; .* name one: cache\.root=DIR"):
        cache_root(UNSAID)


def programs(root: Path) -> tuple[Path | None, list[str]]:
    """The folder of programs in a cache, and what the user is warned of."""
    lines: list[str] = []
    return find_program_folder(CacheSpec(root=root, compiled=True), lines.append), lines


def test_program_folder_is_in_the_cache_root(tmp_path: Path) -> None:
    assert programs(tmp_path / "new") == (tmp_path / "new" / "xla-2", [])
    (tmp_path / "xla-2").mkdir(0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    assert programs(tmp_path / "link") == (tmp_path / "link" / "xla-2", [])
    assert find_program_folder(CacheSpec(root=tmp_path, compiled=False), pytest.fail) is None


@pytest.mark.parametrize("inside", [False, True], ids=["the cache", "the programs"])
@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_world_writable_folder_is_refused_for_programs(
    mode: int, inside: bool, tmp_path: Path
) -> None:
    root = tmp_path / "my cache"
    (root / "xla-2").mkdir(parents=True)
    folder = root / "xla-2" if inside else root
    folder.chmod(mode)
    (tmp_path / "link").symlink_to(root)
    for name in (root, tmp_path / "link"):
        shown = name / "xla-2" if inside else name
        quoted = f"'{shown}'" if name == root else str(shown)
        assert programs(name) == (
            None,
            [
                f"{shown}: can be written by everybody, so compiled programs are neither read nor "
                f"kept; chmod go-w {quoted}, or name another folder: cache.root=DIR"
            ],
        )


def test_sticky_bit_is_accepted_for_root_but_not_program_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert programs(tmp_path) == (tmp_path / "xla-2", [])
    (tmp_path / "xla-2").mkdir()
    (tmp_path / "xla-2").chmod(0o1777)
    assert programs(tmp_path)[0] is None


@pytest.mark.parametrize("name", [".", "xla-2"])
def test_folder_of_another_user_is_refused_for_programs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for root: whose it is may put there what root would run."""
    (tmp_path / "xla-2").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / name, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    folder, (line,) = programs(tmp_path)
    assert folder is None
    assert "belongs to user " in line
    assert line.endswith("neither read nor kept; name another folder: cache.root=DIR")


@pytest.mark.slow
def test_run_with_refused_program_folder_warns_once(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o777)
    small = tiny("train.steps=2", "model=mlp", "model.hidden=[4]", f"cache.root={root}")
    assert run(small, tmp_path / "run").status == "done"
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count(f"warning    {root}: can be written by everybody") == 1
    # A knowledge bank is data, which is checked when it is read.
    assert sorted(path.name for path in root.iterdir()) == ["autotune", "times-2"]
