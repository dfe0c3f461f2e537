"""Load by other programs: what they use of the cores, without this process and idle cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.host import measured_time
from pipeline.core.host.measured_time import LoadWatch, describe_load, read_machine_s


@pytest.mark.parametrize(
    ("content", "seconds"),
    [
        ("cpu  100 20 30 9999 8888 4 5 6 70 7\ncpu0 1 2\n", 1.65),
        ("cpu  100 20 30 9999\n", 1.5),
        ("cpu\n", None),
        ("cpu  one two\n", None),
    ],
)
def test_machine_time_is_all_but_idle(
    content: str, seconds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(content)
    monkeypatch.setattr(measured_time, "STAT", tmp_path / "stat")
    monkeypatch.setattr(measured_time.os, "sysconf", lambda name: 100)
    assert read_machine_s() == seconds


def test_foreign_cores_are_the_machine_s_without_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = measured_time.read_limits()
    monkeypatch.setattr(measured_time, "read_machine_s", lambda: 130.0)
    monkeypatch.setattr(measured_time, "read_process_s", lambda: 12.0)
    monkeypatch.setattr(measured_time.time, "monotonic", lambda: 1010.0)
    watch = LoadWatch(started_s=1000.0, machine_s=100.0, process_s=2.0)
    unused = limits.machine_cores - limits.cores
    assert watch.count_foreign_cores() == pytest.approx(max(0.0, 2.0 - unused))
    monkeypatch.setattr(measured_time.time, "monotonic", lambda: 1000.1)
    assert watch.count_foreign_cores() == 0.0
    assert LoadWatch(1000.0, None, 2.0).count_foreign_cores() == 0.0


def test_load_is_described_if_it_is_notable() -> None:
    assert describe_load(0.4, 2.0) is None
    assert describe_load(0.5, 2.0) == (
        "other programs used 0.5 of 2 cores meanwhile, so these times are longer than on an idle "
        "machine"
    )
