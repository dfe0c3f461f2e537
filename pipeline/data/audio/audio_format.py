"""The format of sound that a network reads, and how files are fit to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from pipeline.core.errors import DataError
from pipeline.data.audio.sound_file import SoundHeader, read_header, read_sound

Longer = Literal["refuse", "cut", "windows"]
Shorter = Literal["refuse", "pad"]
Channels = Literal["single", "mono"]


@dataclass(frozen=True)
class AudioFormat:
    """Rate and length of samples, and what is done with files of other lengths or channels."""

    rate_hz: int
    length: int
    """Values of a sample."""
    channels: Channels = "single"
    """single: files must have one channel; mono: the mean of a file's channels is read."""
    longer: Longer = "cut"
    """refuse: an error. cut: the start of a longer file is read. windows: a file is read as windows
    one after the other; a part at its end that is shorter than a window is left out."""
    shorter: Shorter = "pad"
    """refuse: an error. pad: zeros follow the sound."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a tree for JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, tree: Any) -> Self:
        """Return the format that a JSON object describes. Raises ValueError for other JSON."""
        match tree:
            case {
                "rate_hz": int(rate_hz),
                "length": int(length),
                "channels": str(channels),
                "longer": str(longer),
                "shorter": str(shorter),
            } if (
                rate_hz > 0
                and length > 0
                and channels in get_args(Channels)
                and longer in get_args(Longer)
                and shorter in get_args(Shorter)
            ):
                return cls(rate_hz, length, channels, longer, shorter)  # type: ignore[arg-type]
        raise ValueError("audio must have the rate and the length of sound")

    def require_fit(self, path: Path, header: SoundHeader, other: Path | None = None) -> None:
        """Raise DataError for a file that isn't read in this format; `other` is the file that has
        the rate, None for the training's."""
        if header.rate_hz != self.rate_hz:
            source = "the network was trained on" if other is None else f"{other} has"
            raise DataError(
                f"{path}: has {header.rate_hz:,} Hz, but {source} {self.rate_hz:,} Hz; all files "
                "must have one sample rate: convert them"
            )
        if header.channels > 1 and self.channels == "single":
            raise DataError(
                f"{path}: has {header.channels} channels; must have one, unless "
                "dataset.channels=mono reads their mean"
            )
        if header.frames > self.length and self.longer == "refuse":
            raise DataError(
                f"{path}: has {header.frames:,} samples, more than {self.length:,}; "
                "dataset.longer=cut or windows reads it"
            )
        if header.frames < self.length and self.shorter == "refuse":
            raise DataError(
                f"{path}: has {header.frames:,} samples, fewer than {self.length:,}; "
                "dataset.shorter=pad reads it"
            )

    def count_windows(self, frames: int) -> int:
        """Return the number of samples for a network that a file of this many frames has."""
        return max(1, frames // self.length) if self.longer == "windows" else 1

    def read_window(self, path: Path, window: int = 0) -> np.ndarray:
        """Return a window of a file, float32 (length,), with zeros after its end. Raises DataError
        for a file that can't be read."""
        sound = read_sound(path, window * self.length, self.length)
        values = np.zeros(self.length, np.float32)
        values[: len(sound)] = sound.mean(axis=1, dtype=np.float64)
        return values

    def read_windows(self, path: Path) -> np.ndarray:
        """Return all windows of a file, float32 (n, length). Raises DataError for a file that can't
        be read, or isn't read in this format."""
        header = read_header(path)
        self.require_fit(path, header)
        count = self.count_windows(header.frames)
        return np.stack([self.read_window(path, window) for window in range(count)])


def parse_audio_format(record: Mapping[str, Any]) -> AudioFormat | None:
    """Return the format in the record of a run or an export; None if samples aren't sound. Raises
    ValueError for other JSON."""
    tree = record.get("audio")
    return None if tree is None else AudioFormat.parse(tree)
