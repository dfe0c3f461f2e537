"""Labels from the columns of a table: the task, the order of classes, and wrong values."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps
from pydantic import ValidationError

from pipeline.core.errors import DataError
from pipeline.data.columns import RawData
from pipeline.data.sources.class_folders import list_files
from pipeline.data.sources.image_columns import decode, find_common_size
from pipeline.data.sources.image_folder import ImageFolder, parse_labels
from tests.data.section import section


def picture(seed: int, height: int = 6, width: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_tree(root: Path, evaluation: str = "eval") -> Path:
    save(root / "train" / "owl" / "b.png", picture(1))
    save(root / "train" / "owl" / "a.PNG", picture(0))
    save(root / "train" / "ant" / "c.bmp", picture(2))
    save(root / evaluation / "ant" / "d.png", picture(3))
    save(root / evaluation / "owl" / "e.png", picture(4))
    return root


def folder(
    root: Path | None, image_size: list[int] | None = None, *, follow_links: bool = False
) -> ImageFolder:
    return ImageFolder(**section(root=root, image_size=image_size, follow_links=follow_links))


def read(root: Path, image_size: list[int] | None = None) -> RawData:
    return folder(root, image_size).read(root / "cache")


@pytest.mark.parametrize("evaluation", ["eval", "val", "test"])
def test_folders_become_classes(tmp_path: Path, evaluation: str) -> None:
    data = read(write_tree(tmp_path, evaluation))

    assert data.classes == ("ant", "owl")
    assert data.train.columns["label"][:].tolist() == [0, 1, 1]
    assert data.eval.columns["label"][:].tolist() == [0, 1]
    assert data.train.columns["label"].dtype == np.int32
    assert data.train.columns["image"].shape == (3, 6, 5, 3)
    assert data.train.columns["image"].dtype == np.uint8
    expected = np.stack([picture(seed) for seed in (2, 0, 1)])
    np.testing.assert_array_equal(data.train.columns["image"][:], expected)


def test_eval_comes_before_val_and_test(tmp_path: Path) -> None:
    write_tree(tmp_path, "test")
    shutil.copytree(tmp_path / "test", tmp_path / "val")
    save(tmp_path / "val" / "owl" / "more.png", picture(9))

    assert len(read(tmp_path).eval) == 3


@pytest.mark.parametrize(
    "indices",
    [
        slice(1, 3),
        slice(None, None, -1),
        slice(0, 0),
        np.array([2, 0, 2]),
        np.array([], np.int64),
        np.array([-1, 1]),
    ],
)
def test_column_is_indexed_like_an_array(tmp_path: Path, indices: slice | np.ndarray) -> None:
    column = read(write_tree(tmp_path)).train.columns["image"]

    stacked = np.stack([picture(seed) for seed in (2, 0, 1)])
    np.testing.assert_array_equal(column[indices], stacked[indices])
    assert column[indices].dtype == np.uint8


def test_index_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        read(write_tree(tmp_path)).train.columns["image"][np.array([3])]


def test_column_can_be_pickled(tmp_path: Path) -> None:
    column = read(write_tree(tmp_path)).train.columns["image"]

    np.testing.assert_array_equal(pickle.loads(pickle.dumps(column))[:], column[:])


def test_images_are_decoded_on_demand(tmp_path: Path) -> None:
    column = read(write_tree(tmp_path)).train.columns["image"]
    save(tmp_path / "train" / "ant" / "c.bmp", picture(7))
    (tmp_path / "train" / "owl" / "b.png").unlink()

    np.testing.assert_array_equal(column[:1], picture(7)[np.newaxis])
    with pytest.raises(DataError, match=r"owl/b.png: can't be read as an image: .*No such file"):
        column[:]


def test_every_kind_of_pixel_becomes_rgb(tmp_path: Path) -> None:
    colour = np.full((4, 4, 3), (200, 30, 90), np.uint8)
    grey = np.full((4, 4), 77, np.uint8)
    alpha = np.dstack([colour, np.full((4, 4), 128, np.uint8)])
    save(tmp_path / "grey.png", grey)
    save(tmp_path / "alpha.png", alpha)
    Image.fromarray(colour).quantize(4).save(tmp_path / "palette.png")

    np.testing.assert_array_equal(
        decode(str(tmp_path / "grey.png"), 4, 4), grey[..., None] + 0 * colour
    )
    np.testing.assert_array_equal(decode(str(tmp_path / "alpha.png"), 4, 4), colour)
    np.testing.assert_array_equal(decode(str(tmp_path / "palette.png"), 4, 4), colour)


def test_levels_of_16_bits_are_noted(tmp_path: Path) -> None:
    write_tree(tmp_path)
    save(tmp_path / "train" / "ant" / "deep.png", np.full((6, 5), 4_095, np.uint16))
    save(tmp_path / "train" / "ant" / "long.tif", np.full((6, 5), 40_000, np.uint16))
    assert decode(str(tmp_path / "train" / "ant" / "long.tif"), 6, 5).max() == 40_000 >> 8
    (note,) = read(tmp_path).notes
    assert note == (
        "images of 16 bits: the upper 8 are read; the brightest pixel of 2 such images is 40,000, "
        "so 157 grey levels are left"
    )
    (tmp_path / "train" / "ant" / "long.tif").unlink()
    (note,) = read(tmp_path).notes
    assert note.endswith("is 4,095, so 16 grey levels are left; multiply them to use all of 65,535")


def test_pages_that_are_not_read_are_noted(tmp_path: Path) -> None:
    write_tree(tmp_path)
    assert read(tmp_path).notes == ()
    path = tmp_path / "train" / "owl" / "Stack.TIF"
    pages = [Image.fromarray(np.full((6, 5), value, np.uint8)) for value in (7, 8, 9)]
    pages[0].save(path, save_all=True, append_images=pages[1:])
    assert decode(str(path), 6, 5).max() == 7
    data = read(tmp_path)
    (note,) = data.notes
    assert note == (
        f"1 of {len(data.train):,} files have several pages or frames, such as {path} with 3: only "
        "the first is read; save the others as files if they are images too"
    )


def test_image_of_32_bits_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path)
    save(tmp_path / "train" / "ant" / "deep.tif", np.zeros((6, 5), np.int32))
    with pytest.raises(DataError, match=r"deep.tif: .* its pixels are I, not 8 or 16 bits"):
        read(tmp_path)


def test_jpeg_is_decoded(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 16 * 16).reshape(16, 16)
    save(tmp_path / "ramp.jpeg", np.dstack([ramp] * 3).astype(np.uint8))

    decoded = decode(str(tmp_path / "ramp.jpeg"), 16, 16)

    assert np.abs(decoded - ramp[:, :, np.newaxis]).max() < 8


def test_image_size_resizes_bilinearly(tmp_path: Path) -> None:
    write_tree(tmp_path)
    save(tmp_path / "train" / "owl" / "wide.png", np.full((3, 9, 3), 50, np.uint8))
    # Halving pixels 0 and 100: Pillow's triangle, twice as wide, weighs them 3:1 at the edges.
    save(
        tmp_path / "train" / "owl" / "z.png",
        np.repeat([[[0] * 3, [100] * 3]], 2, 0).astype(np.uint8),
    )

    column = read(tmp_path, image_size=[4, 4]).train.columns["image"]

    assert column.shape == (5, 4, 4, 3)
    assert (column[3:4] == 50).all()
    np.testing.assert_array_equal(column[4:][0, 0, :, 0], [0, 25, 75, 100])


def test_image_of_another_size_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path)
    save(tmp_path / "eval" / "owl" / "odd.png", picture(5, height=7, width=2))

    message = r"eval/owl/odd.png: is 7x2, but .*ant/c.bmp is 6x5; set dataset.image_size=\[H,W\]"
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_unreadable_image_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "train" / "ant" / "x.jpg").write_bytes(b"not an image")

    with pytest.raises(DataError, match=r"ant/x.jpg: can't be read as an image: cannot identify"):
        read(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp"])
@settings(max_examples=30, deadline=None)
@given(removed=st.integers(0, 10_000), place=st.integers(0, 10_000), flip=st.integers(0, 255))
def test_damaged_image_is_decoded_or_named(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, removed: int, place: int, flip: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / f"image{suffix}"
    save(path, picture(0, 24, 24))
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= flip
    path.write_bytes(content[: len(content) - removed % len(content)])

    try:
        outcome = str(decode(str(path), 24, 24).shape)
    except DataError as error:
        outcome = str(error)
    assert outcome.startswith(("(24, 24, 3)", f"{path}: can't be read as an image"))


def test_image_of_another_format_is_refused(tmp_path: Path) -> None:
    Image.fromarray(picture(0)).save(tmp_path / "x.ppm")
    (tmp_path / "x.ppm").rename(tmp_path / "x.png")

    with pytest.raises(DataError, match=r"x.png: can't be read as an image: cannot identify"):
        decode(str(tmp_path / "x.png"), 6, 5)


def test_other_and_hidden_files_are_ignored(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "train" / "owl" / "notes.txt").touch()
    (tmp_path / "train" / "owl" / "._a.png").touch()
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "readme.md").touch()

    assert len(read(tmp_path).train) == 3


def test_splits_with_other_classes_are_refused(tmp_path: Path) -> None:
    write_tree(tmp_path)
    save(tmp_path / "eval" / "bee" / "f.png", picture(5))

    with pytest.raises(DataError, match=r"the same class folders; only one of .* has bee"):
        read(tmp_path)


@pytest.mark.parametrize("folder", ["train", "eval"])
def test_missing_split_is_refused(tmp_path: Path, folder: str) -> None:
    shutil.rmtree(write_tree(tmp_path) / folder)

    with pytest.raises(DataError, match="must have the folders train and one of eval, val, test"):
        read(tmp_path)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    for root in (tmp_path / "absent", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(DataError, match=f"^{root}: there is no such folder$"):
            read(root)


def test_split_without_classes_is_refused(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / name).mkdir()

    with pytest.raises(DataError, match="train: must have one folder per class; it has none"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["labels", "Annotations"])
def test_folder_for_detection_is_named(tmp_path: Path, name: str) -> None:
    for split in ("train", "val"):
        (tmp_path / "images" / split).mkdir(parents=True)
        (tmp_path / "images" / split / "1.png").touch()
    (tmp_path / name).mkdir()
    (tmp_path / name / "1.txt").write_text("0 0.5 0.5 0.2 0.2")
    with pytest.raises(DataError, match=rf"holds no image .*; if {name} has boxes of objects: the"):
        ImageFolder(**section(root=tmp_path, split=0.5)).read(tmp_path / "cache")
    with pytest.raises(DataError, match=rf"per class; it has none; if {name} has boxes of objects"):
        read(tmp_path / "images")


def test_class_without_images_is_refused(tmp_path: Path) -> None:
    (write_tree(tmp_path) / "train" / "ant" / "c.bmp").unlink()

    with pytest.raises(DataError, match=r"train/ant: holds no image \(.png, .jpg, .jpeg, .bmp, "):
        read(tmp_path)


def test_root_is_required() -> None:
    with pytest.raises(ValidationError, match="missing; it must be a folder with train/<class>/"):
        folder(None)


@pytest.mark.parametrize("size", [[4], [4, 4, 3], [0, 4]])
def test_image_size_is_height_and_width(tmp_path: Path, size: list[int]) -> None:
    with pytest.raises(ValidationError, match="image_size"):
        folder(tmp_path, size)


def test_first_frame_of_gif_and_webp_is_read(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (5, 6), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)

    for name in ("a.gif", "a.webp"):
        assert (decode(str(tmp_path / name), 6, 5) == (255, 0, 0)).all()


def test_images_in_deeper_folders_belong_to_the_class(tmp_path: Path) -> None:
    write_tree(tmp_path)
    save(tmp_path / "train" / "ant" / "b" / "y.png", picture(5))
    save(tmp_path / "train" / "ant" / "b" / "a" / "z.PNG", picture(6))
    save(tmp_path / "train" / "ant" / "a" / "x.webp", picture(7))
    save(tmp_path / "train" / "ant" / ".hidden" / "x.png", picture(8))
    (tmp_path / "train" / "ant" / "b" / "around").symlink_to(tmp_path / "train" / "ant")

    data = read(tmp_path)

    names = [Path(path).name for path in data.train.columns["image"].paths]  # type: ignore[attr-defined]
    assert names == ["c.bmp", "x.webp", "y.png", "z.PNG", "a.PNG", "b.png"]
    assert data.train.columns["label"][:].tolist() == [0, 0, 0, 0, 1, 1]
    assert data.notes == ()


@pytest.mark.parametrize("follow_links", [False, True])
def test_loops_of_links_are_left_out(tmp_path: Path, follow_links: bool) -> None:
    write_tree(tmp_path)
    train = tmp_path / "train"
    for link, target in (("loop", "loop"), ("ant/x", "y"), ("ant/y", "x"), ("ant/z.png", "z.png")):
        (train / link).symlink_to(target)
    spec = ImageFolder(**section(root=tmp_path, follow_links=follow_links))
    data = spec.read(tmp_path / "cache")
    assert data.targets.names == ("ant", "owl")
    assert data.notes[0].startswith("left out: 4 files (3 of no suffix, 1 of .png)")


def test_listing_reads_no_status_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network disk, each would take as long as to read a small image."""
    write_tree(tmp_path)
    read_status = os.stat
    asked = []

    def note(path: Any, *args: Any, **options: Any) -> os.stat_result:
        asked.append(os.fspath(path))
        return read_status(path, *args, **options)

    monkeypatch.setattr(os, "stat", note)
    images, _ = list_files(tmp_path / "train")
    assert len(images) == 3
    assert not set(images) & set(asked)


