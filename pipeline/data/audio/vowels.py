"""Vowels made by a formula: sums of a voice's harmonics, as loud as a vowel's formants let them.

No one spoke them. Pitch and formants of ten English vowels of men, women and children are means
that Peterson and Barney measured (Control methods used in a study of the vowels, Journal of the
Acoustical Society of America 24, 1952, table II).
"""

from __future__ import annotations

import wave
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from pipeline.data.random import seed_words, uniforms

RATE_HZ = 8000
WORDS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "heed": ((136, 270, 2290, 3010), (235, 310, 2790, 3310), (272, 370, 3200, 3730)),
    "hid": ((135, 390, 1990, 2550), (232, 430, 2480, 3070), (269, 530, 2730, 3600)),
    "head": ((130, 530, 1840, 2480), (223, 610, 2330, 2990), (260, 690, 2610, 3570)),
    "had": ((127, 660, 1720, 2410), (210, 860, 2050, 2850), (251, 1010, 2320, 3320)),
    "hod": ((124, 730, 1090, 2440), (212, 850, 1220, 2810), (256, 1030, 1370, 3170)),
    "hawed": ((129, 570, 840, 2410), (216, 590, 920, 2710), (263, 680, 1060, 3180)),
    "hood": ((137, 440, 1020, 2240), (232, 470, 1160, 2680), (276, 560, 1410, 3310)),
    "whod": ((141, 300, 870, 2240), (231, 370, 950, 2670), (274, 430, 1170, 3260)),
    "hud": ((130, 640, 1190, 2390), (221, 760, 1400, 2780), (261, 850, 1590, 3360)),
    "heard": ((133, 490, 1350, 1690), (218, 500, 1640, 1960), (261, 560, 1820, 2160)),
}
"""Pitch and three formants in Hz of a man, a woman and a child, by the word with the vowel."""
COUNTS: Mapping[str, int] = {"train": 80, "eval": 30}
"""Files of each word in a split."""
SPREAD = 0.07
"""Standard deviation of a formant, as a share of its mean."""
_BANDWIDTHS_HZ = (60.0, 90.0, 150.0)
"""Widths of the resonances of the formants."""
_SEED = 1952
_DRAWS = 12


def write_vowels(folder: Path) -> None:
    """Write the files of all words and splits as WAV files of 16 bits, <split>/<word>/<number>.wav,
    the same in every run. Raises OSError if one can't be written."""
    for file, sound in make_vowels():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(RATE_HZ)
            out.writeframes(np.rint(sound * 32767).astype("<i2").tobytes())


def make_vowels() -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name of each file and its sound, float64 (n,) in [-1, 1] of 0.25 to 0.45 s."""
    number = 0
    for split, count in COUNTS.items():
        for word in WORDS:
            for index in range(count):
                yield f"{split}/{word}/{index:03}.wav", make_vowel(word, number)
                number += 1


def make_vowel(word: str, number: int) -> np.ndarray:
    """Return the sound of a word's vowel by voice `number`, float64 (n,), a pure function of both.

    Speaker, pitch, formants, length, loudness and noise are drawn. The vowel starts after a
    silence, and swells and fades.
    """
    draws = _draw(number, 0, _DRAWS)
    pitch_hz, *formants_hz = WORDS[word][int(draws[0] * 3)]
    pitch_hz *= 1 + 0.3 * (draws[1] - 0.5)
    # Three uniforms have a standard deviation of 1/2.
    deviations = draws[2:11].reshape(3, 3).sum(axis=1) - 1.5
    formants_hz = np.array(formants_hz) * (1 + 2 * SPREAD * deviations)
    length = int(RATE_HZ * (0.25 + 0.2 * draws[11]))
    shape = _draw(number, 1, 3)
    seconds = np.arange(length) / RATE_HZ
    # The pitch glides by up to 10 %.
    phase = 2 * np.pi * pitch_hz * (seconds + 0.1 * (shape[0] - 0.5) * seconds**2 / seconds[-1])
    harmonics = np.arange(1, int(0.47 * RATE_HZ / pitch_hz) + 1)
    gains = _compute_gains(harmonics * pitch_hz, formants_hz) / harmonics
    voice = gains @ np.sin(harmonics[:, None] * phase)
    start = int(0.3 * shape[1] * length)
    swell = np.clip((np.arange(length) - start) / (0.03 * RATE_HZ), 0, 1)
    voice *= swell * np.clip((length - np.arange(length)) / (0.06 * RATE_HZ), 0, 1)
    voice /= np.abs(voice).max()
    noise = _draw(number, 2, length) + _draw(number, 3, length) - 1
    loudness = 0.2 + 0.6 * shape[2]
    return np.asarray(np.clip(loudness * (voice + 0.2 * noise), -1, 1))


def _compute_gains(hz: np.ndarray, formants_hz: np.ndarray) -> np.ndarray:
    """Return the gain of frequencies (n,) in a row of resonators at the formants, (n,)."""
    gains = np.ones(len(hz))
    for formant_hz, width_hz in zip(formants_hz, _BANDWIDTHS_HZ, strict=True):
        square = formant_hz**2 + (width_hz / 2) ** 2
        below = np.hypot(width_hz / 2, hz - formant_hz)
        above = np.hypot(width_hz / 2, hz + formant_hz)
        gains *= square / (below * above)
    return gains


def _draw(number: int, stream: int, draws: int) -> np.ndarray:
    """Return uniform numbers in [0, 1) of a voice, float64 (draws,)."""
    rows = uniforms(np, seed_words(_SEED), np.int32(0), np.array([number]), stream, draws)
    return rows[0].astype(np.float64)
