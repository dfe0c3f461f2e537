"""Overrides as typed: what Hydra's grammar refuses, and the quotes that make it readable."""

from __future__ import annotations

import shlex
import time

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pipeline.config.overrides import find_parse_problems, list_values

QUOTED = {
    "dataset.root=/tmp/daten_ä": ("/tmp/daten_ä", """'dataset.root="/tmp/daten_ä"'"""),
    "dataset.root=/tmp/Bilder (für mich)": ("/tmp/Bilder (für mich)", None),
    "stages=[data, büild]": (["data", "büild"], """'stages=[data, "büild"]'"""),
    "x=[{name: crop, y: é}]": ([{"name": "crop", "y": "é"}], None),
    "name=a=b": ("a=b", """'name="a=b"'"""),
    "name=it's ü": ("it's ü", None),
    'name=ein "Wort" mehr': ('ein "Wort" mehr', None),
    "name=a\\ö": ("a\\ö", None),
}


@pytest.mark.parametrize(("override", "expected"), QUOTED.items(), ids=QUOTED.keys())
def test_quotes_that_work_in_a_shell_are_shown(
    override: str, expected: tuple[object, str | None]
) -> None:
    value, form = expected
    ((refused, problem),) = find_parse_problems([override])
    assert refused == override
    head, _, typed = problem.partition(", as ")
    assert head == "must be typed in quotes"
    assert form in (None, typed)
    (argument,) = shlex.split(typed)
    assert OverridesParser.create().parse_override(argument).value() == value


def test_sweep_values_are_quoted_separately() -> None:
    ((_, problem),) = find_parse_problems(["dataset.root=/tmp/ä,/tmp/b"])
    (argument,) = shlex.split(problem.partition(", as ")[2])
    sweep = OverridesParser.create().parse_override(argument)
    assert list(sweep.sweep_string_iterator()) == ['"/tmp/ä"', "/tmp/b"]


@pytest.mark.parametrize(
    "override", ["x=[1,2", "x='ä", "x=range(1,ä", "x=${oc.env:HOME", f"seed={'9' * 5000}"]
)
def test_quotes_that_change_the_meaning_are_not_suggested(override: str) -> None:
    ((_, problem),) = find_parse_problems([override])
    assert "quotes" not in problem


def test_non_ascii_key_is_refused() -> None:
    assert list(find_parse_problems(["größe=3"])) == [("größe=3", "there is no such key")]


def test_value_split_by_the_shell_is_shown_in_quotes() -> None:
    assert list(find_parse_problems(["dataset.root=/tmp/my", "data", "set"])) == [
        (
            "data",
            "must be KEY=VALUE; a value with a space is typed in quotes, as "
            "'dataset.root=/tmp/my data'",
        ),
        ("set", "must be KEY=VALUE"),
    ]
    assert list(find_parse_problems(["++dataset.root=my", "data"])) == [
        (
            "data",
            "must be KEY=VALUE; a value with a space is typed in quotes, as 'dataset.root=my data'",
        )
    ]
    words = "dataset.train.ops=[{name: resize, size: [32, 32]}, whiten]"
    (problem,) = find_parse_problems(["seed=1", *words.split(), "train.steps=3"])
    assert problem == (
        "dataset.train.ops=[{name:",
        f"was split at its spaces by the shell; type it in quotes, as '{words}'",
    )
    # Brackets that never close aren't one override.
    problems = [word for word, _ in find_parse_problems(["stages=[data,", "build", "seed=1"])]
    assert problems == ["stages=[data,", "build"]
    assert list(find_parse_problems(["+recipe=mine", "data"])) == [("data", "must be KEY=VALUE")]


@pytest.mark.parametrize(
    "words",
    [
        *(["train.epochs", "=", "3"], ["train.epochs=", "3"], ["train.epochs", "=3"]),
        *(["train.epochs = 3"], ["train.epochs =3"]),
    ],
)
def test_spaces_at_the_equals_sign_are_one_problem(words: list[str]) -> None:
    problem = (" ".join(words), "must have no space at its =, as train.epochs=3")
    assert list(find_parse_problems(["seed=1", *words, "train.sink=false"])) == [problem]
    assert list(find_parse_problems(["dataset.root=", "seed=1"])) == []


@pytest.mark.medium
def test_many_long_overrides_are_parsed_quickly() -> None:
    begun = time.process_time()
    found = list(find_parse_problems([f"x=[{'ö,' * 4000}b]"] * 20 + ["x=[ö,ü]"] * 900))
    assert time.process_time() - begun < 5
    assert len(found) == 920
    assert found[20][1].startswith("must be typed in quotes")
    assert "token recognition error" in found[0][1]
    assert "token recognition error" in found[-1][1]


def test_values_are_listed_as_they_are_read() -> None:
    assert list_values("k", "1e30,0.01") == ["1e+30", "0.01"]
    assert list_values("k", "1e30") == ["1e+30"]
    assert list_values("k", "[16],[64,8]") == ["[16]", "[64,8]"]
    assert list_values("k", "") == [""]


@pytest.mark.parametrize("text", ["<a>,b(1)", "a=1,b"])
def test_quotes_of_each_value_are_shown(text: str) -> None:
    with pytest.raises(ValueError, match="must be typed in quotes, as ") as problem:
        list_values("k", text)
    (form,) = shlex.split(str(problem.value).partition(", as ")[2])
    assert [value.strip("'") for value in list_values("k", form)] == text.split(",")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,", "must be values with commas between them"),
        ("[16,[8]", "must be values with commas between them"),
        ("interval(0,1)", "must be values, not a range"),
        ("x" * 20_000, "characters; must be at most"),
        ("[" * 3000, "nested more than"),
    ],
)
def test_text_without_values_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        list_values("k", text)
