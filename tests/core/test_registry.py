"""Components by kind and name, and what a section of a recipe takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from pipeline.core.registry import (
    MAX_FLOAT,
    MAX_INT,
    ComponentOf,
    Expected,
    Seq,
    Spec,
    component,
    find_components,
    find_kind,
    list_components,
    make_component,
)

KIND = "shape of this test"


@component(KIND)
class Circle(Spec):
    name: Literal["circle_of_this_test"] = "circle_of_this_test"
    radius: float = 1.0


@component(KIND)
class Polygon(Spec):
    name: Literal["polygon_of_this_test"] = "polygon_of_this_test"
    corners: Annotated[int, Field(ge=3)]


class Drawing(Spec):
    shapes: Seq[Annotated[Any, ComponentOf(KIND)]]
    scale: Annotated[int | str, Expected("a whole number or a word")] = 1


def test_components_are_selected_by_kind_and_by_name() -> None:
    assert dict(list_components(KIND)) == {
        "circle_of_this_test": Circle,
        "polygon_of_this_test": Polygon,
    }
    assert find_components("circle_of_this_test") == [Circle]
    assert find_kind(["polygon_of_this_test", "circle_of_this_test"]) == KIND
    assert find_kind(["circle_of_this_test"]) is None
    assert list_components("no kind") == {}


def test_component_is_made_by_name() -> None:
    assert make_component(KIND, "circle_of_this_test", radius=2.0) == Circle(radius=2.0)
    with pytest.raises(ValueError, match=r"there is no shape .* 'star'; choose from circle_of_"):
        make_component(KIND, "star")


def test_duplicate_component_name_is_refused() -> None:
    component(KIND)(Circle)
    with pytest.raises(ValueError, match=r"'circle_of_this_test' is already .*\.Circle"):

        @component(KIND)
        class Other(Spec):
            name: Literal["circle_of_this_test"] = "circle_of_this_test"


def test_component_name_stands_for_its_defaults() -> None:
    drawing = Drawing.model_validate(
        {"shapes": ["circle_of_this_test", {"name": "polygon_of_this_test", "corners": 4}]}
    )
    assert drawing.shapes == (Circle(), Polygon(corners=4))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"shapes": ["star"]}, "star"),
        ({"shapes": ["polygon_of_this_test"]}, "corners"),
        ({"shapes": [{"radius": 1.0}]}, "must be a section with a `name`"),
        ({"shapes": [], "scale": 1.5}, "must be a whole number or a word"),
        ({"shapes": [], "colour": 1}, "Extra inputs"),
    ],
)
def test_invalid_sections_are_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Drawing.model_validate(tree)


@pytest.mark.parametrize(
    "fields",
    [
        {"radius": MAX_FLOAT * 1.01},
        {"radius": -MAX_FLOAT * 1.01},
        {"radius": float("nan")},
        {"radius": "1.0"},
    ],
)
def test_invalid_numbers_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Circle(**fields)


def test_whole_numbers_fit_into_32_bits() -> None:
    assert Polygon(corners=MAX_INT).corners == MAX_INT
    for corners in (MAX_INT + 1, 2, True):
        with pytest.raises(ValidationError):
            Polygon(corners=corners)
