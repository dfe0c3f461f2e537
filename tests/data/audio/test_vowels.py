"""Vowels of the formula: their pitch and formants, and their files."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.audio import vowels
from pipeline.data.audio.vowels import RATE_HZ, WORDS, make_vowel, write_vowels


def test_vowel_is_a_pure_function_of_word_and_voice() -> None:
    sound = make_vowel("heed", 3)
    np.testing.assert_array_equal(sound, make_vowel("heed", 3))
    assert np.abs(sound).max() <= 1
    assert 0.25 * RATE_HZ <= len(sound) <= 0.45 * RATE_HZ
    assert len({len(make_vowel("heed", number)) for number in range(8)}) > 6


def test_energy_is_near_the_formants() -> None:
    """The first formant of heed is below 500 Hz, of hod above; the second the other way round."""

    def measure(word: str, low: float, high: float) -> float:
        shares = []
        for number in range(12):
            sound = make_vowel(word, number)
            power = np.abs(np.fft.rfft(sound)) ** 2
            hz = np.arange(len(power)) * RATE_HZ / len(sound)
            shares.append(power[(hz >= low) & (hz < high)].sum() / power.sum())
        return float(np.median(shares))

    assert measure("heed", 100, 500) > 2 * measure("hod", 100, 500)
    assert measure("hod", 600, 1500) > 3 * measure("heed", 600, 1500)


@pytest.mark.medium
def test_files_of_both_splits_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vowels, "COUNTS", {"train": 2, "eval": 1})
    write_vowels(tmp_path / "vowels")
    files = sorted((tmp_path / "vowels").rglob("*.wav"))
    assert len(files) == 3 * len(WORDS)
    with wave.open(str(tmp_path / "vowels/train/hid/001.wav"), "rb") as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE_HZ, 1, 2)
        numbers = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    expected = np.rint(make_vowel("hid", 3) * 32767)
    np.testing.assert_array_equal(numbers, expected)
