"""The short version of `python -m tests.faults`."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.__main__ import Harness, try_and_report
from tests.faults.faults import Fault, iter_faults, list_names
from tests.faults.judging import find_lacks
from tests.faults.preload import explain_skip
from tests.faults.scenarios import RUN, Baseline

pytestmark = pytest.mark.slow

CASES = (
    Fault("mkdir", ["mkdir"], "once", 4, errno.ENOSPC),
    Fault("write", ["write"], "once", 20, errno.ENOSPC),
    Fault("write, short", ["write"], "short", 25),
    Fault("rename", ["rename"], "once", 7, errno.EIO),
    Fault("sync", ["sync"], "once", 8, errno.EIO),
    Fault("disk full", ["mkdir", "create", "write", "rename"], "from", 60, errno.ENOSPC),
)
"""A case of each sort, mostly during the write of a checkpoint."""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    if reason := explain_skip():
        pytest.skip(reason)
    with Harness(tmp_path_factory.mktemp("faults"), num_nurseries=1) as harness:
        yield harness


@pytest.fixture(scope="module")
def fresh(harness: Harness) -> Baseline:
    return harness.run_baselines(["fresh"])[0]


def test_runs_with_file_faults_end_without_defects(harness: Harness, fresh: Baseline) -> None:
    rows = try_and_report(harness, [(fresh, fault) for fault in CASES])
    assert {name: row.defects for (_, name), row in rows.items() if row.defects} == {}
    assert all(row.injected for row in rows.values())
    assert sum(row.done + row.failed for row in rows.values()) == len(CASES)


def test_calls_of_every_library_are_recorded(fresh: Baseline) -> None:
    """Arrays and all other files, by whatever writes them."""
    log = next(fresh.unbroken.parent.parent.glob("fresh_unbroken.calls")).read_text()
    written = {line.partition(f"/{RUN}/")[2] for line in log.splitlines() if "write " in line}
    assert "metrics.jsonl" in written
    assert any("/state/d/" in name for name in written)
    assert any("manifest.json" in name for name in written)
    assert fresh.calls["mkdir"] > 10


def test_incomplete_run_is_detected(fresh: Baseline, tmp_path: Path) -> None:
    shutil.copytree(fresh.unbroken, tmp_path / RUN)
    assert find_lacks(tmp_path / RUN, fresh) == []
    with (tmp_path / RUN / "metrics.jsonl").open("a") as metrics:
        metrics.write("{}\n")
    assert find_lacks(tmp_path / RUN, fresh) == ["metrics.jsonl is another"]
    (step,) = (tmp_path / RUN / "checkpoints").iterdir()
    (step / "host" / "metadata").write_text("{}")
    shutil.rmtree(step / "state")
    assert len(find_lacks(tmp_path / RUN, fresh)) == 2


def test_faults_cover_every_call_or_are_spread() -> None:
    counts = Counter(mkdir=5, write=9)
    faults = list(iter_faults("mkdir", counts, None, 0))
    assert [fault.nth for fault in faults] == [1, 2, 3, 4, 5]
    assert len({fault.error for fault in faults}) == 4
    spread = [fault.nth for fault in iter_faults("disk full", counts, 4, 0)]
    assert (spread[0], spread[-1], len(spread)) == (1, 14, 4)
    modes = {mode for name in list_names() for mode in _list_modes(name, counts)}
    assert modes == {"once", "from", "short"}


def _list_modes(name: str, counts: Counter[str]) -> set[str]:
    return {fault.mode for fault in iter_faults(name, counts, 3, 0)}
