"""The flow that both tuners share: banks, statuses and records (A-01, A-03)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.core.errors import RunError
from pipeline.core.files.knowledge_bank import (
    Banks,
    Entry,
    make_operator_record,
    read_bank,
    reuse_or_search,
)


@dataclass(frozen=True)
class Result:
    """A result by its time."""

    us: float


def checked(entry: Entry) -> Entry:
    return {"us": float(entry["us"])}


def no_search() -> Result:
    raise AssertionError("searched")


def test_search_without_entry_is_used_and_stored() -> None:
    tuned = reuse_or_search(None, lambda: Result(2.0), repeat=False)
    assert (tuned.best, tuned.status, tuned.searched) == (Result(2.0), "bank_append", Result(2.0))


def test_stored_entry_is_used_without_a_search() -> None:
    tuned = reuse_or_search(Result(3.0), no_search, repeat=False)
    assert (tuned.best, tuned.status, tuned.searched) == (Result(3.0), "bank_hit", None)


@pytest.mark.parametrize(
    ("searched", "best", "status"),
    [(2.0, 2.0, "bank_update"), (3.0, 3.0, "bank_reserved"), (4.0, 3.0, "bank_reserved")],
)
def test_repeated_search_replaces_entry_only_if_faster(
    searched: float, best: float, status: str
) -> None:
    tuned = reuse_or_search(Result(3.0), lambda: Result(searched), repeat=True)
    assert (tuned.best, tuned.status, tuned.searched) == (Result(best), status, Result(searched))


def test_user_bank_overrides_built_in_entries(tmp_path: Path) -> None:
    banks = Banks(tmp_path / "custom.json", tmp_path / "built_in.json", checked)
    assert banks.read() == {}
    Banks(tmp_path / "built_in.json", None, checked).add({"a": {"us": 1}, "b": {"us": 2}})
    banks.add({"b": {"us": 3}})
    assert banks.read() == {"a": {"us": 1.0}, "b": {"us": 3.0}}
    assert read_bank(tmp_path / "custom.json", checked) == {"b": {"us": 3.0}}


def test_addition_without_user_bank_writes_no_file(tmp_path: Path) -> None:
    Banks(None, None, checked).add({"a": {"us": 1}})
    assert Banks(None, None, checked).read() == {}
    assert list(tmp_path.iterdir()) == []


def test_foreign_file_in_place_of_a_bank_is_named(tmp_path: Path) -> None:
    (tmp_path / "custom.json").write_text("[]")
    with pytest.raises(RunError, match=r"custom\.json: not a knowledge bank"):
        Banks(tmp_path / "custom.json", None, checked).read()


def test_record_has_its_status_as_booleans() -> None:
    record = make_operator_record(("conv2d", "forward"), "key", 2.0, 1.0, "bank_hit")
    flags = {"bank_append": False, "bank_hit": True, "bank_reserved": False, "bank_update": False}
    assert record == {
        "op": ["conv2d", "forward"],
        "key": "key",
        "result_data": {"before_tune": 2.0, "after_tune": 1.0},
        "status_data": flags,
    }
