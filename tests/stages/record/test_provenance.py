from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError
from pipeline.stages.record.environment import describe_code, describe_settings
from pipeline.stages.record.provenance import Provenance, add_provenance, read_provenance
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]

PLAIN = Provenance("2026-11-21T12:00:00+00:00", "pipeline", "/", 1, {}, {}, {}, {}, {})


@pytest.mark.slow
def test_run_records_its_provenance(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny("stages=[data]", "seed=7")
    run(recipe, tmp_path)
    (process,) = read_provenance(tmp_path)
    assert process["seed"] == 7
    assert process["folder"] == os.getcwd()
    assert process["command"].split()[0] == sys.orig_argv[0]
    assert process["code"] == describe_code()
    assert process["versions"] == outcome.read_summary(tmp_path)["versions"]
    machine = process["machine"]
    assert (machine["host"], machine["device"]) == (platform.node(), "cpu:0 cpu")
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_bytes"] > 1e8
    assert machine["processor"]


@pytest.mark.medium
def test_data_is_identified_by_its_samples(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny("stages=[data]")
    run(recipe, tmp_path)
    data = read_provenance(tmp_path)[0]["data"]
    raw = recipe.dataset.read(tmp_path)
    for name, split in (("train", raw.train), ("eval", raw.eval)):
        for column in ("image", "label"):
            values = split.columns[column][:]
            assert data[name][column]["sha256"] == hashlib.sha256(values.tobytes()).hexdigest()
            assert data[name][column]["shape"] == list(values.shape)


def test_every_process_of_a_run_is_recorded(tmp_path: Path) -> None:
    add_provenance(tmp_path, PLAIN)
    add_provenance(tmp_path, PLAIN)
    assert len(read_provenance(tmp_path)) == 2


def test_damaged_file_is_reported_and_does_not_block_a_run(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"processes": 1}', '{"processes": [1]}'):
        (tmp_path / "provenance.json").write_text(text)
        with pytest.raises(
            DataError, match=r"provenance\.json: .*; delete it to continue without it"
        ):
            read_provenance(tmp_path)
        add_provenance(tmp_path, PLAIN)
        assert len(read_provenance(tmp_path)) == 1
    (tmp_path / "provenance.json").write_text("[]")
    with pytest.raises(
        DataError, match="must hold a list of processes; delete it to continue without it"
    ):
        read_provenance(tmp_path)


def test_old_run_has_no_provenance(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) == []


def test_only_relevant_environment_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No secrets get into a run directory."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    monkeypatch.setenv("MY_TOKEN", "secret")
    settings = describe_settings()
    assert settings["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true"
    assert "secret" not in json.dumps(settings)
