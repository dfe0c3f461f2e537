"""Fixtures of all tests of lowerings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.lowerings.engines import keep_no_programs


@pytest.fixture(autouse=True)
def no_programs_kept() -> Iterator[None]:
    """Keep no programs, so that no test depends on programs of an earlier one."""
    with keep_no_programs():
        yield
