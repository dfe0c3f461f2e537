"""Folders of sound: classes, splits, lengths, and files that don't belong together.

Vowels of the formula: their pitch and formants, and their files.
"""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.audio import AudioFormat
from pipeline.data.columns import RawData, name_sample
from pipeline.data.selections import Readable, apply_selections
from pipeline.data.sources import audio_folder
from pipeline.data.sources.audio_folder import (
    RATE_HZ,
    WORDS,
    AudioFolder,
    make_vowel,
    make_vowels_once,
    write_vowels,
)
from tests.data.section import section
from tests.sound_files import save_wav

STEP = 2**10


def lay_sounds(root: Path) -> Path:
    """Three training and two evaluation files of 4 to 9 samples."""
    for name, length in (
        ("train/owl/b", 6),
        ("train/owl/a", 4),
        ("train/ant/c", 9),
        ("eval/ant/d", 7),
        ("eval/owl/e", 4),
    ):
        save_wav(root / f"{name}.wav", np.arange(1, length + 1) * STEP)
    return root


def folder(root: Path | None, **fields: Any) -> AudioFolder:
    return AudioFolder(**section(root=root, **({"samples": 4} | fields)))


def read(root: Path, **fields: Any) -> RawData:
    return folder(root, **fields).read(root.parent / "cache")


def values(data: RawData, split: str = "train") -> list[list[float]]:
    column = getattr(data, split).columns["audio"]
    return (column[:] * 2**15 / STEP).tolist()


def test_folders_become_classes(tmp_path: Path) -> None:
    data = read(lay_sounds(tmp_path / "data"), samples=5)
    assert data.classes == ("ant", "owl")
    assert data.inputs == ("audio",)
    assert data.train.columns["label"].tolist() == [0, 1, 1]
    assert values(data) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 0], [1, 2, 3, 4, 5]]
    assert values(data, "eval") == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 0]]
    assert data.train.columns["audio"].dtype == np.float32
    assert data.audio == AudioFormat(8000, 5)
    assert name_sample(data.train.columns["audio"], 0).endswith("train/ant/c.wav")
    assert data.notes == (
        "of 5 files, by length: 3 longer, cut to it; 2 shorter, padded with zeros",
    )


def test_length_in_seconds_is_that_of_the_files_rate(tmp_path: Path) -> None:
    root = lay_sounds(tmp_path / "data")
    data = read(root, samples=None, seconds=0.0005)
    assert data.train.columns["audio"].shape == (3, 4)
    with pytest.raises(DataError, match=r"dataset.seconds = 1e-05: 0 samples at 8,000 Hz"):
        read(root, samples=None, seconds=1e-5)
    with pytest.raises(DataError, match=r"8,000,000,000 samples at 8,000 Hz; must be 1 to"):
        read(root, samples=None, seconds=1e6)
    with pytest.raises(DataError, match=r"dataset.samples = 268435457: 268,435,457 samples at"):
        read(root, samples=2**28 + 1)


def test_windows_of_a_file_stay_in_its_split(tmp_path: Path) -> None:
    for number in range(8):
        save_wav(tmp_path / f"data/ant/{number}.wav", np.full(8, number * STEP))
        save_wav(tmp_path / f"data/owl/{number}.wav", np.full(11, (8 + number) * STEP))
    data = read(tmp_path / "data", split=0.25, longer="windows", shorter="refuse")
    files = {key: {row[0] for row in values(data, key)} for key in ("train", "eval")}
    assert len(files["train"]) == 12
    assert len(files["eval"]) == 4
    assert not files["train"] & files["eval"]
    assert len(data.train) == 24
    assert len(data.eval) == 8
    assert data.train.columns["label"].tolist() == [0] * 12 + [1] * 12
    assert data.notes == ("of 16 files, by length: 16 longer, read as windows",)
    cut = read(tmp_path / "data", split=0.25, longer="cut")
    assert len(cut.train) == 12


def save_stereo(path: Path) -> None:
    save_wav(path, np.array([[2, 4]] * 5) * STEP)


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another rate": (
        lambda path: save_wav(path, np.ones(9), rate_hz=44100),
        r"z.wav: has 44,100 Hz, but {root}/train/ant/c.wav has 8,000 Hz; all files must have one",
    ),
    "stereo with mono": (
        save_stereo,
        r"z.wav: has 2 channels; must have one, unless dataset.channels=mono reads their mean",
    ),
    "empty": (lambda path: path.write_bytes(b""), r"z.wav: can't be read as sound: it is empty or"),
    "without samples": (
        lambda path: save_wav(path, np.zeros((0, 1))),
        r"z.wav: can't be read as sound: it has no samples",
    ),
    "damaged": (
        lambda path: path.write_bytes(b"\1" * 99),
        r"z.wav: can't be read as sound: file does not start with RIFF id",
    ),
    "truncated": (
        lambda path: path.write_bytes(save_wav(path, np.ones(9)).read_bytes()[:-1]),
        r"z.wav: can't be read as sound: it is truncated: its header says 9 samples",
    ),
}


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("name", CHANGES)
def test_file_that_does_not_belong_is_named(name: str, split: str, tmp_path: Path) -> None:
    root = lay_sounds(tmp_path / "data")
    change, message = CHANGES[name]
    change(root / split / "owl" / "z.wav")
    with pytest.raises(DataError, match=f"^{root}/{split}/owl/{message.format(root=root)}"):
        read(root)


