"""YAML that this project wrote is read faster, to the same values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf.basecontainer import get_yaml_loader

from pipeline.core.files.paths import CONF, RECIPES
from pipeline.core.files.safe_yaml import (
    RepeatedYaml,
    _PlainLoader,
    parse_written_yaml,
    parse_yaml,
)
from pipeline.core.files.yaml_text import format_yaml

ODD = ["=", "<<", "1_0", "0x1F", "yes", "1e3", "2020-01-01"]


@pytest.mark.medium
@given(st.text(st.sampled_from("ab1: -[]{}&*!<>|'\"#\n,?%@="), max_size=24))
def test_fast_reader_agrees_with_the_strict_reader(text: str) -> None:
    with suppress(ValueError):
        expected = parse_yaml(text)
        assert parse_written_yaml(text) == expected


@given(st.text("0123456789+-._:eExXobinfaNItruyTZ", max_size=8) | st.sampled_from(ODD))
def test_scalars_have_the_types_that_omegaconf_gives_them(text: str) -> None:
    tags = [
        loader("").resolve(yaml.ScalarNode, text, (True, False))
        for loader in (_PlainLoader, get_yaml_loader())
    ]
    assert tags[0] == tags[1]


@pytest.mark.medium
def test_shipped_recipes_are_read_equally_by_both_readers() -> None:
    files = [*RECIPES.glob("*.yaml"), *CONF.rglob("*.yaml")]
    assert len(files) > 50
    for file in files:
        assert parse_written_yaml(file.read_text()) == parse_yaml(file.read_text()), file


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "a: &x [1]\nb: [*x, *x]\nc: !!python/object:os.system x",
        "a: 1\na: 2",
        "1: a",
        f"a: {'9' * 5000}",
    ],
)
def test_hostile_texts_are_refused_with_equal_messages(text: str) -> None:
    """Deep nesting would overflow the stack of the reader in C."""
    words = []
    for parse in (parse_yaml, parse_written_yaml):
        with pytest.raises(ValueError, match=r".") as caught:
            parse(text)
        words.append(str(caught.value))
    assert words[0] == words[1]


OF_YAML_1_1 = ["1:30", "1:30.5", "0x10", "0b11", "017", "-017", "00", "0_0", "1__0", "1_"]


@pytest.mark.parametrize("text", [*OF_YAML_1_1, "yes", "No", "on", "OFF"])
def test_values_read_as_text_by_the_command_line_are_refused(text: str) -> None:
    for parse in (parse_yaml, parse_written_yaml):
        with pytest.raises(ValueError, match=r"line 2: seed = .*: a text on the command") as caught:
            parse(f"a: 1\nseed: {text}\n")
        with pytest.raises(ValueError, match=r"line 1: .*: a text on the command line"):
            parse(f"a: [{text}]")
        assert str(caught.value).endswith(f"or a text in quotes: '{text}'")
        assert parse(f"seed: '{text}'") == {"seed": text}


NUMBERS = ["0", "-0", "+5", "1_000", "1.", ".5", "1e3", "1E-5", "1.5e+3", "1_0.5", "true", "False"]


@pytest.mark.parametrize("text", NUMBERS)
def test_unquoted_values_match_the_command_line(text: str) -> None:
    expected = OverridesParser.create().parse_override(f"k={text}").value()
    for parse in (parse_yaml, parse_written_yaml):
        value = parse(f"k: {text}")["k"]
        assert (value, type(value)) == (expected, type(expected))


KEYS = st.sampled_from(["a", "b_2", "lr", "on", "null", "a b", "1", "x:y"])
SCALARS = st.sampled_from(
    (None, True, 0, -1.5, 1e-5, "", "text", "yes", "1e3", "a: b", "# no", "- x", "two\nlines")
) | st.sampled_from(
    (
        " x ",
        "long " * 40,
        "\u2028",
        "tab\t",
        "'quoted'",
        '"',
        "|",
        "~",
        "*a",
        "&a",
        "!a",
        "%",
        "a #b",
    )
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


def parse_or_refuse(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError:
        return "refused"


@pytest.mark.medium
@settings(max_examples=300, deadline=None)
@given(
    trees=st.lists(st.dictionaries(KEYS, TREES, max_size=4), min_size=1, max_size=3),
    edits=st.lists(
        st.tuples(
            st.integers(0, 400),
            st.sampled_from(
                ["", " ", "  ", "\n", "\na: 1\n", "'", '"', "- ", ": ", "#", "|\n", "---\n"]
            ),
        ),
        max_size=2,
    ),
)
def test_repeated_parts_are_parsed_as_whole_texts(
    trees: list[dict[str, Any]], edits: list[tuple[int, str]]
) -> None:
    repeated = RepeatedYaml()
    for tree in [*trees, *trees]:
        text = format_yaml(tree)
        for place, edit in edits:
            place = place % (len(text) + 1)
            text = text[:place] + edit + text[place:]
        whole = parse_or_refuse(parse_written_yaml, text)
        parsed = parse_or_refuse(repeated.parse, text)
        assert repr(parsed) == repr(whole), text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "a: 1\na: 2",
        "a:\n  b: 1\n  b: 2",
        "a: 1\n\nb: 2\n",
        "a: &x 1\nb: *x",
        "on: 1",
        "no:\n  a: 1",
        "a: 'x\nb: 2'",
        "a: [1,\n2]",
        "a: 017",
        "a:\n   b: 1\n   c: 2",
        "a:\n- 1\n- b: 2",
        "a:\n" + "".join(f"{'  ' * n}a:\n" for n in range(1, 300)),
        "".join(f"k{n}: {n}\n" for n in range(3000)),
    ],
)
def test_text_of_another_form_is_parsed_as_a_whole(text: str) -> None:
    whole = parse_or_refuse(parse_written_yaml, text)
    assert repr(parse_or_refuse(RepeatedYaml().parse, text)) == repr(whole)
