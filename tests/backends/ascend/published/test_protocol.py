"""The classes of all rows, and their split by network."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from pipeline.backends.ascend.published.protocol import (
    Part,
    Population,
    RowClass,
    load_classes,
    split_by_name,
)
from pipeline.backends.ascend.published.workloads import (
    DESCRIBED,
    DESCRIBED_LATER,
    SEALED,
    load_published_steps,
)


def test_every_priced_row_has_a_class() -> None:
    classes = load_classes()
    assert {row.id for row in load_published_steps()} <= set(classes)
    qualities = {"device": "device", "at_most": "host", "pair": "doubtful"}
    for row in load_published_steps():
        assert classes[row.id].row_class == qualities[row.quality], row.id


def test_classes_are_known_and_have_reasons() -> None:
    for row in load_classes().values():
        assert row.row_class in get_args(RowClass)
        assert row.population in get_args(Population)
        assert row.row_class == "device" or row.reason, row.id


def test_split_is_by_name_alone() -> None:
    assert [split_by_name(name) for name in ("alexnet", "resnet50", "googlenet")] == [
        "fit",
        "look",
        "seal",
    ]
    networks = {row.network for row in load_classes().values()}
    shares = Counter(map(split_by_name, networks))
    assert set(shares) == set(get_args(Part))
    assert 0.5 < shares["fit"] / len(networks) < 0.7


def test_sealed_rows_are_apart_from_the_others() -> None:
    classes = load_classes()
    described = (*load_published_steps(DESCRIBED), *load_published_steps(DESCRIBED_LATER))
    sealed = load_published_steps(SEALED)
    assert {classes[row.id].part for row in described} == {"fit", "look"}
    assert {classes[row.id].part for row in sealed} == {"seal"}
    assert {classes[row.id].row_class for row in (*described, *sealed)} == {"device"}
    assert len({row.id for row in (*described, *sealed)}) == len(described) + len(sealed)
