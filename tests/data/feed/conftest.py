"""Windows of one length, for tests that say which steps a window has."""

from __future__ import annotations

import pytest

from pipeline.data.feed import window_buffer


@pytest.fixture(autouse=True)
def _full_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_buffer, "FIRST_SHARE", 1)
