"""Keys that differ between runs, and the values that they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.study.runs.kept_run import KeptRun

PLACES = ("monitor.", "checkpoint.", "debug", "stages", "launch.", "autotune")
"""Beginnings of keys that decide what is kept of a run, listed after the others."""


def differing_keys(runs: Sequence[KeptRun]) -> list[str]:
    """Return the keys with several values among the runs that have them, those most varied first.

    A key that some runs lack does not differ by that alone: older versions had fewer keys.
    """
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in run.keys.items():
            values.setdefault(key, {})[repr(value)] = None
    differing = [key for key, found in values.items() if len(found) > 1]
    return sorted(differing, key=lambda key: (key.startswith(PLACES), -len(values[key]), key))


def common_keys(runs: Sequence[KeptRun]) -> dict[str, Any]:
    """Return the keys that all runs have, with the one value that they share."""
    first: Mapping[str, Any] = runs[0].keys if runs else {}
    return {
        key: value
        for key, value in first.items()
        if all(key in run.keys and run.keys[key] == value for run in runs)
    }
