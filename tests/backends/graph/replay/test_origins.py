"""The first cause among all values that a bad one depends on."""

from __future__ import annotations

from pipeline.backends.graph.replay.origins import Cause, Origin, find_cause


def origin(number: int, *causes: Origin, nan: bool = False, intended: bool = False) -> Origin:
    return Origin(number, "add", "", nan, causes, intended=intended)


def test_earliest_origin_without_causes_is_the_cause() -> None:
    late = origin(5, nan=True)
    early = origin(2)
    outcome = origin(9, origin(7, late, nan=True), origin(8, early), nan=True)
    assert find_cause(outcome) == Cause(early)


def test_input_is_attributed_to_its_first_reader() -> None:
    column = origin(-1, nan=True)
    reader = origin(4, column, nan=True)
    outcome = origin(9, origin(6, column, nan=True), reader, nan=True)
    cause = find_cause(outcome)
    assert (cause.origin, cause.reader, cause.number) == (column, reader, 4)


def test_intended_infinity_is_a_cause_only_without_another() -> None:
    mask = origin(1, intended=True)
    makes_nan = origin(3, mask, nan=True)
    assert find_cause(origin(5, mask)) == Cause(mask)
    assert find_cause(origin(5, makes_nan, nan=True)) == Cause(makes_nan)
    overflow = origin(4)
    assert find_cause(origin(5, makes_nan, overflow, nan=True)) == Cause(overflow)


def test_value_without_causes_is_its_cause() -> None:
    outcome = origin(3, nan=True)
    assert find_cause(outcome) == Cause(outcome)
    assert outcome.makes_nan
