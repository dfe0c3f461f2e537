"""Predictions of a network with `loss=ctc`: the sequence, without repetitions and blanks."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.stages.export.prediction import compile_predict
from pipeline.stages.record.trained_run import read_trained_run
from tests.command_line import export, infer
from tests.whole_run import run

NETWORK = (
    "model.layers=[{name: conv, features: 8, kernel: [1, 4], padding: valid}, tokens,"
    "{name: dense, features: $classes}]"
)


def make_words(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of one to three of 3 symbols, each two bright positions and a dark one."""
    rng = np.random.default_rng(seed)
    positions = np.zeros((count, 12, 4), np.float32)
    symbols = np.zeros((count, 4), np.int64)
    for sample in range(count):
        word = rng.integers(1, 4, rng.integers(1, 4))
        symbols[sample, : len(word)] = word
        for place, symbol in enumerate(word):
            positions[sample, 3 * place : 3 * place + 2, symbol] = 1
    noise = 0.05 * rng.normal(size=positions.shape)
    return positions + noise.astype(np.float32), symbols


@pytest.mark.slow
def test_predictions_are_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (x_train, y_train), (x_test, y_test) = make_words(64, 0), make_words(16, 1)
    data = tmp_path / "words.npz"
    np.savez(data, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    overrides = [
        *("dataset=numpy", f"dataset.root={data}", "dataset.classes=4", "loss=ctc"),
        *("dataset.train.ops=[]", "dataset.eval.ops=[]", "model=layers", NETWORK),
        *("train.epochs=60", "train.batch_size=16", "optimizer=adam", "train.optimizer.lr=0.05"),
        *("schedule=constant", "train.sink_size=-1", "monitor.tensorboard=false"),
        f"cache.root={tmp_path / 'cache'}",
    ]
    run(load_recipe(overrides=overrides), tmp_path / "run")
    np.save(tmp_path / "new.npy", x_test)
    trained = read_trained_run(tmp_path / "run")
    logits = np.asarray(compile_predict(trained)(trained.arrays, x_test[..., None]))
    paths = logits.argmax(axis=-1).tolist()
    words = [[str(symbol) for symbol, _ in groupby(path) if symbol] for path in paths]
    assert len({*map(tuple, words)}) > 2
    command = [str(tmp_path / "run"), str(tmp_path / "new.npy")]
    capsys.readouterr()
    assert infer(command) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = [" ".join(word) or "no symbol" for word in words]
    assert [line.partition(": ")[2] for line in lines] == expected
    assert infer([*command, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["sequence"] for row in rows] == words
    assert infer([*command, f"--csv={tmp_path / 'new.csv'}"]) == 0
    assert (tmp_path / "new.csv").read_text().splitlines()[0] == "file,sequence"
    pytest.importorskip("onnx", reason="not installed: pip install '.[onnx]'")
    pytest.importorskip("onnxruntime", reason="not installed: pip install '.[onnx]'")
    assert export([str(tmp_path / "run"), str(tmp_path / "exported"), "--to", "onnx"]) == 0
    script = [sys.executable, str(tmp_path / "exported" / "predict.py"), "new.npy"]
    printed = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert printed.stdout.splitlines() == [
        f"new.npy[{row}]: {line}" for row, line in enumerate(expected)
    ]
