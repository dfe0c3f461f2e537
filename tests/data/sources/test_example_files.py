"""TFRecord files: what TensorFlow wrote is read, and nothing that is damaged (D-20)."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError
from tensorboardX.record_writer import RecordWriter

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.data.columns import RawData
from pipeline.data.records.tfrecord_file import (
    Feature,
    compute_masked_checksum,
    make_example_type,
    parse_example,
    scan_records,
)
from pipeline.data.sources.example_files import TFRecord
from tests import outcome
from tests.data.section import section
from tests.whole_run import run

GOLDEN = Path(__file__).parents[2] / "golden" / "tfrecord"


def write(path: Path, contents: list[bytes]) -> Path:
    """Records as tensorboardX frames them, with its own checksums."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(str(path))
    for content in contents:
        writer.write(content)
    writer.close()
    return path


def make_example(features: Mapping[str, Feature]) -> bytes:
    """The bytes of an Example with these features."""
    example = make_example_type()()
    for name, values in features.items():
        feature = example.features.feature[name]
        if isinstance(values, tuple):
            feature.bytes_list.value.extend(values)
        elif np.issubdtype(values.dtype, np.floating):
            feature.float_list.value.extend(values.tolist())
        else:
            feature.int64_list.value.extend(values.tolist())
    return bytes(example.SerializeToString(deterministic=True))


def plain(number: int, label: Any = None, **features: Feature) -> bytes:
    """An example of 4x4 grey pixels, all `number`."""
    return make_example(
        {
            "image_raw": (bytes([number] * 16),),
            "label": np.array([number % 3]) if label is None else np.asarray(label),
            "height": np.array([4]),
            "width": np.array([4]),
            "depth": np.array([1]),
            **features,
        }
    )


def png(value: int, size: tuple[int, int] = (4, 6), kind: str = "PNG") -> bytes:
    buffer = BytesIO()
    Image.new("RGB", size[::-1], (value, 0, 0)).save(buffer, kind)
    return buffer.getvalue()


def dataset(folder: Path, files: int = 3, samples: int = 8) -> Path:
    for file in range(files):
        numbers = range(file * samples, (file + 1) * samples)
        write(folder / f"train-{file}-of-{files}.tfrecord", [plain(n) for n in numbers])
    write(folder / "validation.tfrecord", [plain(n) for n in range(5)])
    return folder


def read(folder: Path, **settings: Any) -> RawData:
    return TFRecord(**section(root=folder, **settings)).read(folder / "cache")


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as error:
        read(folder, **settings)
    return str(error.value)


def test_tensorflow_records_are_read_golden() -> None:
    """Golden values of tests/golden/make_tfrecord.py."""
    expected = json.loads((GOLDEN / "features.json").read_text())
    found = [parse_example(content) for _, content in scan_records(GOLDEN / "train.tfrecord")]
    assert len(found) == len(expected)
    for example, values in zip(found, expected, strict=True):
        assert bytes(example["image_raw"][0]).hex() == values["image_raw"]  # type: ignore[arg-type]
        assert np.asarray(example["label"]).tolist() == values["label"]
        np.testing.assert_array_equal(example["weights"], np.float32(values["weights"]))
    raw = read(GOLDEN, split=0.5)
    assert raw.train.specs()["image"].shape == (3, 2, 1)


def test_raw_pixels_and_label_are_parsed() -> None:
    values = parse_example(plain(7))
    assert values["image_raw"] == (bytes([7] * 16),)
    assert np.asarray(values["label"]).tolist() == [1]


def test_splits_are_read_from_their_files(tmp_path: Path) -> None:
    raw = read(dataset(tmp_path))
    assert raw.train.files == (8, 8, 8)
    assert raw.targets.names == ("0", "1", "2")
    assert raw.train.columns["image"].shape == (24, 4, 4, 1)
    picked = raw.train.columns["image"][np.array([23, 0])]
    assert [image.max() for image in picked] == [23, 0]
    assert raw.train.columns["label"][:4].tolist() == [0, 1, 2, 0]
    assert len(raw.eval) == 5


