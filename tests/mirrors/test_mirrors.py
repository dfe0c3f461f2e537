"""The short version of `python -m tests.mirrors`, and mirrors that would break its law."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.checkpoint.mirror_writer import MirrorWriter
from pipeline.core.files import storage
from tests.mirrors.faulty_mirrors import list_faults, restore_faulty
from tests.mirrors.memory_store import FAULTS
from tests.mirrors.zombies import (
    KILL,
    LAND,
    draw_choices,
    list_outcomes,
    replace_process,
    run_interleaved,
)

TURN = st.tuples(
    st.sampled_from((0, 1, LAND)), st.sampled_from((*FAULTS, KILL)), st.integers(0, 30)
)


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "WAITS_S", (0.0, 0.0, 0.0))
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_replaced_process_harms_no_copy_at_any_operation(fault: str) -> None:
    outcomes = list(list_outcomes([fault]))
    assert [outcome for outcome in outcomes if outcome.loss is not None] == []
    assert {outcome.operation.partition(" ")[0] for outcome in outcomes} >= {"list", "write"}
    assert any("remove" in outcome.operation for outcome in outcomes)


@pytest.mark.medium
@pytest.mark.parametrize("same_run", [True, False])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns=st.lists(TURN, max_size=12))
def test_processes_that_take_turns_lose_nothing(
    turns: list[tuple[int, str, int]], same_run: bool
) -> None:
    choices = [
        choice
        for number, fault, count in turns
        for choice in (*[(number, "none")] * count, (number, fault))
    ]
    assert run_interleaved(choices, same_run=same_run).loss is None


def _share_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process write into its predecessor's folder, as all did once."""
    open_mirror = MirrorWriter.open

    def open_shared(self: MirrorWriter) -> None:
        open_mirror(self)
        if self._predecessors:
            self._storage.remove(self.writer.folder)
            self.writer = max(self._predecessors)

    monkeypatch.setattr(MirrorWriter, "open", open_shared)


@pytest.mark.medium
def test_shared_folder_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    _share_folder(monkeypatch)
    assert any(outcome.loss for outcome in list_outcomes(["none", "late"]))


@pytest.mark.medium
def test_removal_before_a_copy_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = MirrorWriter._copy

    def remove_first(self: MirrorWriter, step: int) -> None:
        for writer in self._predecessors:
            self._storage.remove(writer.folder)
        for attempt in self._attempts:
            self._storage.remove(f"{self.writer.folder}/{attempt.folder}")
        copy(self, step)

    monkeypatch.setattr(MirrorWriter, "_copy", remove_first)
    draws = [draw_choices(random.Random(number)) for number in range(20)]
    assert any(run_interleaved(choices, same_run=True).loss for choices in draws)


@pytest.mark.slow
def test_faulty_mirrors_are_restored_or_refused() -> None:
    results = [restore_faulty(fault) for fault in list_faults()]
    assert [result for result in results if result.wrong is not None] == []
    assert len(results) > 100


def test_process_without_a_predecessor_has_no_stop() -> None:
    assert replace_process(10_000, "none", 1) is None
