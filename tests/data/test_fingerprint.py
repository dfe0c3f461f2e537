from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pipeline.data.columns import Split
from pipeline.data.fingerprint import SAMPLED, fingerprint
from tests.data.feeding import CountedColumn, make_split

IMAGES = np.arange(300 * 4, dtype=np.float32).reshape(300, 2, 2, 1)


def test_a_column_in_memory_is_hashed_as_a_whole() -> None:
    found = fingerprint(make_split())
    images = make_split().columns["image"][:]
    assert found["image"].sha256 == hashlib.sha256(images.tobytes()).hexdigest()
    assert (found["image"].shape, found["image"].dtype) == ((11, 2, 2, 1), "uint8")
    assert {column.of for column in found.values()} == {"all"}


@pytest.mark.parametrize("changed", [(0, 0, 0, 0), (299, 1, 1, 0), (150, 0, 1, 0)])
def test_one_value_changes_it(changed: tuple[int, ...]) -> None:
    other = IMAGES.copy()
    other[changed] += 1
    first, second = (fingerprint(Split({"image": images})) for images in (IMAGES, other))
    assert first["image"].sha256 != second["image"].sha256


def test_the_order_of_samples_and_of_bytes_in_memory() -> None:
    """The first is part of the data, the second is not."""
    strided = np.asfortranarray(IMAGES)
    swapped = IMAGES.astype(">f4")
    ones = [fingerprint(Split({"image": images}))["image"] for images in (IMAGES, strided, swapped)]
    assert len({found.sha256 for found in ones}) == 1
    turned = fingerprint(Split({"image": IMAGES[::-1]}))["image"]
    assert turned.sha256 != ones[0].sha256


def test_of_what_is_read_on_demand_evenly_spread_samples_are_read() -> None:
    column = CountedColumn(IMAGES)
    found = fingerprint(Split({"image": column}))["image"]
    assert column.reads[0] == 0
    assert column.reads[-1] == 299
    assert len(column.reads) == SAMPLED
    assert set(np.diff(column.reads)) <= {9, 10}
    assert found.of == "32 of 300"
    assert found.sha256 == hashlib.sha256(IMAGES[column.reads].tobytes()).hexdigest()


def test_a_column_of_few_samples_is_read_whole() -> None:
    column = CountedColumn(IMAGES[:5])
    assert fingerprint(Split({"image": column}))["image"].of == "5 of 5"
    assert column.reads == [0, 1, 2, 3, 4]
