from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from pipeline.observe.limits import read_limits


def test_limits_are_those_of_this_process() -> None:
    limits = read_limits()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits.open_files == (None if soft == resource.RLIM_INFINITY else soft)
    assert 0 < limits.cores <= len(os.sched_getaffinity(0)) <= limits.machine_cores
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < limits.memory_bytes <= physical_bytes
    assert limits.load >= 0


@pytest.mark.parametrize(
    ("files", "memory_bytes", "cores"),
    [
        ({"memory.max": "5000", "memory.current": "2000", "cpu.max": "50000 100000"}, 3000, 0.5),
        ({"memory/memory.limit_in_bytes": "5000", "memory/memory.usage_in_bytes": "9000"}, 0, None),
        ({"memory.max": "max", "cpu.max": "max 100000"}, None, None),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None, None),
        ({}, None, None),
    ],
    ids=["version 2", "version 1, over it", "none in 2", "none in 1", "no cgroup"],
)
def test_a_cgroup_limits_memory_and_cores(
    files: dict[str, str], memory_bytes: int | None, cores: float | None, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    free = read_limits(tmp_path / "nothing")
    limits = read_limits(tmp_path)
    if memory_bytes is None:
        assert limits.memory_bytes > 10_000
    else:
        assert limits.memory_bytes == memory_bytes
    assert limits.cores == (free.cores if cores is None else cores)


def test_a_limit_of_the_shell_is_seen() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**9, hard))
    try:
        assert read_limits().file_bytes == 10**9
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
