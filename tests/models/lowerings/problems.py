"""Convolutions to ask for, drawn and read back from their text."""

from __future__ import annotations

import re

from hypothesis import strategies as st

from pipeline.models.lowerings.problem import (
    CODE_NAMES,
    ROLES,
    Axis,
    ConvolutionProblem,
    ConvWindow,
)

NAMES = ("role", "dtype")
"""The part of a problem that is not a number."""

_TEXT = re.compile(
    r"conv2d (?P<role>\w+) (?P<batch>\d+)x(?P<height>\d+)x(?P<width>\d+)x(?P<channels>\d+) "
    r"kernel (?P<rows>\d+)x(?P<columns>\d+)x(?P<features>\d+) stride (?P<down>\d+)x(?P<across>\d+) "
    r"pads (?P<top>-?\d+)\+(?P<bottom>-?\d+),(?P<left>-?\d+)\+(?P<right>-?\d+) "
    r"dilation (?P<low>\d+)x(?P<wide>\d+) groups (?P<groups>\d+) (?P<dtype>\w+)"
)


def parse_problem(text: str) -> ConvolutionProblem:
    """The problem whose text this is. Raises ValueError where there is none."""
    match = _TEXT.fullmatch(text)
    name = match["role"] if match is not None else ""
    if match is None or CODE_NAMES.get(name, name) not in ROLES:
        raise ValueError(f"{text!r} is no problem")
    n = {name: int(value) for name, value in match.groupdict().items() if name not in NAMES}
    rows = Axis(n["height"], n["rows"], n["down"], n["low"], (n["top"], n["bottom"]))
    columns = Axis(n["width"], n["columns"], n["across"], n["wide"], (n["left"], n["right"]))
    role = ROLES[ROLES.index(CODE_NAMES.get(name, name))]
    window = ConvWindow(rows, columns, n["groups"])
    return ConvolutionProblem(
        role, window, n["batch"], n["channels"], n["features"], match["dtype"]
    )


SMALL = st.integers(1, 12)
AXES = st.builds(Axis, SMALL, SMALL, SMALL, SMALL, st.tuples(*[st.integers(-3, 12)] * 2))
PROBLEMS = st.builds(
    ConvolutionProblem,
    st.sampled_from(ROLES),
    st.builds(ConvWindow, AXES, AXES, SMALL),
    SMALL,
    SMALL,
    SMALL,
    st.sampled_from(("float32", "bfloat16")),
)
"""Any numbers in any place, also such as no convolution has."""
