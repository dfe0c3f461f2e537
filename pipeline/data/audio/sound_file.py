"""Sound files: WAV by the standard library, other formats by soundfile, an extra."""

from __future__ import annotations

import struct
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError, first_line, get_system_reason

SUFFIXES = (".wav", ".flac", ".ogg")
KINDS = "WAV, FLAC and OGG"
"""The formats in messages."""
INSTALL = "needs soundfile: pip install 'recipe-pipeline[audio]'"
_UNREADABLE = (OSError, EOFError, ValueError, RuntimeError, wave.Error, struct.error, MemoryError)
"""Errors of reading a damaged file. soundfile raises RuntimeErrors."""


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
