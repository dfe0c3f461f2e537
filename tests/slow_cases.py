"""Cases of a parametrized test, most of which are left to the complete run."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def mark_slow_except(plain: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Mark all cases slow but those in `plain`."""
    return [case if case in plain else pytest.param(case, marks=pytest.mark.slow) for case in cases]