def test_other_unreadable_files_are_counted(tmp_path: Path) -> None:
    root = lay_sounds(tmp_path / "data")
    for name in ("x", "y", "z"):
        (root / f"train/ant/{name}.wav").write_bytes(b"")
    with pytest.raises(DataError, match=r"x.wav: .* cut off; nor can 2 of the others$"):
        read(root)


def test_mean_of_the_channels_is_read_if_the_recipe_says_so(tmp_path: Path) -> None:
    root = lay_sounds(tmp_path / "data")
    save_stereo(root / "train/owl/z.wav")
    data = read(root, channels="mono")
    assert values(data)[-1] == [3, 3, 3, 3]


@pytest.mark.parametrize("field", ["longer", "shorter"])
def test_other_lengths_are_refused_if_the_recipe_says_so(field: str, tmp_path: Path) -> None:
    root = lay_sounds(tmp_path / "data")
    messages = {"longer": "c.wav: has 9 samples, more than 5", "shorter": "4 samples, fewer than 5"}
    with pytest.raises(DataError, match=messages[field]):
        read(root, samples=5, **{field: "refuse"})


def test_unreadable_files_are_left_out_by_a_rule(tmp_path: Path) -> None:
    root = lay_sounds(tmp_path / "data")
    (root / "train/ant/z.wav").write_bytes(b"")
    fields = section()["train"] | {"select": ({"name": "readable"},)}
    data = folder(root, train=fields).read(tmp_path)
    assert len(data.train) == 4
    assert len(apply_selections((Readable(),), data, "train").train) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"samples": None}, "seconds = None, samples = None: must set one of both, the length to"),
        ({"seconds": 1.0}, "seconds = 1.0, samples = 4: must set one of both"),
        ({"samples": None, "seconds": 0.0}, "greater than 0"),
        ({"longer": "stretch"}, "Input should be 'refuse', 'cut' or 'windows'"),
        (
            {"longer": "windows", "folds": {"count": 2, "index": 0}},
            "folds: can't be combined with longer = windows, since windows of a file would be in",
        ),
        ({"buckets": ((4,),)}, "buckets: must be null; seconds or samples is the length"),
    ],
)
def test_invalid_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        folder(None, **fields)


def test_op_for_another_rate_is_refused(tmp_path: Path) -> None:
    root = lay_sounds(tmp_path / "data")
    op = {"name": "log_mel", "rate_hz": 16000, "fft_size": 4, "hop": 2, "mels": 1}
    fields = section()["eval"] | {"ops": (op,)}
    message = r"c.wav: has 8,000 Hz, but dataset.eval.ops.0 \(log_mel\) rate_hz = 16000; must be"
    with pytest.raises(DataError, match=message):
        folder(root, eval=fields).read(tmp_path)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    root = lay_sounds(tmp_path / "data")
    outside = save_wav(tmp_path / "outside.wav", np.full(4, 9 * STEP))
    (root / "train/owl/z.wav").symlink_to(outside)
    with pytest.raises(DataError, match=r"z.wav: leads out of .*dataset.follow_links=true"):
        read(root)
    assert values(read(root, follow_links=True))[-1] == [9, 9, 9, 9]


def test_messages_and_notes_speak_of_sounds(tmp_path: Path) -> None:
    root = lay_sounds(tmp_path / "data")
    (root / "train/owl/notes.txt").write_text("a")
    assert "1 of .txt" in read(root).notes[0]
    assert "WAV, FLAC and OGG in folders of classes are read" in read(root).notes[0]
    (root / "train/bee").mkdir()
    (root / "eval/bee").mkdir()
    with pytest.raises(DataError, match=r"bee: holds no sound \(.wav, .flac, .ogg\)"):
        read(root)
    with pytest.raises(DataError, match=r"of sounds in one folder, dataset.split=0.2 holds out"):
        read(root / "train")


def test_vowels_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_folder, "COUNTS", {"train": 2, "eval": 1})
    data = folder(None).read(tmp_path)
    assert (len(data.train), len(data.eval), len(data.classes)) == (20, 10, 10)
    made = make_vowels_once(tmp_path)
    assert [path.name for path in made.parent.iterdir() if path.is_dir()] == [made.name]
    changed = next(made.rglob("*.wav"))
    with wave.open(str(changed), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\0\0" * 4)
    content = changed.read_bytes()
    folder(None).read(tmp_path)
    assert changed.read_bytes() == content


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
    monkeypatch.setattr(audio_folder, "COUNTS", {"train": 2, "eval": 1})
    write_vowels(tmp_path / "vowels")
    files = sorted((tmp_path / "vowels").rglob("*.wav"))
    assert len(files) == 3 * len(WORDS)
    with wave.open(str(tmp_path / "vowels/train/hid/001.wav"), "rb") as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE_HZ, 1, 2)
        numbers = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    expected = np.rint(make_vowel("hid", 3) * 32767)
    np.testing.assert_array_equal(numbers, expected)
