from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.stages.export.naming import align_layers, name_entries
from pipeline.stages.export.network import NetworkArrays


def worth(fits: np.ndarray, partners: list[int]) -> tuple[int, int]:
    pairs = [(i, partner) for i, partner in enumerate(partners) if partner < fits.shape[1]]
    return sum(int(fits[pair]) for pair in pairs), len(pairs)


def best_by_trying_all(fits: np.ndarray) -> tuple[int, int]:
    theirs, ours = fits.shape
    return max(
        (sum(int(fits[pair]) for pair in zip(left, right, strict=True)), count)
        for count in range(min(theirs, ours) + 1)
        for left in combinations(range(theirs), count)
        for right in combinations(range(ours), count)
    )


sides = st.integers(0, 4)
tables = st.tuples(sides, sides).flatmap(
    lambda shape: arrays(np.int64, shape, elements=st.integers(0, 3))
)


@pytest.mark.slow
@given(tables)
def test_aligned_pairing_is_optimal(fits: np.ndarray) -> None:
    partners = align_layers(fits)
    assert len(partners) == len(fits)
    paired = [partner for partner in partners if partner < fits.shape[1]]
    assert paired == sorted(set(paired))
    alone = [partner for partner in partners if partner >= fits.shape[1]]
    assert alone == list(range(fits.shape[1], fits.shape[1] + len(alone)))
    assert worth(fits, partners) == best_by_trying_all(fits)


@pytest.mark.slow
@given(sides, sides)
def test_first_of_equal_layers_are_paired(theirs: int, ours: int) -> None:
    assert align_layers(np.ones((theirs, ours), np.int64)) == list(range(theirs))


def test_layers_beyond_the_networks_numbers_get_further_numbers() -> None:
    shapes = {"dense_0": (4, 3), "dense_5": (3, 2)}
    network = NetworkArrays("mlp", {f"params/{n}/kernel": s for n, s in shapes.items()}, {})
    names = [f"{n}.weight" for n in range(3)]
    kernels = [np.zeros(shape, np.float32) for shape in [(3, 4), (2, 3), (7, 9)]]
    arrays = {name: (name, array) for name, array in zip(names, kernels, strict=True)}
    entries = name_entries("file.pth", arrays, network, "torch")
    assert [entry.target for entry in entries] == [
        "params/dense_0/kernel",
        "params/dense_5/kernel",
        "dense_6/kernel",
    ]
