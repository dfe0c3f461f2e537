"""Runs on sound: any sink, resumed, on two devices, evaluated, exported, predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import Trainer, load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.inspect.report.evaluated import evaluate_samples
from pipeline.stages.data import load_data
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.record.trained_run import read_trained_run
from tests import outcome
from tests.command_line import convert_records, export, infer, report
from tests.sound_files import save_tones, save_wav
from tests.whole_run import run


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tones(tmp_path_factory.mktemp("tones") / "data", {"train": 20, "eval": 6})


def compose_tones(cache: Path, tones: Path, *overrides: str) -> Recipe:
    settings = [
        f"dataset.root={tones}",
        "dataset.seconds=0.06",
        "model.layers=[{name: conv, features: 4, kernel: 3},relu,flatten,"
        "{name: dense, features: $classes}]",
        "train.batch_size=8",
        "train.epochs=2",
        "train.sink_size=7",
        "eval.every_epochs=1",
        "checkpoint.every_steps=5",
    ]
    return load_recipe("audio_vowels", [*settings, f"cache.root={cache}", *overrides])


@pytest.fixture(scope="module")
def trained(cache: Path, tones: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert run(compose_tones(cache, tones), run_dir).metrics["accuracy"] == 1
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("sink_size", [1, -1])
def test_any_sink_has_the_same_bits(
    sink_size: int, trained: Path, cache: Path, tones: Path, tmp_path: Path
) -> None:
    run(compose_tones(cache, tones, f"train.sink_size={sink_size}"), tmp_path)
    outcome.assert_same_run(tmp_path, trained)


@pytest.mark.slow
def test_resumed_run_has_the_same_bits(
    trained: Path, cache: Path, tones: Path, tmp_path: Path
) -> None:
    run(compose_tones(cache, tones, "train.end_step=5"), tmp_path)
    assert outcome.checkpoints(tmp_path) == [5]
    run(compose_tones(cache, tones, f"train.resume={tmp_path}"), tmp_path)
    outcome.assert_same_run(tmp_path, trained)


@pytest.mark.slow
def test_one_and_two_devices_have_the_same_bits(cache: Path, tones: Path, tmp_path: Path) -> None:
    for devices in (1, 2):
        parallel = ["parallel.mode=data", f"parallel.devices={devices}"]
        run(compose_tones(cache, tones, *parallel), tmp_path / str(devices))
    outcome.assert_same_run(tmp_path / "2", tmp_path / "1")


@pytest.mark.slow
def test_streamed_sound_has_the_same_bits(
    trained: Path, cache: Path, tones: Path, tmp_path: Path
) -> None:
    run(compose_tones(cache, tones, "train.feed=stream"), tmp_path)
    outcome.assert_same_run(tmp_path, trained)


def predict(source: Path, *files: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert infer([str(source), *map(str, files), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_wav_files_are_predicted_by_a_run_and_its_exports(
    trained: Path, tones: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, by the script beside an ONNX file, and by the network."""
    target = tmp_path / "exported"
    assert export([str(trained), str(target), "--to", "onnx"]) == 0
    assert "accuracy 1.0000" in capsys.readouterr().out
    by_run = predict(trained, tones / "eval", capsys=capsys)
    assert [row["class"] for row in by_run] == ["high"] * 6 + ["low"] * 6
    assert predict(target, tones / "eval", capsys=capsys) == by_run
    script = [sys.executable, str(target / "predict.py"), str(tones / "eval")]
    lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == [f"{row['file']}: {row['class']} {row['probability']:.4f}" for row in by_run]
    own = read_trained_run(trained)
    assert own.samples.audio is not None
    sound = own.samples.audio.read_windows(tones / "eval/high/00.wav")
    logits = np.asarray(make_predict(own)(own.arrays, sound))
    assert logits.argmax(-1).tolist() == [0]


@pytest.mark.slow
def test_windows_of_a_file_are_predicted(
    cache: Path, tones: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of two tones, one after the other, and a part of a window."""
    keys = ("dataset.seconds=0.025", "dataset.longer=windows")
    run(compose_tones(cache, tones, *keys), tmp_path / "run")
    tone = np.sin(np.arange(700) * np.where(np.arange(700) < 200, 1500, 400) / 8000 * 2 * np.pi)
    file = save_wav(tmp_path / "new.wav", (6000 * tone).astype(int))
    rows = predict(tmp_path / "run", file, capsys=capsys)
    assert [row["file"] for row in rows] == [f"{file}[{number}]" for number in range(3)]
    assert [row["class"] for row in rows] == ["high", "low", "low"]
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), "--to", "onnx"]) == 0
    script = [sys.executable, str(tmp_path / "out/predict.py"), str(file)]
    lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["high", "low", "low"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate_hz": 16000}, r"new.wav: has 16,000 Hz, but the network was trained on 8,000 Hz"),
        ({"numbers": np.ones((9, 2))}, r"new.wav: has 2 channels; must have one, unless"),
        ({"numbers": np.ones((0, 1))}, r"new.wav: can't be read as sound: it has no samples"),
    ],
)
def test_file_that_does_not_fit_is_not_predicted(
    change: dict[str, Any], message: str, trained: Path, tmp_path: Path
) -> None:
    save_wav(tmp_path / "new.wav", **{"numbers": np.ones(9), **change})
    with pytest.raises(DataError, match=message):
        infer([str(trained), str(tmp_path / "new.wav")])


@pytest.mark.slow
def test_other_inputs_are_refused(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"a.png: must end in one of .wav, .flac, .ogg, .npy, .npz"):
        infer([str(trained), str(tmp_path / "a.png")])
    with pytest.raises(DataError, match=r"holds no sounds; names must end in one of .wav"):
        infer([str(trained), str(tmp_path)])


@pytest.mark.slow
def test_report_lists_the_metrics(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report([str(trained), "--out", str(tmp_path / "report")]) == 0
    assert "accuracy 1.0000" in capsys.readouterr().out


@pytest.mark.slow
def test_data_of_another_rate_is_not_evaluated(trained: Path) -> None:
    own = read_trained_run(trained)
    assert own.samples.audio is not None
    audio = replace(own.samples.audio, rate_hz=16000)
    other = replace(own, samples=replace(own.samples, audio=audio))
    with pytest.raises(DataError, match="sample rates; must have those on which the run was"):
        evaluate_samples(other, load_data(own.recipe))


@pytest.mark.medium
def test_records_do_not_hold_sound(cache: Path, tones: Path, tmp_path: Path) -> None:
    keys = ["+recipe=audio_vowels", f"dataset.root={tones}", f"cache.root={cache}"]
    with pytest.raises(RecipeError, match="records can't hold the sample rate of sound"):
        convert_records([str(tmp_path / "out"), *keys])


@pytest.mark.slow
def test_trainer_predicts_sound(cache: Path, tones: Path, tmp_path: Path) -> None:
    trainer = Trainer(compose_tones(cache, tones), run_dir=tmp_path / "run")
    trainer.fit()
    sound = np.asarray(trainer.dataset.eval.columns["audio"][:4])
    assert np.asarray(trainer.predict(sound)).argmax(-1).tolist() == [0] * 4