def test_label_above_the_training_labels_is_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path)
    write(folder / "validation.tfrecord", [plain(n, [12]) for n in range(5)])
    problem = "the evaluation split has the label 12, and the training split has labels from 0 to 2"
    assert problem in refusal(folder)
    names = tuple("abcdefghijklm")
    assert read(folder, classes=names).targets.names == names


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_encoded_images_are_decoded(kind: str, tmp_path: Path) -> None:
    for name in ("train.tfrecord", "test.tfrecord"):
        contents = [
            make_example(
                {"image/encoded": (png(n, kind=kind),), "image/class/label": np.array([n + 1])}
            )
            for n in range(4)
        ]
        write(tmp_path / name, contents)
    raw = read(tmp_path, first_label=1, classes=["a", "b", "c", "d"])
    assert raw.train.columns["image"].shape == (4, 4, 6, 3)
    assert raw.train.columns["image"][np.array([2])][0, 0, 0].tolist() == [2, 0, 0]
    assert raw.train.columns["label"][:].tolist() == [0, 1, 2, 3]
    assert raw.targets.names == ("a", "b", "c", "d")
    resized = read(tmp_path, first_label=1, image_size=[8, 8])
    assert resized.eval.columns["image"].shape == (4, 8, 8, 3)


def test_float_labels_are_a_regression(tmp_path: Path) -> None:
    for name in ("train.tfrecord", "eval.tfrecord"):
        write(tmp_path / name, [plain(n, np.float32([n, 2 * n])) for n in range(6)])
    raw = read(tmp_path)
    assert raw.targets.task == "regression"
    assert raw.targets.names == ("label_0", "label_1")
    np.testing.assert_allclose(raw.train.columns["label"][:].mean(axis=0), 0, atol=1e-6)


def test_split_is_stratified_by_class(tmp_path: Path) -> None:
    raw = read(dataset(tmp_path), split=0.25)
    assert (len(raw.train), len(raw.eval)) == (18, 6)
    assert sum(raw.train.files) == 18
    assert set(raw.eval.columns["label"][:].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ([plain(1), plain(2, [1, 2])], r"record 1: label has 2 values, not one integer"),
        ([plain(1, np.float32([np.inf]))], "must be finite"),
        ([make_example({"label": np.array([1])})], "has no feature image/encoded or"),
        ([make_example({"image": (b"x",), "label": (b"cat",)})], "label has bytes"),
        ([make_example({"image": (b"xy",), "label": np.array([1])})], r"image_shape=\[H,W,C\]"),
        ([plain(1), plain(2, image_raw=(b"abc",))], "record 1: image_raw has 3 bytes; 4x4"),
        ([plain(1, image_raw=(b"a", b"b"))], "bytes of one image"),
        ([plain(1, height=np.array([-4]))], "an image of -4x4 pixels"),
        ([b"\xff\xff\xff no example"], "record 0: isn't a tf.train.Example"),
        ([], "has no records"),
        ([plain(1, [-1])], "label goes from -1 to"),
    ],
)
def test_invalid_examples_are_refused(tmp_path: Path, contents: list[bytes], said: str) -> None:
    write(tmp_path / "train.tfrecord", contents)
    write(tmp_path / "eval.tfrecord", [plain(1), plain(2)])
    with pytest.raises(DataError, match=said):
        read(tmp_path)


def test_images_of_several_sizes_are_named(tmp_path: Path) -> None:
    sizes = [(4, 6), (5, 6)]
    contents = [make_example({"image": (png(1, s),), "label": np.array([0])}) for s in sizes]
    write(tmp_path / "train.tfrecord", contents)
    write(tmp_path / "eval.tfrecord", contents[:1])
    assert "record 1: is 5x6, but the first is 4x6" in refusal(tmp_path)
    assert read(tmp_path, image_size=[4, 4]).train.columns["image"].shape == (2, 4, 4, 3)


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "has no files train*" in refusal(tmp_path)
    write(tmp_path / "train", [plain(1)])
    assert "dataset.split=0.2" in refusal(tmp_path)
    assert "has no files nothing*" in refusal(tmp_path, eval_files="nothing*")