def test_left_out_files_are_counted(tmp_path: Path) -> None:
    write_tree(tmp_path)
    for name in ("ant/1.heic", "ant/deep/2.heic", "owl/notes.TXT", "beside.png", ".hidden"):
        (tmp_path / "train" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "train" / name).write_text("x")

    (note,) = read(tmp_path).notes

    beside = tmp_path / "train" / "beside.png"
    assert note == (
        f"left out: 4 files (2 of .heic, 1 of .png, 1 of .txt), such as {beside}; PNG, JPEG, BMP, "
        "GIF, WebP and TIFF in folders of classes are read"
    )


def test_folder_around_the_classes_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path / "photos")
    spec = ImageFolder(**section(root=tmp_path, split=0.5))

    with pytest.raises(
        DataError, match=r"has only photos, .* did you mean dataset.root=.*/photos\?"
    ):
        spec.read(tmp_path)


def test_split_of_a_folder_with_splits_is_refused(tmp_path: Path) -> None:
    spec = ImageFolder(**section(root=write_tree(tmp_path, "val"), split=0.5))

    with pytest.raises(DataError, match=r"has the folders train and val, so that dataset\.split"):
        spec.read(tmp_path)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("orientation", range(10))
def test_images_are_turned_by_exif(tmp_path: Path, suffix: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / f"a{suffix}"
    Image.fromarray(picture(0)).save(path, exif=exif, lossless=True)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))

    assert find_common_size([str(path)]) == expected.shape[:2]
    np.testing.assert_array_equal(decode(str(path), *expected.shape[:2]), expected)


