"""Blank data: the shapes and types of images that are not there."""

from __future__ import annotations

from pipeline.data.columns import ColumnSpec
from pipeline.data.image_facts import ImageFacts, make_blank_data


def test_blank_data_has_the_sizes_and_names_of_a_source() -> None:
    facts = ImageFacts((28, 20, 1), 2, 60, 10)
    data = make_blank_data(facts, ("cat", "dog"))
    assert (len(data.train), len(data.eval), data.classes) == (60, 10, ("cat", "dog"))
    expected = {"image": ColumnSpec((28, 20, 1), "uint8"), "label": ColumnSpec((), "int32")}
    assert data.train.specs() == data.eval.specs() == facts.specs() == expected
    assert data.inputs == ("image",)