def test_file_in_both_splits_is_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path)
    said = refusal(folder, train_files="*.tfrecord")
    assert "validation.tfrecord: is both trained on and evaluated" in said


@pytest.mark.parametrize("label", [10**12, -5])
def test_invalid_class_label_is_refused_for_split(tmp_path: Path, label: int) -> None:
    write(tmp_path / "train", [plain(1, [0]), plain(2, [label])])
    assert "must be 0 to 1048575" in refusal(tmp_path, split=0.5)


def test_compressed_file_is_recognised(tmp_path: Path) -> None:
    folder = dataset(tmp_path, files=1)
    file = folder / "train-0-of-1.tfrecord"
    file.write_bytes(gzip.compress(file.read_bytes()))
    assert "is compressed" in refusal(folder)


def test_excessive_record_length_is_refused(tmp_path: Path) -> None:
    for length, said in ((2**25, "is truncated"), (2**62, "at most 67,108,864 are read")):
        header = struct.pack("<Q", length)
        content = header + struct.pack("<I", compute_masked_checksum(header)) + b"x" * 40
        (tmp_path / "train").write_bytes(content)
        assert said in refusal(tmp_path)


def test_link_to_a_training_file_is_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path)
    (folder / "validation.tfrecord").unlink()
    (folder / "validation.tfrecord").symlink_to("train-0-of-3.tfrecord")
    assert "validation.tfrecord: is both trained on and evaluated" in refusal(folder)


def test_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "data")
    other = write(tmp_path / "other.tfrecord", [plain(1)])
    (folder / "train-9").symlink_to(other)
    assert "leads out of" in refusal(folder)


def test_file_changed_during_use_is_an_error(tmp_path: Path) -> None:
    raw = read(dataset(tmp_path, files=1))
    file = tmp_path / "train-0-of-1.tfrecord"
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"train-0-of-1.tfrecord, record 7: record 7 is damaged"):
        raw.train.columns["image"][np.array([7])]
    file.write_bytes(bytes(content[:50]))
    with pytest.raises(DataError, match="record 7 is truncated"):
        raw.train.columns["image"][np.array([7])]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), is_truncated=st.booleans())
def test_flipped_bits_and_truncation_are_detected(
    tmp_path: Path, place: float, bit: int, is_truncated: bool
) -> None:
    whole = write(tmp_path / "whole", [plain(n) for n in range(3)]).read_bytes()
    position = int(place * len(whole))
    broken = bytearray(whole)
    if is_truncated:
        del broken[position or 1 :]
    else:
        broken[position] ^= 1 << bit
    (tmp_path / "train").write_bytes(bytes(broken))
    try:
        records = [content for _, content in scan_records(tmp_path / "train")]
    except ValueError:
        return
    assert is_truncated
    assert records == [plain(n) for n in range(len(records))]


def test_conflicting_settings_are_refused(tmp_path: Path) -> None:
    for wrong in (
        {"split": 0.2, "eval_files": "x*"},
        {"image_size": [2, 2], "image_shape": [2, 2, 1]},
        {"buckets": [[4, 4]]},
        {"train_files": "../x"},
    ):
        with pytest.raises(ValidationError):
            TFRecord(**section(root=tmp_path, **wrong))


@pytest.mark.slow
def test_interleaved_training_is_equal_at_any_sink_and_resumed(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "data", files=4)
    rescale = "[{name:rescale,factor:0.0039,shift:0.0}]"

    def recipe(*overrides: str) -> Recipe:
        common = [
            f"cache.root={tmp_path / 'cache'}",
            "model=mlp",
            "schedule=constant",
            "dataset=tfrecord",
            f"dataset.root={folder}",
            "dataset.train.interleave=2",
            "dataset.train.buffer_size=6",
            f"dataset.train.ops={rescale}",
            f"dataset.eval.ops={rescale}",
            "train.batch_size=4",
        ]
        return load_recipe(overrides=[*common, *overrides])

    run(recipe("train.steps=20", "train.sink=false"), tmp_path / "off")
    for feed in ("stream", "resident"):
        run(recipe("train.steps=20", "train.sink_size=7", f"train.feed={feed}"), tmp_path / feed)
        outcome.assert_same_run(tmp_path / "off", tmp_path / feed)
    run(recipe("train.steps=9"), tmp_path / "broken")
    run(recipe("train.steps=20", f"train.resume={tmp_path / 'broken'}"))
    assert outcome.metrics(tmp_path / "broken") == outcome.metrics(tmp_path / "off")


