"""WAV files for tests."""

from __future__ import annotations

import wave
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def save_wav(path: Path, numbers: np.ndarray, rate_hz: int = 8000, sample_bytes: int = 2) -> Path:
    """Save whole numbers (n,) or (n, channels) as PCM of so many bytes a sample; return the path.
    Numbers of one byte are 0 to 255."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = numbers if numbers.ndim > 1 else numbers[:, np.newaxis]
    content = frames.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :sample_bytes]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(frames.shape[1])
        file.setsampwidth(sample_bytes)
        file.setframerate(rate_hz)
        file.writeframes(content.tobytes())
    return path


def save_tones(root: Path, counts: Mapping[str, int], length: int = 400) -> Path:
    """Save so many noisy tones of two classes in each split, at 8,000 Hz; return the root."""
    rng = np.random.default_rng(0)
    for split, count in counts.items():
        for name, hz in (("high", 1500), ("low", 400)):
            for number in range(count):
                tone = np.sin(2 * np.pi * (hz * np.arange(length) / 8000 + rng.random()))
                sound = 6000 * tone + 2000 * rng.standard_normal(length)
                save_wav(root / split / name / f"{number:02}.wav", sound.astype(np.int64))
    return root
