"""ArrayRecord files: what was written is read, at random, streamed, and never half (D-13, D-14)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.backends.loading import loader as loader_module
from pipeline.backends.loading.window import read_batch
from pipeline.core.errors import DataError, RunError
from pipeline.data.columns import LazyColumn, RawData, Split, Targets
from pipeline.data.padding.buckets import RaggedColumn, make_ragged_array
from pipeline.data.records import record_format, record_writer
from pipeline.data.records.record_format import DESCRIPTION
from pipeline.data.records.record_writer import write_records
from pipeline.data.sources.example_files import Records
from tests.backends.loading.small_loader import LazyNumbers, make, make_order
from tests.data.section import section

SAMPLES, EVALUATED = 37, 5


def quiet(column: str, written: int, samples: int) -> None:
    """Nobody listens."""


def output(samples: int = SAMPLES) -> RawData:
    rng = np.random.default_rng(samples)

    def split(size: int) -> Split:
        images = rng.integers(0, 256, (size, 6, 5, 3), np.uint8)
        return Split({"image": images, "label": (np.arange(size) % 4).astype(np.int32)})

    return RawData(split(samples), split(EVALUATED), Targets(("ant", "bee", "cat", "dog")))


def write(folder: Path, data: RawData | None = None, *, overwrite: bool = False) -> Path:
    write_records(folder, "mine", data or output(), overwrite=overwrite, notify=quiet)
    return folder


def read(folder: Path) -> RawData:
    return Records(**section(root=folder)).read(folder / "cache")


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of at most 11 images, records of 8 labels."""
    monkeypatch.setattr(record_writer, "FILE_BYTES", 1000)
    monkeypatch.setattr(record_writer, "SAMPLES_PER_NARROW_RECORD", 8)
    monkeypatch.setattr(record_writer, "CHUNK_SAMPLES", 5)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of training images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_writer, "FILE_BYTES", 1000)
        patch.setattr(record_writer, "SAMPLES_PER_NARROW_RECORD", 8)
        return write(tmp_path_factory.mktemp("records") / "out")


def assert_same(one: Split, other: Split) -> None:
    assert one.columns.keys() == other.columns.keys()
    for name, column in one.columns.items():
        assert np.dtype(column.dtype) == np.dtype(other.columns[name].dtype)
        assert column.shape == other.columns[name].shape
        assert np.array_equal(column[:], other.columns[name][:])


def test_written_records_are_read_back(tmp_path: Path) -> None:
    back = read(write(tmp_path / "deep" / "out"))
    assert_same(back.train, output().train)
    assert_same(back.eval, output().eval)
    assert back.classes == output().classes


