"""Log-mel spectrograms of librosa: log_mel.npz.

    python tests/golden/make_log_mel.py     with librosa 0.11.0, soundfile 0.14.0

`sound` is a sum of tones, noise and silence. The other keys are keys of `log_mel` as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import librosa
import numpy as np

FILE = Path(__file__).parent / "log_mel.npz"
RATE = 8000
CASES: list[dict[str, Any]] = [
    {"fft_size": 256, "hop": 80, "mels": 40},
    {"fft_size": 256, "hop": 80, "mels": 40, "scale": "htk", "norm": None},
    {"fft_size": 256, "hop": 100, "mels": 32, "window_size": 200, "log": "natural"},
    {"fft_size": 512, "hop": 128, "mels": 64, "scale": "htk", "center": False},
    {"fft_size": 300, "hop": 77, "mels": 24, "low_hz": 60.0, "high_hz": 3800.0, "power": 1},
    {"fft_size": 256, "hop": 256, "mels": 40, "power": 1, "log": "natural", "floor": 1e-5},
]
"""Keys of `log_mel` that differ from its defaults."""


def make_sound() -> np.ndarray:
    """Return two rows of 0.3 s, float32: tones that glide, then noise; the second half silent."""
    rng = np.random.default_rng(5)
    seconds = np.arange(int(0.3 * RATE)) / RATE
    glide = 0.5 * np.sin(2 * np.pi * (300 + 2500 * seconds) * seconds)
    chord = sum(0.2 * np.sin(2 * np.pi * hz * seconds) for hz in (110.0, 900.0, 3100.0))
    noise = 0.05 * rng.standard_normal(len(seconds))
    second = chord + noise
    second[len(seconds) // 2 :] = 0
    return np.stack([glide + noise, second]).astype(np.float32)


def spectrogram(sound: np.ndarray, case: dict[str, Any]) -> np.ndarray:
    """Return librosa's logarithms (batch, frames, mels), float32."""
    power = case.get("power", 2)
    floor = case.get("floor", 1e-10)
    mels = librosa.feature.melspectrogram(
        y=sound,
        sr=RATE,
        n_fft=case["fft_size"],
        hop_length=case["hop"],
        win_length=case.get("window_size"),
        window="hann",
        center=case.get("center", True),
        pad_mode="constant",
        power=float(power),
        n_mels=case["mels"],
        fmin=case.get("low_hz", 0.0),
        fmax=case.get("high_hz"),
        htk=case.get("scale") == "htk",
        norm=case.get("norm", "slaney"),
    )
    if case.get("log") == "natural":
        logs = np.log(np.maximum(mels, floor))
    elif power == 2:
        logs = librosa.power_to_db(mels, ref=1.0, amin=floor, top_db=None)
    else:
        logs = librosa.amplitude_to_db(mels, ref=1.0, amin=floor, top_db=None)
    return np.swapaxes(logs, 1, 2).astype(np.float32)


def main() -> None:
    sound = make_sound()
    made = {json.dumps(case): spectrogram(sound, case) for case in CASES}
    np.savez_compressed(FILE, sound=sound, **made)


if __name__ == "__main__":
    main()
