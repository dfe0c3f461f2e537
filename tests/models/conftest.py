"""What the tests of networks share: golden texts, and networks as conf/model has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"

CheckGolden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-golden, unless the tests above have it already."""
    with contextlib.suppress(ValueError):
        parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> CheckGolden:
    """Compare a text with the one kept in tests/golden, or keep it under --update-golden."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden", default=False):
            path.write_text(text)
        assert text == path.read_text(), f"{name} changed; pytest --update-golden rewrites it"

    return check