@pytest.mark.slow
@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("samples", [1, 7, 8, 9, 11, 12, 33, 37])
def test_sharded_files_are_read_as_one_column(tmp_path: Path, samples: int) -> None:
    """Files end where they may; the last record of labels is shorter."""
    back = read(write(tmp_path / "out", output(samples)))
    assert_same(back.train, output(samples).train)
    assert len(list((tmp_path / "out").glob("train-image-*"))) == max(1, -(-samples * 90 // 1000))


def test_equal_data_produces_equal_files(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    names = sorted(file.name for file in one.iterdir())
    assert names == sorted(file.name for file in other.iterdir())
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(chosen=st.lists(st.integers(-SAMPLES, SAMPLES - 1), max_size=60))
def test_samples_are_read_in_any_order(chosen: list[int], sharded: Path) -> None:
    column = read(sharded).train.columns["image"]
    images = output().train.columns["image"]
    assert np.array_equal(column[np.array(chosen, int)], images[np.array(chosen, int)])


def test_single_sample_is_read_and_named_by_its_record(sharded: Path) -> None:
    column = read(sharded).train.columns["image"]
    assert isinstance(column, LazyColumn)
    assert np.array_equal(column.sample(20), output().train.columns["image"][20])
    assert column.sample_name(0).endswith("train-image-00000-of-00004.array_record, record 0")
    assert column.sample_name(20).endswith("train-image-00002-of-00004.array_record, record 2")


def test_labels_are_in_memory_and_images_are_lazy(sharded: Path) -> None:
    columns = read(sharded).train.columns
    assert isinstance(columns["label"], np.ndarray)
    assert not isinstance(columns["image"], np.ndarray)


def test_slow_source_is_read_once_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data larger than memory can be converted: no more than a chunk is requested at once."""
    monkeypatch.setattr(record_writer, "CHUNK_SAMPLES", 10)
    values = np.arange(SAMPLES * 100, dtype=np.int32).reshape(SAMPLES, 100)
    column, requested = LazyNumbers(values), []

    class Watched:
        shape, dtype = column.shape, column.dtype

        def __getitem__(self, rows: slice) -> np.ndarray:
            requested.append((rows.start, rows.stop))
            return column[rows]

    labels = np.zeros(SAMPLES, np.int32)
    split = Split({"image": Watched(), "label": labels})
    back = read(write(tmp_path / "out", RawData(split, split, Targets(("a",)))))
    assert np.array_equal(back.train.columns["image"][:], values)
    assert requested == [(0, 10), (10, 20), (20, 30), (30, 37)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["resident", "stream"])
@settings(max_examples=10, deadline=None)
@given(step=st.integers(0, 100_000))
def test_any_step_can_be_fed_directly(kind: str, step: int, sharded: Path) -> None:
    """D-14: O(1) seek, through the same loader as every other source."""
    split, order = read(sharded).train, make_order(samples=SAMPLES, batch_size=4)
    loader = make(kind, split, order, stop=step + 1)
    window = loader.get_window(step)
    batch = read_batch(window.inputs, step - window.start)
    rows = order.batches(step, 1).indices[0]
    loader.close()
    assert np.array_equal(batch.columns["image"], output().train.columns["image"][rows])
    assert np.array_equal(batch.columns["label"], output().train.columns["label"][rows])


@pytest.mark.slow
def test_several_threads_read_a_stream(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 3)
    split, order = read(sharded).train, make_order(samples=SAMPLES, batch_size=4)
    loader, images = make("stream", split, order, stop=60), output().train.columns["image"]
    for step in range(60):
        window = loader.get_window(step)
        batch = read_batch(window.inputs, step - window.start)
        assert np.array_equal(batch.columns["image"], images[order.batches(step, 1).indices[0]])
    # Records are read many at a time.
    assert loader.report().slowest_sample is None


def damage(folder: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    file = folder / name
    file.write_bytes(change(file.read_bytes()))
    return file


def copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


IMAGES, LABELS = "train-image-00001-of-00004.array_record", "eval-label-00000-of-00001.array_record"


@pytest.mark.parametrize("name", [IMAGES, LABELS])
def test_missing_or_truncated_file_is_named(name: str, sharded: Path, tmp_path: Path) -> None:
    folder = copy(sharded, tmp_path)
    size = (folder / name).stat().st_size
    damage(folder, name, lambda content: content[:-100])
    with pytest.raises(DataError, match=rf"{name}: has {size - 100:,} bytes instead of {size:,}$"):
        read(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: can't be read: No such file"):
        read(folder)


def read_everything(folder: Path) -> None:
    for split in (read(folder).train, read(folder).eval):
        for column in split.columns.values():
            column[:]


@pytest.mark.parametrize("name", [IMAGES, LABELS])
def test_foreign_bytes_of_the_right_length_are_named(
    name: str, sharded: Path, tmp_path: Path
) -> None:
    folder = copy(sharded, tmp_path)
    rng = np.random.default_rng(0)
    damage(folder, name, lambda content: rng.bytes(len(content)))
    with pytest.raises(DataError, match=rf"{name}, record 0: is damaged or of another dataset: "):
        read_everything(folder)


def test_file_of_another_dataset_is_detected(
    sharded: Path, tmp_path: Path, small_files: None
) -> None:
    """The same number and size of records, which differ only in their checksums."""
    folder = copy(sharded, tmp_path)
    other = output()
    changed = Split({**other.train.columns, "image": 255 - other.train.columns["image"]})
    foreign = write(tmp_path / "foreign", RawData(changed, other.eval, other.targets))
    shutil.copy(foreign / IMAGES, folder / IMAGES)
    expected = rf"{IMAGES}, record 0: is damaged or of another dataset: its checksum is wrong"
    with pytest.raises(DataError, match=expected):
        read_everything(folder)


@pytest.mark.parametrize("function", ["decode", "decode_into"])
def test_bug_is_not_reported_as_damage(
    function: str, sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(record_format, function, fail)
    with pytest.raises(TypeError, match="a bug"):
        read_everything(sharded)


def test_swapped_files_are_detected(tmp_path: Path, small_files: None) -> None:
    folder = write(tmp_path / "out", output(22))
    one, other = sorted(folder.glob("train-image-*"))
    aside = one.rename(tmp_path / "aside")
    other.rename(one)
    aside.rename(other)
    with pytest.raises(DataError, match="record 0: is damaged or of another dataset"):
        read_everything(folder)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_detected_or_harmless(
    data: st.DataObject, sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Either what is read is right all the same, or it is one DataError."""
    folder = copy(sharded, tmp_path_factory.mktemp("damaged"))
    name = data.draw(st.sampled_from([IMAGES, LABELS]))
    size = (folder / name).stat().st_size
    place, mask = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 255))

    def flip(content: bytes) -> bytes:
        return content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]

    damage(folder, name, flip)
    wrong = None
    try:
        back = read(folder)
        assert_same(back.train, output().train)
        assert_same(back.eval, output().eval)
    except DataError as error:
        wrong = str(error)
    assert wrong is None or name in wrong


def test_labels_must_fit_the_classes(sharded: Path, tmp_path: Path) -> None:
    folder = copy(sharded, tmp_path)
    tree = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps({**tree, "classes": ["ant", "bee"]}))
    with pytest.raises(DataError, match="has labels from 0 to 3; they must be 0 to 1"):
        read(folder)


