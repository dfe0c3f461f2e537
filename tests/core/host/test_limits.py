from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from pipeline.core.host import limits, memory
from pipeline.core.host.limits import Limits, find_usable_bytes, read_limits


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of control groups, with the process's memberships in its file `member`."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "MEMBERSHIP", tmp_path / "member")
    return tmp_path


def test_limits_match_this_process() -> None:
    limits = read_limits()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits.open_files == (None if soft == resource.RLIM_INFINITY else soft)
    assert 0 < limits.cores <= len(os.sched_getaffinity(0)) <= limits.machine_cores
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < limits.memory_bytes <= physical_bytes
    assert limits.load >= 0


UNLIMITED_1 = str(2**63 - 4096)
VERSION_1 = {
    "memory/memory.usage_in_bytes": "9000",
    "cpu/cpu.cfs_period_us": "100000",
}
NESTED_2 = {"slice/memory.current": "9000", "slice/job/memory.current": "2000"}
NESTED_1 = {
    "memory/memory.limit_in_bytes": UNLIMITED_1,
    "memory/memory.usage_in_bytes": "9000",
    "memory/slice/memory.usage_in_bytes": "7000",
    "cpu/slice/cpu.cfs_period_us": "100000",
}


@pytest.mark.parametrize(
    ("files", "memory_bytes", "cores"),
    [
        ({"memory.max": "5000", "memory.current": "2000", "cpu.max": "50000 100000"}, 3000, 0.5),
        ({**VERSION_1, "memory/memory.limit_in_bytes": "5000"}, 0, None),
        ({**VERSION_1, "cpu/cpu.cfs_quota_us": "25000"}, None, 0.25),
        ({"memory.max": "max", "cpu.max": "max 100000"}, None, None),
        (
            {
                **VERSION_1,
                "memory/memory.limit_in_bytes": UNLIMITED_1,
                "cpu/cpu.cfs_quota_us": "-1",
            },
            None,
            None,
        ),
        ({**NESTED_2, "slice/memory.max": "9500", "slice/job/memory.max": "5000"}, 500, None),
        ({**NESTED_2, "slice/memory.max": "max", "slice/job/memory.max": "5000"}, 3000, None),
        ({"slice/cpu.max": "30000 100000", "slice/job/cpu.max": "60000 100000"}, None, 0.3),
        ({"slice/cpu.max": "max 100000", "slice/job/cpu.max": "60000 100000"}, None, 0.6),
        ({**NESTED_1, "memory/slice/memory.limit_in_bytes": "7600"}, 600, None),
        ({**NESTED_1, "cpu/slice/cpu.cfs_quota_us": "40000"}, None, 0.4),
        ({"other/memory.max": "5000", "other/memory.current": "1"}, None, None),
        ({}, None, None),
    ],
    ids=[
        "version 2",
        "version 1, over it",
        "cores in 1",
        "none in 2",
        "none in 1",
        "memory of the outer group",
        "memory of the inner group",
        "cores of the outer group",
        "cores of the inner group",
        "memory of a group in 1",
        "cores of a group in 1",
        "another group",
        "no cgroup",
    ],
)
def test_control_groups_limit_memory_and_cores(
    files: dict[str, str], memory_bytes: int | None, cores: float | None, groups: Path
) -> None:
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    (groups / "member").write_text("0::/slice/job\n4:memory:/slice\n1:cpu,cpuacct:/slice\n")
    limits = read_limits()
    if memory_bytes is None:
        assert limits.memory_bytes > 10_000
    else:
        assert limits.memory_bytes == memory_bytes
    assert limits.cores == (len(os.sched_getaffinity(0)) if cores is None else cores)


def test_inactive_file_cache_counts_as_available(groups: Path) -> None:
    group = groups / "job"
    group.mkdir()
    (group / "memory.max").write_text("5000")
    (group / "memory.current").write_text("4000")
    (group / "memory.stat").write_text("anon 1000\ninactive_file 2500\n")
    (groups / "member").write_text("0::/job\n")
    assert read_limits().memory_bytes == 3500


def test_file_size_limit_of_the_shell_is_read() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**9, hard))
    try:
        assert read_limits().file_bytes == 10**9
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_at_hand_is_the_least_of_all_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(memory_bytes: int, address_bytes: int | None) -> None:
        found = Limits(None, None, address_bytes, memory_bytes, 1.0, 1, 0.0)
        monkeypatch.setattr(limits, "read_limits", lambda: found)

    terabyte = 10**12
    limit(5000, None)
    assert find_usable_bytes() == find_usable_bytes(terabyte) == 5000
    limit(terabyte, 1)
    assert find_usable_bytes() == 0
    limit(terabyte, terabyte // 2)
    assert 0 < find_usable_bytes() < terabyte // 2
    resident_bytes = terabyte - find_usable_bytes(terabyte // 4) - 3 * terabyte // 4
    assert 10**6 < resident_bytes < 10**11
    assert find_usable_bytes(1) == 0
