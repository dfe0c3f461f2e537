"""The comparison itself, against the one peer that needs nothing installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import train
from benchmarks.contestant import ContestantError, Ready
from benchmarks.peers import PEERS, Peer
from benchmarks.tasks import Task

READY = Ready(sizes=(2, 3), proof=(2.0, 1.5, 1.0), steps=4, start_s=0.1)


@pytest.mark.slow
def test_training_matches_the_jax_loop(
    digits: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, "absent", Peer("nowhere", ("no_such_package",), "not at all"))
    comparison = train.compare(digits(), ["jax_loop", "absent"], rounds=2, round_s=0.05)
    ours, peer = comparison.ready["ours"], comparison.ready["jax_loop"]
    assert ours.sizes == peer.sizes
    assert sum(ours.sizes) == 61_684
    # flax and optax on jax's own convolutions are what our step is held to here.
    np.testing.assert_allclose(ours.proof, peer.proof, rtol=1e-4)
    assert [len(rounds) for rounds in comparison.rounds.values()] == [2, 2]
    assert comparison.absent == {"absent": "not installed: no_such_package; pip install '.[bench]'"}
    text = train.report(comparison, "command")
    assert "| ours, dispatches alone |" in text
    assert "| jax_loop: flax and optax, one jitted step a dispatch |" in text
    assert "| absent | not installed: no_such_package" in text


def test_peer_with_a_different_network_is_refused() -> None:
    other = replace(READY, sizes=(2, 4))
    with pytest.raises(ContestantError, match="p has 6 parameters in 2 arrays, ours 5 in 2"):
        train._check_same("p", other, READY, 0.02)


def test_peer_with_different_training_is_refused() -> None:
    train._check_same("p", replace(READY, proof=(2.003, 1.5, 1.01)), READY, 0.02)
    with pytest.raises(ContestantError, match=r"2.0000, 1.5000, 1.0300 against 2.0000, 1.5000"):
        train._check_same("p", replace(READY, proof=(2.0, 1.5, 1.03)), READY, 0.02)
    with pytest.raises(ContestantError, match=r"2.0100, 1.5000, 1.0000 against 2.0000, 1.5000"):
        train._check_same("p", replace(READY, proof=(2.01, 1.5, 1.0)), READY, 0.02)


def test_peer_with_a_nan_loss_is_refused() -> None:
    with pytest.raises(ContestantError, match="trains something else"):
        train._check_same("p", replace(READY, proof=(2.0, 1.5, float("nan"))), READY, 0.02)


def test_unknown_peer_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--task", "mlp", "--peers", "torch,tourch"])
    with pytest.raises(SystemExit) as exited:
        train.main()
    assert exited.value.code == 2
    assert "no peer tourch; there are torch, torch_compile, keras" in capsys.readouterr().err


def test_missing_data_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--task", "mlp", "--root", "/nowhere"])
    assert train.main() != 0
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.train: ")
    assert "/nowhere" in error
