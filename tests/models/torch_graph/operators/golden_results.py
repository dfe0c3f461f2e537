"""Results and gradients of operators that torch computed, in one small file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.torch_graph.operators.core_cases import Case
from tests.models.torch_graph.operators.operator_results import Arrays

FILE = Path(__file__).parents[3] / "golden" / "torch_operators.npz"
SEED = 0
"""Seed of the cases whose results are in the file."""
_TYPES: Mapping[str, Any] = {"f": np.float32, "i": np.int32, "b": np.bool_, "c": np.complex64}
Results = tuple[Arrays, Arrays]


def write_results(results: Mapping[str, Results]) -> None:
    """Write the results and gradients of operators by name."""
    parts: dict[str, list[np.ndarray]] = {kind: [] for kind in _TYPES}

    def describe(arrays: Arrays) -> list[Any]:
        described: list[Any] = []
        for x in arrays:
            if x is None:
                described.append(None)
                continue
            array = np.asarray(x)
            kind = "i" if array.dtype.kind == "u" else array.dtype.kind
            parts[kind].append(array.astype(_TYPES[kind]).reshape(-1))
            described.append([kind, *array.shape])
        return described

    index = {name: [describe(side) for side in sides] for name, sides in sorted(results.items())}
    text = np.frombuffer(json.dumps(index, separators=(",", ":")).encode(), np.uint8)
    arrays = {kind: np.concatenate([np.zeros(0, _TYPES[kind]), *parts[kind]]) for kind in parts}
    np.savez_compressed(FILE, allow_pickle=False, index=text, **arrays)


@cache
def read_results() -> dict[str, Results]:
    """Return the results and gradients of operators by name."""
    with np.load(FILE) as data:
        index = json.loads(data["index"].tobytes())
        values = {kind: data[kind] for kind in _TYPES}
    places = dict.fromkeys(_TYPES, 0)

    def take(described: Iterable[Any]) -> Arrays:
        arrays: Arrays = []
        for item in described:
            if item is None:
                arrays.append(None)
                continue
            kind, *shape = item
            start = places[kind]
            places[kind] += int(np.prod(shape, dtype=int))
            arrays.append(values[kind][start : places[kind]].reshape(shape))
        return arrays

    return {name: (take(sides[0]), take(sides[1])) for name, sides in index.items()}


def hide_values(results: Results, case: Case) -> Results:
    """Return results with zeros for values that aren't compared, such as random numbers."""
    count = len(results[0]) if case.num_values is None else case.num_values
    hidden = [
        x if number < count or x is None else np.zeros_like(x)
        for number, x in enumerate(results[0])
    ]
    return hidden, results[1]
