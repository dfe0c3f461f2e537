"""The user's sound files, in a folder for each class, and vowels made by a formula.

A vowel is a sum of a voice's harmonics, as loud as its formants let them. No one spoke it. Pitch
and formants of ten English vowels of men, women and children are means that Peterson and Barney
measured (Control methods used in a study of the vowels, Journal of the Acoustical Society of
America 24, 1952, table II).
"""

from __future__ import annotations

import os
import tempfile
import wave
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.errors import DataError
from pipeline.core.files.paths import Address
from pipeline.core.files.value_text import count_noun
from pipeline.core.registry import Location, component
from pipeline.data.audio import (
    KINDS,
    SUFFIXES,
    AudioFormat,
    Channels,
    Longer,
    Shorter,
    SoundHeader,
    read_header,
)
from pipeline.data.columns import DECODING_THREADS, LazyColumn, RawData, SampleUnit, Split, Targets
from pipeline.data.copies.download import lock_data_folder
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share
from pipeline.data.ops.series import LogMel
from pipeline.data.random import seed_words, uniforms
from pipeline.data.selections import Readable
from pipeline.data.sources.class_folders import FileKind, list_class_splits

SOUNDS = FileKind("sound", SUFFIXES, KINDS)
VOWELS = "vowels-1"
"""Folder of the vowels in the cache, with the number of their formula."""
MAX_SAMPLES = 2**28
"""The most values of a sample."""
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


@dataclass(frozen=True)
class AudioFiles(LazyColumn):
    """A column of sound, float32 (windows, length), read on demand."""

    paths: Sequence[str]
    """The file of each sample."""
    windows: np.ndarray
    """Number of the window in its file, int64 (n,)."""
    audio: AudioFormat

    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.paths), self.audio.length

    def sample(self, index: int) -> np.ndarray:
        return self.audio.read_window(Path(self.paths[index]), int(self.windows[index]))

    def sample_name(self, index: int) -> str:
        return self.paths[index]


@component("dataset")
class AudioFolder(DatasetSpec):
    """`train/<class>/*.wav` and `eval/<class>/*.wav`; eval may be called val or test.

    With `split`, there is only `<class>/*.wav`, and a share of the files is evaluated. Formats are
    WAV with whole numbers of 8 to 32 bits, and with the package soundfile other WAV files, FLAC and
    OGG. All files have the same sample rate. The names of the folders, sorted, are the classes.
    """

    content: ClassVar[str] = "sound"
    name: Literal["audio_folder"] = "audio_folder"
    root: Location | None
    """The folder with train and eval, or with the classes; null: the vowels of ten words in 1,100
    files, which a formula makes in the cache."""
    split: Share | None = None
    """The share of each class that is evaluated; null: all files of eval are."""
    split_seed: NonNegativeInt = 0
    """Seed of the split. It isn't `seed`, so runs with different seeds have the same split."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    samples: PositiveInt | None = None
    """The length of what the network reads, in seconds or in samples; one of both is required."""
    longer: Longer = "cut"
    """Handling of files that are longer. cut: their start is read. windows: they are read as
    windows one after the other. refuse: an error."""
    shorter: Shorter = "pad"
    """Handling of files that are shorter. pad: zeros follow. refuse: an error."""
    channels: Channels = "single"
    """single: files with several channels are refused; mono: the mean of the channels is read."""
    follow_links: bool = False
    """Whether links to files and folders outside `root` are read."""

    @model_validator(mode="after")
    def _require_one_length(self) -> Self:
        if (self.seconds is None) == (self.samples is None):
            raise ValueError(
                f"seconds = {self.seconds}, samples = {self.samples}: must set one of both, the "
                "length to which files are cut or padded"
            )
        if self.buckets is not None:
            raise ValueError("buckets: must be null; seconds or samples is the length of all sound")
        if self.longer == "windows" and self.folds is not None:
            raise ValueError(
                "folds: can't be combined with longer = windows, since windows of a file would be "
                "in several folds"
            )
        return self

    def read(self, cache: Path) -> RawData:
        """Return sound, float32 (n, T), decoded on demand, and classes, int32 (n,)."""
        root = self.root
        assert not isinstance(root, Address), "load copies addresses"
        if root is None:
            root = make_vowels_once(cache)
        within = None if self.follow_links else root.resolve()
        files = list_class_splits(root, SOUNDS, within, self.split, self.split_seed)
        headers = [
            read_headers(paths, may_be_damaged=any(isinstance(rule, Readable) for rule in select))
            for paths, select in zip(
                files.paths, (self.train.select, self.eval.select), strict=True
            )
        ]
        audio = self._choose_format(files.paths, headers)
        splits = []
        for paths, labels, split_headers in zip(files.paths, files.labels, headers, strict=True):
            counts = np.array(
                [
                    1 if header is None else audio.count_windows(header.frames)
                    for header in split_headers
                ]
            )
            rows = np.repeat(np.arange(len(paths)), counts)
            windows = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            column = AudioFiles([paths[row] for row in rows.tolist()], windows, audio)
            splits.append(Split({"audio": column, "label": labels[rows]}))
        train, evaluated = splits
        seconds = audio.length / audio.rate_hz
        unit = SampleUnit("sounds", "sounds", size=f"of {seconds:g} s at {audio.rate_hz:,} Hz")
        notes = (*files.notes, *_describe_lengths(headers, audio))
        targets = Targets(files.classes)
        return RawData(train, evaluated, targets, unit=unit, audio=audio, notes=notes)

    def _choose_format(
        self, paths: Sequence[Sequence[str]], headers: Sequence[Sequence[SoundHeader | None]]
    ) -> AudioFormat:
        """Return the format of the files. Raises DataError with a file of another rate or length,
        with several channels, or of another rate than a map op's."""
        read = [
            (Path(path), header)
            for split in zip(paths, headers, strict=True)
            for path, header in zip(*split, strict=True)
            if header is not None
        ]
        if not read:
            raise DataError(f"{self.root}: none of its files can be read as sound")
        first, header = read[0]
        length = self.samples or round((self.seconds or 0) * header.rate_hz)
        if not 1 <= length <= MAX_SAMPLES:
            key = "samples" if self.samples else "seconds"
            raise DataError(
                f"dataset.{key} = {getattr(self, key)}: {length:,} samples at "
                f"{header.rate_hz:,} Hz; must be 1 to {MAX_SAMPLES:,}"
            )
        audio = AudioFormat(header.rate_hz, length, self.channels, self.longer, self.shorter)
        for path, other in read:
            audio.require_fit(path, other, first)
        for key, ops in (("train", self.train.ops), ("eval", self.eval.ops)):
            for position, op in enumerate(ops):
                if isinstance(op, LogMel) and op.rate_hz != audio.rate_hz:
                    raise DataError(
                        f"{first}: has {audio.rate_hz:,} Hz, but dataset.{key}.ops.{position} "
                        f"(log_mel) rate_hz = {op.rate_hz}; must be equal"
                    )
        return audio


