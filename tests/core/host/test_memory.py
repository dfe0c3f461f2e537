from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.host import memory
from pipeline.core.host.memory import list_control_groups


@pytest.fixture(autouse=True)
def _control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", Path("/groups"))
    monkeypatch.setattr(memory, "MEMBERSHIP", tmp_path / "member")


def _groups(membership: str, tmp_path: Path) -> list[str]:
    (tmp_path / "member").write_text(membership)
    return [str(folder) for folder in list_control_groups("memory")]


def test_cgroup_v2_ancestors_are_listed(tmp_path: Path) -> None:
    found = _groups("0::/slice/job/step_0\n", tmp_path)
    assert found[:4] == [
        "/groups/slice/job/step_0",
        "/groups/slice/job",
        "/groups/slice",
        "/groups",
    ]


def test_cgroup_v1_ancestors_are_listed_for_the_controller(tmp_path: Path) -> None:
    found = _groups("5:cpu,cpuacct:/other\n4:memory,hugetlb:/a/b\n1:name=systemd:/c\n", tmp_path)
    assert found == ["/groups/memory/a/b", "/groups/memory/a", "/groups/memory", "/groups"]


def test_hybrid_cgroup_layout_lists_both_versions(tmp_path: Path) -> None:
    """systemd's hybrid layout: version 2 below `unified`."""
    found = _groups("4:memory:/a\n0::/a:b\n", tmp_path)
    assert {"/groups/memory/a", "/groups/unified/a:b"} <= set(found)


@pytest.mark.parametrize("text", ["0::/../../elsewhere\n", "", "nonsense\n", "0::\n"])
def test_unknown_group_leaves_the_root(text: str, tmp_path: Path) -> None:
    found = _groups(text, tmp_path)
    assert {"/groups", "/groups/memory"} <= set(found)
    assert not any("elsewhere" in folder for folder in found)


def test_missing_group_file_leaves_the_root() -> None:
    assert list_control_groups("memory") == (Path("/groups"), Path("/groups/memory"))
