from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import format_json
from pipeline.stages.record.continuity import (
    compare_settings,
    require_same_origin,
)
from pipeline.stages.record.provenance import Provenance, describe_numerics, read_provenance
from pipeline.stages.record.run_record import compare_origins, read_record
from tests.conftest import MLP, TINY

NUMERICS = {"threefry_partitionable": True, "default_matmul_precision": None}


def process(settings: Mapping[str, str], **numerics: Any) -> Provenance:
    about = "2026-11-25T12:00:00+00:00", "pipeline", "/", 1, {}, {}, {}
    return Provenance(*about, settings, {}, numerics={**NUMERICS, **numerics})


def compare(settings: Any, now: Provenance, **numerics: Any) -> tuple[list[str], list[str]]:
    return compare_settings([{"settings": settings, "numerics": {**NUMERICS, **numerics}}], now)


def test_equal_settings_are_not_a_change() -> None:
    settings = {"XLA_FLAGS": "--xla_a=1 --xla_b", "OMP_NUM_THREADS": "2"}
    now = process({**settings, "XLA_FLAGS": "--xla_b=true  --xla_a=0 --xla_a=1"})
    assert compare(settings, now) == ([], [])


def test_decisive_settings_are_distinguished_from_harmless_settings() -> None:
    before = {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2", "JAX_PLATFORMS": "cpu"}
    flags = "--xla_dump_to=x --xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math"
    now = process(
        {
            "XLA_FLAGS": flags,
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ONEDNN_VERBOSE": "1",
            "OMP_NUM_THREADS": "3",
            "JAX_THREEFRY_PARTITIONABLE": "0",
        },
        threefry_partitionable=False,
    )
    decisive, harmless = compare(before, now)
    assert sorted(decisive) == [
        "--xla_cpu_enable_fast_math: was not set, is true",
        "--xla_cpu_max_isa: was AVX2, is not set",
        "ONEDNN_MAX_CPU_ISA: was not set, is AVX2",
        "jax_threefry_partitionable: was True, is False",
    ]
    assert sorted(harmless) == [
        "JAX_PLATFORMS: was cpu, is not set",
        "OMP_NUM_THREADS: was not set, is 3",
        "ONEDNN_VERBOSE: was not set, is 1",
    ]


def test_run_without_recorded_settings_is_not_compared() -> None:
    now = process({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"})
    for before in ([], [{"settings": {}}], [{"numerics": 7}]):
        assert compare_settings(before, now) == ([], [])


def test_settings_of_another_version_are_not_compared() -> None:
    assert compare({}, process({}, new_setting=1), old_setting=2) == ([], [])


@pytest.mark.parametrize(
    "settings", [None, 7, {"XLA_FLAGS": 7}, {"XLA_FLAGS": "'"}, {"\x1b": ["\n"]}]
)
def test_untrusted_settings_are_printed_safely(settings: Any) -> None:
    decisive, harmless = compare(settings, process({}), threefry_partitionable=["\x1b" * 1000])
    lines = [*decisive, *harmless]
    assert lines
    assert "".join(lines).isprintable()
    assert all(len(line) < 500 for line in lines)
    _, many = compare({f"JAX_{number}": "" for number in range(100)}, process({}))
    assert (len(many), many[-1]) == (9, "92 more")


def test_jax_settings_are_read_from_this_process() -> None:
    before = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", "bfloat16")
    try:
        assert describe_numerics()["default_matmul_precision"] == "bfloat16"
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    format_json(describe_numerics())


def write(run_dir: Path, now: Provenance, **changed: Any) -> None:
    run_dir.mkdir(exist_ok=True)
    kept = {"settings": now.settings, "numerics": now.numerics, **changed}
    (run_dir / "provenance.json").write_text(format_json({"processes": [kept]}))


def test_changed_settings_are_refused_unless_allowed(tmp_path: Path) -> None:
    now = process({"OMP_NUM_THREADS": "1"})
    write(tmp_path, now, numerics={**NUMERICS, "threefry_partitionable": False}, settings={})
    with pytest.raises(DataError) as caught:
        require_same_origin(tmp_path, now, "refuse", pytest.fail)
    what = "settings that decide numbers have changed since the run was trained"
    line = "jax_threefry_partitionable: was False, is True"
    assert str(caught.value).splitlines() == [
        f"{tmp_path}: {what}:",
        f"  {line}",
        "Restore them, or continue with these: train.resume_changed=allow",
    ]
    warned: list[str] = []
    require_same_origin(tmp_path, now, "allow", warned.append)
    assert warned == [
        f"{tmp_path}: {what}, and train.resume_changed=allow: {line}",
        f"{tmp_path}: continues with other settings: OMP_NUM_THREADS: was not set, is 1",
    ]


def test_runs_are_compared_by_settings_both_recorded(tmp_path: Path) -> None:
    now = process({})
    write(tmp_path / "a", now)
    write(tmp_path / "b", now, numerics={**NUMERICS, "threefry_partitionable": False})
    for name in ("a", "b"):
        (tmp_path / name / "recipe.yaml").write_text("name: x\n")
    a, b = (read_record(tmp_path / name) for name in ("a", "b"))
    changed = compare_origins(a, b)["environment"]
    assert changed is not None
    assert [difference.key for difference in changed] == ["numerics.threefry_partitionable"]


@pytest.mark.slow
def test_resume_with_changed_settings_is_refused(
    command: Any, forked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = [*TINY, *MLP, "train.steps=12", "hydra.run.dir=a"]
    assert forked(base).returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    monkeypatch.setenv("JAX_THREEFRY_PARTITIONABLE", "0")
    resume = [*TINY, *MLP, "train.steps=18", "train.resume=a"]
    refused = command(resume)
    assert refused.returncode == 2
    assert "--xla_cpu_enable_fast_math: was not set, is true" in refused.stderr
    assert "jax_threefry_partitionable: was True, is False" in refused.stderr
    assert {path: path.read_bytes() for path in before} == before
    allowed = command([*resume, "train.resume_changed=allow"])
    assert allowed.returncode == 0, allowed.stderr
    assert len(read_provenance(tmp_path / "a")) == 2
