"""How often Python looks for garbage among its objects."""

from __future__ import annotations

import gc

SELDOM = (100_000, 20, 100)
WHILE_STARTING = (2_000_000, 20, 100)


def collect_less_while_starting() -> None:
    """Hardly look for garbage while imports and tracing create millions of objects, which stay.

    To look through them again and again took some 0.25 of 3 s until the first step.
    """
    gc.set_threshold(*WHILE_STARTING)


def collect_seldom() -> None:
    """Look for garbage now and then among objects that are new, where a command has begun so."""
    if gc.get_threshold() == WHILE_STARTING:
        gc.freeze()
        gc.set_threshold(*SELDOM)