def boxed(number: int, boxes: list[list[float]]) -> bytes:
    """An example of 4x4 pixels with bounding boxes (top, left, bottom, right)."""
    edges = np.array(boxes, np.float32).reshape(-1, 4).T
    names = ("ymin", "xmin", "ymax", "xmax")
    features = {f"object/{name}": edge for name, edge in zip(names, edges, strict=True)}
    return plain(number, **features)


def test_boxes_are_padded_with_zeros_to_one_shape(tmp_path: Path) -> None:
    first, second = [0.0, 0.25, 0.5, 1.0], [0.5, 0.5, 0.75, 0.75]
    write(tmp_path / "train", [boxed(1, [first]), boxed(2, []), plain(3)])
    write(tmp_path / "val", [boxed(1, [first, second])])
    data = read(tmp_path, box_key="object")
    zeros = [0.0] * 4
    expected = [[first, zeros], [zeros, zeros], [zeros, zeros]]
    np.testing.assert_array_equal(data.train.columns["boxes"][:], expected)
    np.testing.assert_array_equal(data.eval.columns["boxes"][:], [[first, second]])
    assert "boxes" not in read(tmp_path).train.columns


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([[0.5, 0.0, 0.25, 1.0]], "object: must have edges from 0 to 1, each minimum before its"),
        ([[0.0, 0.0, 0.5, 40.0]], "object: must have edges from 0 to 1"),
        ([[0.0, 0.0, 0.5, float("nan")]], "object: must have edges from 0 to 1"),
    ],
)
def test_invalid_boxes_are_refused(boxes: list[list[float]], said: str, tmp_path: Path) -> None:
    write(tmp_path / "train", [plain(1), boxed(2, boxes)])
    write(tmp_path / "val", [plain(1)])
    message = refusal(tmp_path, box_key="object")
    assert "record 1" in message
    assert said in message


def test_boxes_with_a_missing_edge_are_refused(tmp_path: Path) -> None:
    edges = {"object/ymin": np.zeros(1, np.float32), "object/xmin": np.zeros(1, np.float32)}
    write(tmp_path / "train", [plain(1, **edges)])
    write(tmp_path / "val", [plain(1)])
    said = "object: has other numbers of edges: ymin 1, xmin 1, ymax 0, xmax 0"
    assert said in refusal(tmp_path, box_key="object")


@pytest.mark.slow
def test_training_with_boxes_is_equal_at_any_sink(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    rng = np.random.default_rng(0)
    contents = []
    for number in range(24):
        low, size = rng.random(2) * 0.6, 0.1 + rng.random(2) * 0.3
        contents.append(boxed(number, [[*low, *(low + size)]]))
    write(folder / "train", contents)
    write(folder / "val", contents[:8])
    scaled = "{name: rescale, factor: 0.0039, shift: 0.0}"
    common = [
        f"cache.root={tmp_path / 'cache'}", "model=mlp", "dataset=tfrecord",
        f"dataset.root={folder}", "dataset.box_key=object", "train.batch_size=4", "train.steps=20",
        f"dataset.train.ops=[{{name: bounding_box_crop, size: [3, 3], max_attempts: 5}},{scaled}]",
        f"dataset.eval.ops=[{{name: center_crop, size: [3, 3]}},{scaled}]",
    ]  # fmt: skip
    run(load_recipe(overrides=[*common, "train.sink=false"]), tmp_path / "off")
    for feed in ("stream", "resident"):
        recipe = load_recipe(overrides=[*common, "train.sink_size=7", f"train.feed={feed}"])
        run(recipe, tmp_path / feed)
        outcome.assert_same_run(tmp_path / "off", tmp_path / feed)
    without = [item for item in common if "box_key" not in item]
    with pytest.raises(RecipeError, match="there is no column 'boxes'; the columns are image"):
        run(load_recipe(overrides=without), tmp_path / "without")