def make_vowels_once(cache: Path) -> Path:
    """Return the folder of the vowels in the cache, and make its files if they aren't there. One of
    several processes makes them. Raises DataError if they can't be written."""
    folder = cache / "audio" / VOWELS
    with lock_data_folder(folder.parent):
        if not folder.is_dir():
            with name_file(folder), tempfile.TemporaryDirectory(dir=folder.parent) as draft:
                write_vowels(Path(draft, VOWELS))
                os.replace(Path(draft, VOWELS), folder)
    return folder


def read_headers(paths: Sequence[str], *, may_be_damaged: bool) -> list[SoundHeader | None]:
    """Return the header of each file, read by several threads; None for one that can't be read.
    Unless files `may_be_damaged`, raises DataError with the first such file, and the number of
    other ones."""

    def read(path: str) -> SoundHeader | DataError:
        try:
            return read_header(Path(path))
        except DataError as error:
            return error

    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        results = list(pool.map(read, paths))
    errors = [result for result in results if isinstance(result, DataError)]
    if errors and not may_be_damaged:
        others = f"; nor can {len(errors) - 1:,} of the others" if len(errors) > 1 else ""
        raise DataError(f"{errors[0]}{others}") from errors[0]
    return [None if isinstance(result, DataError) else result for result in results]


def _describe_lengths(
    headers: Sequence[Sequence[SoundHeader | None]], audio: AudioFormat
) -> tuple[str, ...]:
    """Return a line about the files that are cut or padded; () if there are none."""
    frames = np.array([header.frames for split in headers for header in split if header])
    num_longer = int((frames > audio.length).sum())
    num_shorter = int((frames < audio.length).sum())
    ways = {"cut": "cut to it", "windows": "read as windows"}
    parts = []
    if num_longer:
        parts.append(f"{num_longer:,} longer, {ways[audio.longer]}")
    if num_shorter:
        parts.append(f"{num_shorter:,} shorter, padded with zeros")
    if not parts:
        return ()
    return (f"of {count_noun(len(frames), 'file')}, by length: {'; '.join(parts)}",)


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
