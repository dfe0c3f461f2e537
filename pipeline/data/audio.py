"""Sound: files, and the format that a network reads.

WAV is read by the standard library, other formats by soundfile, an extra.
"""

from __future__ import annotations

import struct
import wave
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from pipeline.core.errors import DataError, first_line, get_system_reason

Longer = Literal["refuse", "cut", "windows"]
Shorter = Literal["refuse", "pad"]
Channels = Literal["single", "mono"]
SUFFIXES = (".wav", ".flac", ".ogg")
KINDS = "WAV, FLAC and OGG"
"""The formats in messages."""
INSTALL = "needs soundfile: pip install 'recipe-pipeline[audio]'"
_UNREADABLE = (OSError, EOFError, ValueError, RuntimeError, wave.Error, struct.error, MemoryError)
"""Errors of reading a damaged file. soundfile raises RuntimeErrors."""


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


@dataclass(frozen=True)
class SoundHeader:
    """Rate, channels and length of a file's sound."""

    rate_hz: int
    channels: int
    frames: int
    """Samples of each channel."""


def read_header(path: Path) -> SoundHeader:
    """Read the header of a file. Raises DataError for a file that can't be read, without samples,
    and for a WAV file that is shorter than it says."""
    with _name_sound_file(path):
        return _read_header(path)


def read_sound(path: Path, start: int, count: int) -> np.ndarray:
    """Return samples of a file from frame `start` on, at most `count`, float32 (n, channels) in
    [-1, 1]. Raises DataError for a file that can't be read, or has fewer frames than it says."""
    with _name_sound_file(path):
        header = _read_header(path)
        wanted = max(0, min(count, header.frames - start))
        if _is_pcm_wav(path):
            with wave.open(str(path), "rb") as file:
                file.setpos(start)
                sound = _decode_pcm(file.readframes(wanted), file.getsampwidth())
            sound = sound.reshape(-1, header.channels)
        else:
            sound = _import_soundfile().read(
                str(path), frames=wanted, start=start, dtype="float32", always_2d=True
            )[0]
        if len(sound) < wanted:
            raise ValueError(f"ends after {start + len(sound):,} of {header.frames:,} samples")
        if not np.isfinite(sound).all():
            raise ValueError("it has samples that aren't finite")
        return np.asarray(sound.clip(-1, 1), np.float32)


@contextmanager
def _name_sound_file(path: Path) -> Iterator[None]:
    """Convert errors of reading a file to DataError, whose message starts with the path."""
    try:
        yield
    except _UNREADABLE as error:
        # soundfile's message would name the path again, and errors of chunks have no message.
        reason = getattr(error, "error_string", None) or get_system_reason(error)
        if isinstance(error, EOFError):
            reason = "it is empty or cut off"
        elif reason == "RuntimeError":
            reason = "its parts don't fit its size; it is damaged"
        raise DataError(f"{path}: can't be read as sound: {reason}") from error


def _is_pcm_wav(path: Path) -> bool:
    """Return whether the standard library reads a file. Raises wave.Error and others for a damaged
    WAV file; floats and compressed samples are for soundfile."""
    if path.suffix.lower() != ".wav":
        return False
    try:
        with wave.open(str(path), "rb"):
            return True
    except wave.Error as error:
        if str(error).startswith("unknown format"):
            return False
        raise


def _read_header(path: Path) -> SoundHeader:
    if _is_pcm_wav(path):
        with wave.open(str(path), "rb") as file:
            header = SoundHeader(file.getframerate(), file.getnchannels(), file.getnframes())
            _require_complete(file, header)
    else:
        info = _import_soundfile().info(str(path))
        header = SoundHeader(info.samplerate, info.channels, info.frames)
    if header.frames < 1:
        raise ValueError("it has no samples")
    if header.rate_hz < 1:
        raise ValueError(f"it has {header.rate_hz} samples a second")
    return header


def _require_complete(file: wave.Wave_read, header: SoundHeader) -> None:
    """Raise ValueError for an opened WAV file without its last sample, or with other widths of
    samples than `_decode_pcm` knows."""
    sample_bytes = file.getsampwidth()
    if sample_bytes > 4:
        raise ValueError(f"its samples have {8 * sample_bytes} bits; must be 8, 16, 24 or 32")
    if header.frames:
        file.setpos(header.frames - 1)
        if len(file.readframes(1)) < header.channels * sample_bytes:
            raise ValueError(
                f"it is truncated: its header says {header.frames:,} samples, and the last of them "
                "is missing"
            )


def _decode_pcm(content: bytes, sample_bytes: int) -> np.ndarray:
    """Return PCM samples of 8, 16, 24 or 32 bits as float32 (n,) in [-1, 1]."""
    # As the upper bytes of 32 bits.
    padded = np.zeros((len(content) // sample_bytes, 4), np.uint8)
    padded[:, 4 - sample_bytes :] = np.frombuffer(content, np.uint8).reshape(-1, sample_bytes)
    if sample_bytes == 1:
        padded[:, 3] ^= 0x80  # only 8 bits are unsigned
    return (padded.view("<i4")[:, 0] / 2.0**31).astype(np.float32)


def _import_soundfile() -> Any:
    """Return the module soundfile. Raises ValueError if it isn't installed."""
    # Imported here, since WAV files of whole numbers don't need it.
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise ValueError(f"{INSTALL} ({first_line(error)})") from error
    return soundfile
