"""Tests of texts of names, and of the known name nearest to a wrong one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.files.name_text import (
    MAX_NAME_LENGTH,
    explain_unknown_name,
    find_nearest,
    show_name,
)

NAMES = st.text(max_size=20)


@given(NAMES, st.lists(NAMES, max_size=5))
def test_nearest_name_is_a_choice_and_a_known_name_is_nearest_to_itself(
    name: str, choices: list[str]
) -> None:
    assert find_nearest(name, choices) in (None, *choices)
    assert all(find_nearest(choice, choices) == choice for choice in choices if choice)


def test_synonym_goes_before_a_similar_name() -> None:
    assert find_nearest("base_lr", ["base_l", "lr"]) == "lr"
    assert find_nearest("base_lr", ["base_l"]) == "base_l"
    assert find_nearest("cuda", ["cpu"]) is None


def test_name_of_any_length_is_not_searched() -> None:
    name = "n" * (MAX_NAME_LENGTH + 1)
    assert find_nearest(name, [name]) is None
    assert find_nearest(name[1:], [name[1:]]) == name[1:]


@given(st.text())
def test_shown_name_is_short_and_printable(name: str) -> None:
    assert len(show_name(name)) <= 120
    assert show_name(name).isprintable()


def test_unknown_name_lists_the_choices() -> None:
    assert explain_unknown_name("model", "mpl", ["mlp", "lenet5", ""]) == (
        "there is no such model; did you mean mlp? Choose from lenet5, mlp"
    )
    assert explain_unknown_name("model", "x", []) == "there is no such model. There are none"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("coco", "boxes of objects"),
        ("yolov3_darknet53", "boxes of objects"),
        ("faster_rcnn", "boxes of objects"),
        ("ssd300", "boxes of objects"),
        ("Object-Detection", "boxes of objects"),
        ("whisper-tiny", "sound isn't transcribed"),
        ("wmt14", "texts aren't translated"),
        ("stable-diffusion", "by diffusion"),
        ("ogbn-arxiv", "graphs of nodes"),
        ("kinetics400", "videos aren't read"),
    ],
)
def test_other_task_is_named(name: str, words: str) -> None:
    text = explain_unknown_name("dataset", name, ["cifar10", "concat"])
    assert text.startswith("there is no such dataset; ")
    assert words in text
    assert text.endswith(". Choose from cifar10, concat")
    assert words not in explain_unknown_name("metric", name, ["loss"])
