"""Which engines are trusted, and what timings are valid for."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from pipeline.models.lowerings.tune import machine
from pipeline.models.lowerings.tune.machine import (
    ONEDNN_LIMIT,
    describe_device,
    find_engines,
    list_scopes,
)
from tests.models.lowerings.tune.made_up import BOTH, XLA

CPU = jax.devices("cpu")[0]
GPU: Any = SimpleNamespace(platform="gpu", device_kind="made up")


def set_cpu_flags(monkeypatch: pytest.MonkeyPatch, flags: Iterable[str]) -> None:
    """Have the system describe a processor with other instruction sets."""
    read_text = Path.read_text

    def read(path: Path, *args: Any, **options: Any) -> str:
        if path == Path("/proc/cpuinfo"):
            return f"processor : 0\nflags : {' '.join(flags)}\n\n"
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)


class Probe:
    """Stands in for the process that asks oneDNN: how it ends, and how often it was begun."""

    def __init__(self, end: int | Exception) -> None:
        self.end = end
        self.limited_end = end
        self.begun: list[tuple[list[str], dict[str, Any]]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        self.begun.append((command, options))
        end = self.limited_end if ONEDNN_LIMIT in options["env"] else self.end
        if isinstance(end, Exception):
            raise end
        return subprocess.CompletedProcess(command, end)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    """On a machine that may have oneDNN, whatever this one is, and under no limit; it passes unless
    told otherwise."""
    made_up = Probe(0)
    monkeypatch.delenv(ONEDNN_LIMIT, raising=False)
    monkeypatch.setattr(machine.subprocess, "run", made_up)
    monkeypatch.setattr(machine, "is_library_installed", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine.sys, "platform", "linux")
    return made_up


def test_onednn_is_used_if_its_probe_passes(probe: Probe, tmp_path: Path) -> None:
    assert find_engines(CPU, "float32", tmp_path / "new") == BOTH
    ((command, options),) = probe.begun
    assert command[1:] == [
        "-c",
        "from pipeline.models.lowerings.formulas.onednn import probe; probe('float32')",
    ]
    assert options["env"] == {**os.environ, "JAX_PLATFORMS": "cpu"}
    assert options["timeout"] > 0


@pytest.mark.parametrize("status", [-4, -6, 1])
def test_onednn_is_not_used_if_its_probe_fails(status: int, probe: Probe, tmp_path: Path) -> None:
    """Killed by a signal, or by an assertion that did not hold."""
    probe.end = status
    assert find_engines(CPU, "float32", tmp_path) == XLA


def test_onednn_is_not_used_if_its_probe_times_out(probe: Probe, tmp_path: Path) -> None:
    probe.end = subprocess.TimeoutExpired("python", machine.PROBE_TIMEOUT_S)
    assert find_engines(CPU, "float32", tmp_path) == XLA


@pytest.mark.parametrize(("status", "engines"), [(0, BOTH), (-4, XLA)])
def test_result_of_a_probe_is_cached(
    status: int, engines: frozenset[str], probe: Probe, tmp_path: Path
) -> None:
    probe.end = status
    for _ in range(3):
        assert find_engines(CPU, "float32", tmp_path) == engines
    assert len(probe.begun) == 1


def test_every_type_and_version_is_probed_separately(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_engines(CPU, "float32", tmp_path) == BOTH
    probe.end = -4
    assert find_engines(CPU, "bfloat16", tmp_path) == XLA
    version = machine.jaxlib.__version__
    monkeypatch.setattr(machine.jaxlib, "__version__", "99.0")
    assert find_engines(CPU, "float32", tmp_path) == XLA
    assert len(probe.begun) == 3
    monkeypatch.setattr(machine.jaxlib, "__version__", version)
    assert find_engines(CPU, "float32", tmp_path) == BOTH


def test_another_processor_is_probed_separately(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a home directory is shared by machines."""
    find_engines(CPU, "float32", tmp_path)
    set_cpu_flags(monkeypatch, {"of_another_kind", "avx2"})
    before = describe_device(CPU)
    set_cpu_flags(monkeypatch, {"avx512f"})
    assert describe_device(CPU) != before
    find_engines(CPU, "float32", tmp_path)
    assert len(probe.begun) == 2


def test_onednn_is_probed_again_under_a_limit(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual machine may report AMX and no size of its tiles: oneDNN ends by SIGILL."""
    probe.end, probe.limited_end = -4, 0
    assert find_engines(CPU, "bfloat16", tmp_path) == XLA
    monkeypatch.setenv(ONEDNN_LIMIT, "AVX512_CORE_BF16")
    assert find_engines(CPU, "bfloat16", tmp_path) == BOTH
    monkeypatch.delenv(ONEDNN_LIMIT)
    assert find_engines(CPU, "bfloat16", tmp_path) == XLA
    assert len(probe.begun) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff\xfe"])
def test_unreadable_engines_file_is_replaced_after_a_new_probe(
    content: bytes, probe: Probe, tmp_path: Path
) -> None:
    file = tmp_path / "engines.json"
    file.write_bytes(content)
    assert find_engines(CPU, "float32", tmp_path) == BOTH
    assert list(json.loads(file.read_text()).values()) == [True]
    assert find_engines(CPU, "float32", tmp_path) == BOTH
    assert len(probe.begun) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("machine", "aarch64"), ("system", "darwin"), ("device", GPU)]
)
def test_onednn_is_not_probed_if_absent(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(platform, "machine", lambda: value if name == "machine" else "x86_64")
    monkeypatch.setattr(machine.sys, "platform", value if name == "system" else "linux")
    assert find_engines(value if name == "device" else CPU, "float32", tmp_path) == XLA


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ({"sse2", "avx2", "avx512f", "avx512_bf16", "amx_bf16"}, "amx_bf16"),
        ({"avx2", "avx512f", "avx512_bf16"}, "avx512_bf16"),
        ({"avx2", "avx512f"}, "avx512f"),
        ({"sse2", "avx2"}, "avx2"),
        (set(), "made_up64"),
    ],
)
def test_timings_are_scoped_by_instruction_set_and_cores(
    flags: set[str], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cpu_flags(monkeypatch, flags)
    monkeypatch.setattr(platform, "machine", lambda: "made_up64")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert describe_device(CPU) == f"cpu {level} x3"
    known = [each for each in machine._LEVELS if each in flags] or [level]
    assert list_scopes(CPU) == tuple(f"cpu {each} x3" for each in known)


def test_timings_on_an_accelerator_are_scoped_by_device_kind() -> None:
    assert describe_device(GPU) == "gpu made up"
    assert list_scopes(GPU) == ("gpu made up",)
