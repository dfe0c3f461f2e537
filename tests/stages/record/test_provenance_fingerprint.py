from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from pipeline.data.columns import Column, Split
from pipeline.data.image_facts import ImageFacts, make_blank_data
from pipeline.data.padding.buckets import Padding, make_ragged_array
from pipeline.data.padding.pad_samples import pad_split
from pipeline.stages.record.provenance import MAX_HASHED_SAMPLES, Fingerprint, fingerprint_columns
from tests.backends.loading.small_loader import CountedColumn, make_split

IMAGES = np.arange(300 * 4, dtype=np.float32).reshape(300, 2, 2, 1)


def test_column_in_memory_is_hashed_completely() -> None:
    found = fingerprint_columns(make_split())
    images = make_split().columns["image"][:]
    assert found["image"].sha256 == hashlib.sha256(images.tobytes()).hexdigest()
    assert (found["image"].shape, found["image"].dtype) == ((11, 2, 2, 1), "uint8")
    assert {column.of for column in found.values()} == {"all"}


def test_missing_samples_are_not_hashed() -> None:
    (image, label) = fingerprint_columns(
        make_blank_data(ImageFacts((8, 8, 1), 10, 60, 10), ()).train
    ).values()
    assert image == Fingerprint((60, 8, 8, 1), "uint8", sha256="", of="none")
    assert label == Fingerprint((60,), "int32", sha256="", of="none")


@pytest.mark.parametrize("changed", [(0, 0, 0, 0), (299, 1, 1, 0), (150, 0, 1, 0)])
def test_fingerprint_changes_with_one_value(changed: tuple[int, ...]) -> None:
    other = IMAGES.copy()
    other[changed] += 1
    first, second = (fingerprint_columns(Split({"image": images})) for images in (IMAGES, other))
    assert first["image"].sha256 != second["image"].sha256


def test_fingerprint_depends_on_sample_order_not_memory_layout() -> None:
    """The first is part of the data, the second is not."""
    strided = np.asfortranarray(IMAGES)
    swapped = IMAGES.astype(">f4")
    ones = [
        fingerprint_columns(Split({"image": images}))["image"]
        for images in (IMAGES, strided, swapped)
    ]
    assert len({found.sha256 for found in ones}) == 1
    reordered = fingerprint_columns(Split({"image": IMAGES[::-1]}))["image"]
    assert reordered.sha256 != ones[0].sha256


def test_lazy_column_is_hashed_at_evenly_spread_samples() -> None:
    column = CountedColumn(IMAGES)
    found = fingerprint_columns(Split({"image": column}))["image"]
    assert column.reads[0] == 0
    assert column.reads[-1] == 299
    assert len(column.reads) == MAX_HASHED_SAMPLES
    assert set(np.diff(column.reads)) <= {9, 10}
    assert found.of == "32 of 300"
    assert found.sha256 == hashlib.sha256(IMAGES[column.reads].tobytes()).hexdigest()


def test_column_of_few_samples_is_read_completely() -> None:
    column = CountedColumn(IMAGES[:5])
    assert fingerprint_columns(Split({"image": column}))["image"].of == "5 of 5"
    assert column.reads == [0, 1, 2, 3, 4]


def _fingerprint_of(column: Column) -> Fingerprint:
    return fingerprint_columns(Split({"image": column}))["image"]


def _padded(images: Column) -> Column:
    labels = np.zeros(images.shape[0], np.int32)
    return pad_split(
        Split({"image": images, "label": labels}), Padding(((8, 8),), column="image")
    ).columns["image"]


def _ragged(changed: int | None = None, *, reordered: bool = False) -> Column:
    """100 images of 2 x 3, or of 3 x 2, which have the same values in the same order."""
    flat = np.arange(600, dtype=np.uint16)
    if changed is not None:
        flat[changed] += 1
    sizes = np.full((100, 2), (3, 2) if reordered else (2, 3), np.int32)
    return make_ragged_array(flat, sizes, (1,))


@pytest.mark.parametrize("pad", [lambda column: column, _padded], ids=["ragged", "padded"])
def test_values_of_several_sizes_in_memory_are_hashed_completely(
    pad: Callable[[Column], Column],
) -> None:
    found = _fingerprint_of(pad(_ragged()))
    assert found.of == "all"
    sizes = np.full((100, 2), (2, 3), np.int32)
    expected = hashlib.sha256(sizes.tobytes() + np.arange(600, dtype=np.uint16).tobytes())
    assert found.sha256 == expected.hexdigest()
    others = [_fingerprint_of(pad(_ragged(place))).sha256 for place in (0, 7, 300, 599)]
    others.append(_fingerprint_of(pad(_ragged(reordered=True))).sha256)
    assert found.sha256 not in others


def test_padded_images_of_one_size_are_hashed_unpadded() -> None:
    plain, padded = _fingerprint_of(IMAGES), _fingerprint_of(_padded(IMAGES))
    assert (padded.sha256, padded.of) == (plain.sha256, "all")
    assert (plain.shape, padded.shape) == ((300, 2, 2, 1), (300, 8, 8, 1))


def test_lazily_padded_column_is_hashed_at_samples() -> None:
    assert _fingerprint_of(_padded(CountedColumn(IMAGES))).of == "32 of 300"
