from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.audio import AudioFormat, SoundHeader, parse_audio_format
from tests.sound_files import save_wav

RAMP = np.arange(1, 8) * 2**10


def test_longer_file_is_cut_and_shorter_one_padded(tmp_path: Path) -> None:
    path = save_wav(tmp_path / "a.wav", RAMP)
    cut = AudioFormat(8000, 4).read_windows(path)
    assert (cut * 2**5).tolist() == [[1, 2, 3, 4]]
    padded = AudioFormat(8000, 9).read_windows(path)
    assert (padded * 2**5).tolist() == [[1, 2, 3, 4, 5, 6, 7, 0, 0]]
    assert padded.dtype == np.float32


def test_windows_follow_each_other(tmp_path: Path) -> None:
    path = save_wav(tmp_path / "a.wav", RAMP)
    windows = AudioFormat(8000, 3, longer="windows").read_windows(path)
    assert (windows * 2**5).tolist() == [[1, 2, 3], [4, 5, 6]]
    padded = AudioFormat(8000, 9, longer="windows").read_windows(path)
    assert padded.shape == (1, 9)


def test_mean_of_channels_is_read(tmp_path: Path) -> None:
    path = save_wav(tmp_path / "a.wav", np.array([[0, 2**14], [2**14, -(2**14)]]))
    assert AudioFormat(8000, 2, channels="mono").read_windows(path).tolist() == [[0.25, 0]]


@pytest.mark.parametrize(
    ("audio", "header", "message"),
    [
        (AudioFormat(8000, 9), SoundHeader(16000, 1, 9), "a.wav: has 16,000 Hz, but the network"),
        (AudioFormat(8000, 9), SoundHeader(8000, 2, 9), "a.wav: has 2 channels; must have one"),
        (
            AudioFormat(8000, 9, longer="refuse"),
            SoundHeader(8000, 1, 10),
            "a.wav: has 10 samples, more than 9; dataset.longer=cut or windows reads it",
        ),
        (
            AudioFormat(8000, 9, shorter="refuse"),
            SoundHeader(8000, 1, 8),
            "a.wav: has 8 samples, fewer than 9; dataset.shorter=pad reads it",
        ),
    ],
)
def test_file_of_another_format_is_refused(
    audio: AudioFormat, header: SoundHeader, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        audio.require_fit(Path("a.wav"), header)


def test_format_is_read_from_its_record() -> None:
    audio = AudioFormat(8000, 9, "mono", "windows", "refuse")
    assert parse_audio_format({"audio": audio.to_dict()}) == audio
    assert parse_audio_format({}) is None


@pytest.mark.parametrize(
    "changes",
    [{"rate_hz": 0}, {"length": "9"}, {"longer": "stretch"}, {"channels": 2}],
)
def test_invalid_record_is_refused(changes: dict[str, Any]) -> None:
    tree = AudioFormat(8000, 9).to_dict() | changes
    with pytest.raises(ValueError, match="audio must have the rate and the length of sound"):
        AudioFormat.parse(tree)
