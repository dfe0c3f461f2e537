from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from pipeline.checkpoint.host_state import HostState
from pipeline.checkpoint.restore import parse_host_state


def test_host_state_round_trips() -> None:
    kept = {
        "early_stop": {"best": math.nan, "waited": 3},
        "unfinished_boundary": {"loss": 0.1, "verdict": None},
        "rollbacks": [[7, 5], [9, 0]],
        "sink": {"size": None, "mechanism": "none"},
    }
    state = parse_host_state(json.loads(json.dumps(kept)))
    assert math.isnan(state.early_stop.best or 0)
    assert state.early_stop.waited == 3
    assert state.unfinished_boundary is not None
    assert asdict(state.unfinished_boundary) == kept["unfinished_boundary"]
    assert state.rollbacks == ((7, 5), (9, 0))
    assert state.sink is not None
    assert asdict(state.sink) == kept["sink"]


def test_missing_keys_take_defaults_and_unknown_keys_are_ignored() -> None:
    assert parse_host_state({"of_a_later_version": 1}) == HostState()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "all = null"),
        ([], r"all = \[\]"),
        ({"early_stop": None}, "^early_stop = null$"),
        ({"early_stop": {"waited": True}}, "early_stop.waited = true"),
        ({"early_stop": {"waited": -1}}, "early_stop.waited = -1"),
        ({"early_stop": {"waited": 10**30}}, "early_stop.waited = 1000"),
        ({"early_stop": {"best": "0.5"}}, "early_stop.best = '0.5'"),
        ({"early_stop": {"best": 10**400}}, "early_stop.best = 1000"),
        ({"unfinished_boundary": {"loss": 1.0}}, "unfinished_boundary.verdict is missing"),
        ({"unfinished_boundary": {"loss": 1, "verdict": 5}}, "unfinished_boundary.verdict = 5"),
        ({"rollbacks": None}, "rollbacks = null"),
        ({"rollbacks": [[1]]}, "rollbacks.0.1 is missing"),
        ({"rollbacks": [[5, "0"]]}, "rollbacks.0.1 = '0'"),
        ({"sink": {"size": 0, "mechanism": "loop"}}, "sink.size = 0"),
        ({"sink": {"size": 10**30, "mechanism": "loop"}}, "sink.size = 1000"),
        ({"sink": {"size": 5, "mechanism": "hard"}}, "sink.mechanism = hard"),
    ],
)
def test_invalid_value_is_refused_with_its_key(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_host_state(data)


def test_verdict_is_escaped_for_the_terminal() -> None:
    state = parse_host_state({"unfinished_boundary": {"loss": None, "verdict": "\x1b[31m"}})
    assert state.unfinished_boundary is not None
    assert state.unfinished_boundary.verdict == r"\x1b[31m"


def test_callback_json_round_trips_exactly() -> None:
    """NaN, infinities, numbers beyond 64 bits, and nested lists, which no schema describes."""
    states = {"A-1": [math.inf, -0.0, 2**200, {"deep": [[], {}, None, True, "ü\x00"]}], "B-1": 0.1}
    state = parse_host_state(json.loads(json.dumps({"callbacks": {"states": states}})))
    assert json.dumps(state.callbacks.states) == json.dumps(states)