def test_root_is_required() -> None:
    with pytest.raises(ValidationError, match=r"missing; it must be a folder with records\.json"):
        Records(**section(root=None))


def test_records_are_overwritten_only_on_request(tmp_path: Path) -> None:
    folder = write(tmp_path / "out")
    with pytest.raises(RunError, match=r"out: holds records already; .*--overwrite"):
        write(folder, output(5))
    assert len(read(folder).train) == SAMPLES
    write(folder, output(5), overwrite=True)
    assert len(read(folder).train) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_foreign_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    (tmp_path / "file").write_text("more of it")
    for name in ("thesis", "file"):
        with pytest.raises(RunError, match=rf"{name}: exists already and holds no records"):
            write(tmp_path / name, overwrite=True)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"


@pytest.mark.parametrize("before", [None, 5])
def test_failed_write_leaves_the_folder_unchanged(before: int | None, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    if before is not None:
        write(folder, output(before))

    def fail(index: int) -> None:
        raise DataError("the film tore")

    class Torn(LazyNumbers):
        def __getitem__(self, indices: Any) -> np.ndarray:
            if indices.stop == SAMPLES:
                raise DataError("the film tore")
            return self.values[indices]

    good = output()
    split = Split({**good.train.columns, "other": Torn(np.zeros((SAMPLES, 100), np.int32), fail)})
    with pytest.raises(DataError, match="the film tore"):
        write(folder, RawData(split, split, good.targets), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ([] if before is None else ["out"])
    if before is not None:
        assert_same(read(folder).train, output(before).train)


def test_records_that_cannot_be_replaced_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "out", output(5))

    def fail(draft: Path, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipeline.data.records.record_writer.commit", fail)
    with pytest.raises(RunError, match="out: can't be written: No space left on device"):
        write(folder, overwrite=True)
    assert_same(read(folder).train, output(5).train)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="out: can't be written: "):
        write(tmp_path / "file" / "out")


RAGGED = [(3, 5), (7, 2), (1, 1), (4, 4), (9, 6)]


def ragged() -> RawData:
    """Images of several sizes, up to 162 bytes."""
    rng = np.random.default_rng(5)
    sizes = np.array([RAGGED[n % len(RAGGED)] for n in range(SAMPLES)])
    flat = rng.integers(0, 256, int(sizes.prod(axis=1).sum()) * 3, np.uint8)
    labels = (np.arange(SAMPLES) % 4).astype(np.int32)
    split = Split({"image": make_ragged_array(flat, sizes, (3,)), "label": labels})
    return RawData(split, split, Targets(("ant", "bee", "cat", "dog")))


@pytest.mark.usefixtures("small_files")
def test_ragged_values_are_stored_without_padding(tmp_path: Path) -> None:
    """D-18: no padding in the files."""
    before = ragged().train.columns["image"]
    folder = write(tmp_path / "out", ragged())
    after = read(folder).train.columns["image"]
    assert isinstance(before, RaggedColumn)
    assert isinstance(after, RaggedColumn)
    assert len(list(folder.glob("train-image-*"))) > 1
    assert (after.shape, after.trailing, after.dtype) == ((SAMPLES, 9, 6, 3), (3,), np.uint8)
    assert np.array_equal(after.sizes, before.sizes)
    for index in range(SAMPLES):
        assert np.array_equal(after.value(index), before.value(index))
    assert np.array_equal(after[:], before[:])


def test_sizes_of_other_records_are_detected(tmp_path: Path) -> None:
    """Right by themselves, but of other records, which are longer than they say."""
    folder = write(tmp_path / "out", ragged())
    swapped = ragged()
    column = swapped.train.columns["image"]
    assert isinstance(column, RaggedColumn)
    sizes = column.sizes[np.r_[1, 0, 2:SAMPLES]]
    other = make_ragged_array(
        column[:].reshape(-1)[: int(sizes.prod(axis=1).sum()) * 3], sizes, (3,)
    )
    foreign = Split({"image": other, "label": swapped.train.columns["label"]})
    write(tmp_path / "foreign", RawData(foreign, foreign, swapped.targets))
    tree = json.loads((folder / DESCRIPTION).read_text())
    theirs = json.loads((tmp_path / "foreign" / DESCRIPTION).read_text())
    sizes_spec = theirs["train"]["columns"]["image"]["sizes"]
    tree["train"]["columns"]["image"]["sizes"] = sizes_spec
    (folder / DESCRIPTION).write_text(json.dumps(tree))
    name = sizes_spec["files"][0]["name"]
    shutil.copy(tmp_path / "foreign" / name, folder / name)
    image = read(folder).train.columns["image"]
    assert isinstance(image, RaggedColumn)
    with pytest.raises(DataError, match=r"record 0: is damaged .*: has 49 bytes instead of 46$"):
        image.value(0)