def test_damaged_exif_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(picture(0)).save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff\x12")

    np.testing.assert_array_equal(decode(str(path), 6, 5), picture(0))


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".gif", ".webp"])
@pytest.mark.parametrize("size", [None, [6, 5]])
def test_truncated_images_are_reported_before_use(
    tmp_path: Path, suffix: str, size: list[int] | None
) -> None:
    write_tree(tmp_path)
    for name in ("q", "r"):
        path = tmp_path / "train" / "owl" / f"{name}{suffix}"
        save(path, picture(5))
        path.write_bytes(path.read_bytes()[:-60])

    message = rf"owl/q{suffix}: can't be read as an image: [^\n]+; nor can 1 of the others$"
    with pytest.raises(DataError, match=message):
        read(tmp_path, size)


def test_png_without_its_end_chunk_is_read(tmp_path: Path) -> None:
    path = write_tree(tmp_path) / "train" / "ant" / "c.png"
    save(path, picture(5))
    path.write_bytes(path.read_bytes()[:-12])

    np.testing.assert_array_equal(read(tmp_path).train.columns["image"][1:2][0], picture(5))


@pytest.mark.parametrize(
    ("columns", "task", "names"),
    [
        ({"kind": ["owl", "ant", "owl"]}, "classification", ("ant", "owl")),
        ({"kind": ["10", "9", "10"]}, "classification", ("9", "10")),
        ({"kind": ["1.0", "2.0", "1.0"]}, "classification", ("1.0", "2.0")),
        ({"price": ["1.5", "2", "1"]}, "regression", ("price",)),
        ({"a": ["1", "0", "1"], "b": ["0", "1", "1"]}, "multi_label", ("a", "b")),
        ({"a": ["1", "0", "1"], "b": ["0", "2", "1"]}, "regression", ("a", "b")),
    ],
)
def test_task_is_inferred_from_the_values(
    columns: dict[str, list[str]], task: str, names: tuple[str, ...]
) -> None:
    labels = parse_labels(columns, "auto")
    assert (labels.task, labels.names) == (task, names)
    if task == "classification":
        read = [labels.names[label] for label in labels.labels]
        assert read == columns["kind"]
        assert labels.groups is labels.labels
    else:
        read = np.array([list(map(float, column)) for column in columns.values()]).T
        np.testing.assert_array_equal(labels.labels, read)
        assert not labels.groups.any()


@pytest.mark.parametrize(
    ("columns", "task", "message"),
    [
        ({"a": ["x"], "b": ["y"]}, "classification", "classes are in one column, not in"),
        ({"a": ["1"], "b": ["2"]}, "multi_label", "has the value 2; multi_label needs 0 or 1"),
        ({"a": ["x"]}, "regression", "a"),
        ({"a": ["nan"]}, "regression", "a"),
    ],
)
def test_values_unfit_for_the_task_are_refused(
    columns: dict[str, list[str]], task: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_labels(columns, task)


def test_numbers_are_standardised_and_flags_are_not() -> None:
    train, evaluated = np.array([0, 2]), np.array([1])
    numbers = parse_labels({"price": ["1.5", "9", "2.5"]}, "regression")
    scaled, other, targets = numbers.split_labels(train, evaluated)
    np.testing.assert_allclose(scaled, [[-1], [1]])
    np.testing.assert_allclose(other, [[14]])
    assert targets.task == "regression"
    flags = parse_labels({"a": ["1", "0", "1"], "b": ["0", "1", "1"]}, "multi_label")
    assert flags.split_labels(train, evaluated)[0].tolist() == [[1, 0], [1, 1]]
