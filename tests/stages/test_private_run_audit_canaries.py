"""Audits of private runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.training.privacy import private_gradients
from tests.stages.test_private_run import MLP, RUN, SETTINGS, Compose
from tests.whole_run import run

pytest.importorskip("dp_accounting")


@pytest.mark.medium
def test_audit_bound_is_reported_with_the_upper_bound(
    tiny: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    privacy = f"+privacy={{{SETTINGS}, audit: {{canaries: 40}}}}"
    summary = run(tiny(*MLP, *RUN, privacy), tmp_path)
    audit = summary.privacy["audit"]
    assert audit["canaries"] == 40
    assert 0 <= audit["epsilon_at_least"] < summary.privacy["epsilon"]
    assert "privacy    audit: epsilon is at least" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["privacy"]["audit"] == audit


@pytest.mark.slow
def test_audit_refutes_a_run_without_noise(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Planted mistake: noise off."""
    monkeypatch.setattr(
        private_gradients, "draw_normals", lambda key, step, number, size: np.zeros(size)
    )
    privacy = (
        "+privacy={noise: 60.0, delta: 1.0e-3, expected_batch_size: 48, accountant: rdp,"
        " clip: 10.0, audit: {canaries: 48}}"
    )
    wide = ("model=mlp", "model.hidden=[256]", "train.optimizer.lr=0.1", "train.steps=300")
    summary = run(tiny(*wide, "train.batch_size=96", "cache.compiled=false", privacy), tmp_path)
    assert summary.privacy["audit"]["epsilon_at_least"] > summary.privacy["epsilon"]
    assert "the audit refutes the epsilon of this run" in capsys.readouterr().out
