"""Sound files: every width of PCM, other formats, and damage."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.audio import SoundHeader, read_header, read_sound
from tests.sound_files import save_wav

RAMP = np.array([-4, -1, 0, 1, 3])


@pytest.mark.parametrize(
    ("sample_bytes", "numbers", "expected"),
    [
        (1, [0, 64, 128, 192, 255], [-1, -0.5, 0, 0.5, 127 / 128]),
        (2, [-(2**15), -1, 0, 2**14, 2**15 - 1], [-1, -(2**-15), 0, 0.5, 1 - 2**-15]),
        (3, [-(2**23), -1, 0, 2**22, 2**23 - 1], [-1, -(2**-23), 0, 0.5, 1 - 2**-23]),
        (4, [-(2**31), -(2**20), 0, 2**30, 2**31 - 128], [-1, -(2**-11), 0, 0.5, 1 - 2**-24]),
    ],
)
def test_whole_numbers_of_every_width_are_read(
    sample_bytes: int, numbers: list[int], expected: list[float], tmp_path: Path
) -> None:
    path = save_wav(tmp_path / "a.wav", np.array(numbers), sample_bytes=sample_bytes)
    sound = read_sound(path, 0, 5)
    assert sound.dtype == np.float32
    assert sound.tolist() == [[value] for value in np.float32(expected).tolist()]


def test_part_of_several_channels_is_read(tmp_path: Path) -> None:
    numbers = np.arange(12).reshape(6, 2) * 2**10
    path = save_wav(tmp_path / "a.WAV", numbers, rate_hz=44100)
    assert read_header(path) == SoundHeader(44100, 2, 6)
    np.testing.assert_array_equal(read_sound(path, 2, 3), numbers[2:5] / 2**15)
    np.testing.assert_array_equal(read_sound(path, 5, 3), numbers[5:] / 2**15)
    assert read_sound(path, 6, 3).shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "it is empty or cut off"),
        (lambda content: content[:20], "it is empty or cut off"),
        (lambda content: content[:-3], "it is truncated: its header says 5 samples"),
        (lambda content: content[:16] + b"\xff" * 4 + content[20:], "its parts don't fit its size"),
        (lambda content: b"\0" * 60, "file does not start with RIFF id"),
        (lambda content: content[:44].replace(b"\x0a\0\0\0", b"\0\0\0\0"), "it has no samples"),
        (lambda content: content[:24] + b"\0\0\0\0" + content[28:], "it has 0 samples a second"),
        (lambda content: content[:22] + b"\0\0" + content[24:], "bad # of channels"),
        (lambda content: content[:34] + b"\x28\0" + content[36:], "its samples have 40 bits"),
    ],
)
def test_damaged_wav_is_named(change, message: str, tmp_path: Path) -> None:
    path = save_wav(tmp_path / "a.wav", RAMP)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"{path}: can't be read as sound: .*{message}"):
        read_header(path)


def test_file_that_is_cut_after_its_header_was_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_wav(tmp_path / "a.wav", RAMP)
    header = SoundHeader(8000, 1, 9)
    monkeypatch.setattr("pipeline.data.audio._read_header", lambda path: header)
    with pytest.raises(DataError, match="ends after 5 of 9 samples"):
        read_sound(path, 0, 9)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"b.wav: can't be read as sound: No such file"):
        read_header(tmp_path / "b.wav")


@pytest.mark.parametrize("name", ["a.flac", "a.ogg", "float.wav"])
def test_missing_package_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    path = tmp_path / name
    content = save_wav(path, RAMP).read_bytes()
    path.write_bytes(content[:20] + b"\x03\0" + content[22:])  # the tag of floats
    message = r"can't be read as sound: needs soundfile: pip install 'recipe-pipeline\[audio\]'"
    with pytest.raises(DataError, match=message):
        read_header(path)


@pytest.mark.parametrize(
    ("name", "subtype"),
    [("a.flac", "PCM_16"), ("a.flac", "PCM_24"), ("a.ogg", "VORBIS"), ("a.wav", "FLOAT")],
)
def test_other_formats_are_read_by_soundfile(name: str, subtype: str, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    values = 0.5 * np.sin(np.arange(2000) / 9)
    soundfile.write(tmp_path / name, values, 16000, subtype=subtype)
    assert read_header(tmp_path / name) == SoundHeader(16000, 1, 2000)
    sound = read_sound(tmp_path / name, 100, 1000)
    tolerance = {"VORBIS": 0.05, "PCM_16": 2**-15}.get(subtype, 2**-23)
    np.testing.assert_allclose(sound[:, 0], values[100:1100], atol=tolerance)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:30])
    with pytest.raises(DataError, match=r"can't be read as sound: \w[^/]*$"):
        read_header(tmp_path / name)


def test_floats_are_finite_and_at_most_1(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "a.wav", np.array([0.5, 1.5, -2]), 8000, subtype="FLOAT")
    assert read_sound(tmp_path / "a.wav", 0, 3)[:, 0].tolist() == [0.5, 1, -1]
    soundfile.write(tmp_path / "a.wav", np.array([0.5, np.nan]), 8000, subtype="FLOAT")
    with pytest.raises(DataError, match="it has samples that aren't finite"):
        read_sound(tmp_path / "a.wav", 0, 3)
