"""What all tests of lowerings need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lowerings.engines import keep_no_programs


@pytest.fixture(autouse=True)
def no_programs_kept() -> Iterator[None]:
    """Whatever was run before in this process."""
    with keep_no_programs():
        yield
