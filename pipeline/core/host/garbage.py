"""How often Python looks for garbage among its objects."""

from __future__ import annotations

import gc

SELDOM = 100_000
WHILE_STARTING = 2_000_000
YOUNG_COLLECTIONS = 20
OLD_COLLECTIONS = 100
"""New objects until the youngest are looked through, and how often that happens until the second
and the third generation are."""


def collect_less_while_starting() -> None:
    """Hardly look for garbage while imports and tracing create millions of objects, which stay.

    To look through them again and again took some 0.25 of 3 s until the first step.
    """
    gc.set_threshold(WHILE_STARTING, YOUNG_COLLECTIONS, OLD_COLLECTIONS)


def collect_seldom() -> None:
    """Look for garbage now and then among objects that are new, where a command has begun so."""
    if gc.get_threshold()[0] == WHILE_STARTING:
        gc.freeze()
        gc.set_threshold(SELDOM, YOUNG_COLLECTIONS, OLD_COLLECTIONS)
