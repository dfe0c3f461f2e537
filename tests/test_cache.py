from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cache import cache_root
from pipeline.config.recipe import CacheSpec

UNSAID = CacheSpec(root=None, compiled=True)


def test_the_recipe_says_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root(CacheSpec(root=Path("/here"), compiled=True)) == Path("/here")


def test_else_the_environment_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root(UNSAID) == Path("/elsewhere/pipeline")


@pytest.mark.parametrize("xdg", [None, ""])
def test_else_it_is_in_the_users_home(xdg: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache_root(UNSAID) == Path("/home/someone/.cache/pipeline")
