from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipeline.config.renames import RenameSpec


def rule(match: str, to: str | None, syntax: str = "regex") -> RenameSpec:
    return RenameSpec.model_validate({"match": match, "to": to, "syntax": syntax})


@pytest.mark.parametrize(
    ("rename", "name", "result"),
    [
        (rule(r"layer(\d+)\.conv(\d)", r"stage\1/conv_\2"), "layer12.conv3", "stage12/conv_3"),
        (rule(r"(a)?b", r"x\1"), "b", "x"),
        (rule(r"w", r"a\n\0\g<1>"), "w", r"a\n\0\g<1>"),
        (rule("backbone.*", r"\1", "glob"), "backbone.fc.weight", "fc.weight"),
        (rule("fc?.*", r"dense_\1.\2", "glob"), "fc3.bias", "dense_3.bias"),
        (rule("(a)+", r"b", "glob"), "(a)+", "b"),
        (rule("junk", None), "junk", None),
    ],
)
def test_rule_renames_matching_name(rename: RenameSpec, name: str, result: str | None) -> None:
    assert rename.pattern.fullmatch(name)
    assert rename.apply(name) == result


def test_rule_matches_complete_names() -> None:
    assert not rule("fc", "x").pattern.fullmatch("fc1")
    assert not rule("f.c", "x", "glob").pattern.fullmatch("fxc")


@pytest.mark.parametrize(
    ("match", "to", "message"),
    [
        ("(", "x", r"match '\(' must be a regular expression: missing \): \("),
        (r"(?=a)b", "x", r"must be a regular expression: invalid perl operator: \(\?="),
        (r"(a)\1", "x", r"must be a regular expression: invalid escape sequence: \\1"),
        ("a" * 1001, "x", "at most 1000 characters"),
        ("a(b)", r"\2", r"has group 2, and match 'a\(b\)' has 1"),
    ],
)
def test_inapplicable_rule_is_refused(match: str, to: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rule(match, to)


@pytest.mark.parametrize("syntax", ["regex", "glob"])
def test_rule_matching_is_fast(syntax: str) -> None:
    """Python's own expressions take centuries over the first of these."""
    for match in ("(a+)+b", "(a|a)*b", "(.*)*(.*)*(.*)*b", "*a*a*a*a*a*a*a*a*a*a*a*a*b"):
        try:
            pattern = rule(match, "x", syntax).pattern
        except ValidationError:
            continue
        assert not pattern.fullmatch("a" * 1000)
