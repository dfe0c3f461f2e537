"""The script for a GPU is valid, and its runs end in tables."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.gpu_tables import tables
from tests.conftest import ROOT

SUMMARY = {
    "status": "done",
    "steps": 300,
    "versions": {"device": "gpu:0 NVIDIA H200"},
    "time": {"median_step_ms": 1.25, "images_per_s": 102400.0, "compile_s": 20.0},
    "metrics": {"train_loss": 0.5},
}


def test_gpu_script_has_valid_syntax() -> None:
    checked = subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / "first_gpu.sh")], check=False)
    assert checked.returncode == 0


def test_gpu_tables_are_made_of_runs(tmp_path: Path) -> None:
    (tmp_path / "a1").mkdir()
    (tmp_path / "a1" / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "equal.txt").write_text("a1 and a2: the same\n")
    (tmp_path / "sink_mlp_auto.md").write_text("# t\n\n| sink | x |\n| --- | --- |\n| 1 | 2 |\n")
    text = tables(tmp_path)
    assert "| a1 | done | gpu:0 NVIDIA H200 | 300 | 1.250 | 102,400 | 20.0 | 0.5000 |" in text
    assert "* a1 and a2: the same" in text
    assert "sink_mlp_auto:\n\n| sink | x |" in text
