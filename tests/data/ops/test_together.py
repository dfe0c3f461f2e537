"""Columns that follow an image: masks, boxes and other images; a second view."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import MapOp
from pipeline.data.ops.affine import RandomAffine, RandomRotation
from pipeline.data.ops.geometry import (
    CenterCrop,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
)
from pipeline.data.ops.resize import RandomResizedCrop, RandomSize, Resize
from pipeline.data.ops.together import CopyColumn, MoveTogether, make_joint_ops
from pipeline.data.ops.values import Rescale
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops, compute_column_specs, list_read_columns

BATCH, HEIGHT, WIDTH = 40, 60, 80
SPECS = {
    "image": ColumnSpec((HEIGHT, WIDTH, 1), "uint8"),
    "mask": ColumnSpec((HEIGHT, WIDTH), "int32"),
    "depth": ColumnSpec((HEIGHT, WIDTH, 2), "uint8"),
    "boxes": ColumnSpec((3, 4), "float32"),
    "label": ColumnSpec((), "int32"),
}
OPS: list[MapOp] = [
    RandomHorizontalFlip(),
    RandomVerticalFlip(),
    CenterCrop(size=(40, 50)),
    RandomCrop(size=(40, 50)),
    RandomCrop(size=(60, 80), padding=(10, 5, 0, 20)),
    Pad(padding=(3, 6, 9, 12)),
    Resize(size=(90, 50), interpolation="nearest"),
    Resize(size=30, interpolation="nearest"),
    RandomSize(sizes=((90, 50), (30, 40)), interpolation="nearest"),
    RandomResizedCrop(size=(48, 48), scale=(0.3, 1.0), interpolation="nearest"),
    RandomRotation(degrees=40.0),
    RandomAffine(degrees=30.0, scale=(0.7, 1.3), translate_x=(-0.2, 0.2), shear_x=(-10.0, 10.0)),
]


def make_columns() -> dict[str, Any]:
    """Images with the pixels of two drawn boxes painted 1 and 2, and no third box."""
    draw = np.random.default_rng(3)
    tops = draw.integers(0, 30, (BATCH, 2))
    lefts = draw.integers(0, 20, (BATCH, 2)) + np.array([0, 40])
    heights, widths = draw.integers(8, 30, (BATCH, 2)), draw.integers(8, 20, (BATCH, 2))
    mask = np.zeros((BATCH, HEIGHT, WIDTH), np.int32)
    boxes = np.zeros((BATCH, 3, 4), np.float32)
    for i in range(BATCH):
        for j in range(2):
            top, left = tops[i, j], lefts[i, j]
            bottom, right = top + heights[i, j], left + widths[i, j]
            mask[i, top:bottom, left:right] = j + 1
            boxes[i, j] = [top / HEIGHT, left / WIDTH, bottom / HEIGHT, right / WIDTH]
    image = mask[..., None].astype(np.uint8)
    depth = np.concatenate([image, 3 * image], -1)
    label = np.zeros(BATCH, np.int32)
    return {"image": image, "mask": mask, "depth": depth, "boxes": boxes, "label": label}


def move(xp: Any, ops: tuple[MapOp, ...], columns: dict[str, Any], epoch: int = 0) -> Any:
    rows = np.arange(BATCH, dtype=np.int32)
    return apply_ops(xp, ops, columns, seed_words(5), np.int32(epoch), rows)


def find_extent(painted: np.ndarray) -> np.ndarray | None:
    """The shares (top, left, bottom, right) of painted pixels (height, width)."""
    rows, columns = painted.any(1).nonzero()[0], painted.any(0).nonzero()[0]
    if not len(rows):
        return None
    height, width = painted.shape
    edges = [rows[0] / height, columns[0] / width, (rows[-1] + 1) / height, (columns[-1] + 1)]
    return np.array([*edges[:3], edges[3] / width])


@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}-{op.model_dump_json()[:40]}")
def test_columns_follow_the_image(op: MapOp) -> None:
    """The oracle of boxes are the pixels that are painted in them, to a pixel and a half."""
    ops = (MoveTogether(op=op, also=("mask", "boxes", "depth"), fill=0),)
    columns = make_columns()
    specs = compute_column_specs(ops, SPECS)
    result = move(np, ops, columns)
    alone = move(np, (op,), {"image": columns["image"], "label": columns["label"]})
    np.testing.assert_array_equal(result["image"], alone["image"])
    np.testing.assert_array_equal(result["mask"], result["image"][..., 0])
    np.testing.assert_array_equal(result["depth"], result["image"] * np.array([1, 3], np.uint8))
    for name in ("image", "mask", "depth", "boxes"):
        assert result[name].shape == (BATCH, *specs[name].shape)
        assert result[name].dtype == specs[name].dtype
    height, width = result["mask"].shape[1:]
    scale = np.array([height, width, height, width])
    compared = 0
    assert not result["boxes"][:, 2].any()
    for i in range(BATCH):
        for j in range(2):
            box = result["boxes"][i, j]
            extent = find_extent(result["mask"][i] == j + 1)
            if extent is None:
                # At most a sliver without the middle of a pixel is left of a box outside.
                assert ((box[2:] - box[:2]) * scale[:2]).min() <= 1.5
                continue
            outside = (extent - box) * scale * [-1, -1, 1, 1]
            assert outside.max() <= 1.5
            # A turned box that is cut off at an edge is longer than what is left of its pixels.
            is_turned = op.name in ("random_rotation", "random_affine")
            if not is_turned or (box[:2].min() > 0 and box[2:].max() < 1):
                compared += 1
                assert -outside.min() <= 1.5
    assert compared > BATCH / 2


def test_flips_and_crops_of_boxes_are_exact() -> None:
    columns = make_columns()
    top, left, bottom, right = columns["boxes"][..., :2, :].transpose(2, 0, 1).astype(np.float64)
    flipped = move(np, (MoveTogether(op=RandomHorizontalFlip(prob=1.0), also=("boxes",)),), columns)
    expected = np.stack([top, 1 - right, bottom, 1 - left], -1)
    np.testing.assert_allclose(flipped["boxes"][:, :2], expected, atol=1e-6)
    crop = MoveTogether(op=CenterCrop(size=(40, 80)), also=("boxes",))
    rows = ((np.stack([top, bottom], -1) * 60 - 10) / 40).clip(0, 1)
    expected = np.stack([rows[..., 0], left, rows[..., 1], right], -1)
    expected = np.where((rows[..., 1] > rows[..., 0])[..., None], expected, 0)
    np.testing.assert_allclose(move(np, (crop,), columns)["boxes"][:, :2], expected, atol=1e-6)


@pytest.mark.slow
def test_host_and_compiled_step_agree() -> None:
    columns = make_columns()
    ops = tuple(
        MoveTogether(op=op, also=("mask", "boxes"), fill=9)
        for op in (RandomRotation(degrees=40.0), RandomResizedCrop(size=(48, 40)), OPS[0])
    )
    host = move(np, ops, columns)
    compiled = jax.jit(lambda columns: move(jnp, ops, columns))(columns)
    np.testing.assert_array_equal(host["image"], compiled["image"])
    np.testing.assert_array_equal(host["mask"], compiled["mask"])
    np.testing.assert_allclose(host["boxes"], compiled["boxes"], atol=1e-6)


def test_labels_of_pixels_follow_too() -> None:
    specs = {**SPECS, "label": SPECS["mask"]}
    columns = make_columns()
    columns["label"] = columns["mask"] + 1
    joined = MoveTogether(op=OPS[3], also=("boxes",))
    result = move(np, make_joint_ops((joined,), specs, None), columns)
    np.testing.assert_array_equal(result["label"], result["image"][..., 0] + 1)
    padded = MoveTogether(op=OPS[5], also=("mask",), fill=3)
    with pytest.raises(ValueError, match=r"fill = 3: moves labels .* dataset.ignore_index = 255"):
        make_joint_ops((padded,), specs, 255)


@pytest.mark.parametrize(
    ("also", "message"),
    [
        (("label",), r"^ops\.0 \(move_together\): also: label is int32 of shape \(\); must be a m"),
        (("other",), "there is no column 'other'"),
        (("image",), "must be different, and not the image"),
        (("small",), "small is 4x5, and the image 60x80; must have the same size"),
        (("mask",), "makes pixels that mask has no label for; set fill"),
    ],
)
def test_columns_that_cannot_follow_are_refused(also: tuple[str, ...], message: str) -> None:
    specs = {**SPECS, "small": ColumnSpec((4, 5), "uint8")}
    with pytest.raises(ValueError, match=message):
        compute_column_specs((MoveTogether(op=OPS[5], also=also),), specs)


def test_op_that_does_not_move_pixels_is_refused() -> None:
    with pytest.raises(ValidationError, match="rescale: must be an op that moves pixels"):
        MoveTogether(op=Rescale(factor=1.0, shift=0.0), also=("mask",))


def test_views_of_an_image_are_drawn_separately() -> None:
    """Each draw depends on (seed, epoch, sample, position of the op) alone."""
    flip = RandomCrop(size=(50, 70))
    ops = (CopyColumn(to="view"), flip, RandomCrop(size=(50, 70), column="view"))
    columns = {name: make_columns()[name] for name in ("image", "label")}
    first, again = (move(np, ops, columns, epoch=1) for _ in range(2))
    later = move(np, ops, columns, epoch=2)
    np.testing.assert_array_equal(first["view"], again["view"])
    assert (first["view"] != later["view"]).any()
    differing = (first["image"] != first["view"]).any(axis=(1, 2, 3))
    assert differing.mean() > 0.8
    # A sample has the same views in any batch.
    part = {name: column[7:9] for name, column in columns.items()}
    rows = np.arange(7, 9, dtype=np.int32)
    alone = apply_ops(np, ops, part, seed_words(5), np.int32(1), rows)
    np.testing.assert_array_equal(alone["view"], first["view"][7:9])
    assert compute_column_specs(ops, SPECS)["view"].shape == (50, 70, 1)
    assert list_read_columns(ops, ("image", "view")) == ("image",)


def test_copy_to_an_existing_column_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ops\.0 \(copy\): makes a column 'mask', which exists"):
        compute_column_specs((CopyColumn(to="mask"),), SPECS)


@pytest.mark.parametrize("column", ["boxes", "label"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_image_op_on_another_column_is_refused(op: MapOp, column: str) -> None:
    with pytest.raises(ValueError, match=rf"ops\.0 \({op.name}\): .*needs images"):
        compute_column_specs((op.model_copy(update={"column": column}),), SPECS)


def test_missing_columns_are_left_out_of_a_prediction() -> None:
    """A prediction has an image without a mask, and is given the same image."""
    ops = (MoveTogether(op=OPS[3], also=("mask",)),)
    columns = make_columns()
    assert list_read_columns(ops, ("image",)) == ("image",)
    assert list_read_columns(ops, ("mask",)) == ("image", "mask")
    alone = move(np, ops, {"image": columns["image"]})
    np.testing.assert_array_equal(alone["image"], move(np, ops, columns)["image"])
    specs = compute_column_specs(ops, {"image": SPECS["image"]}, leave_out=True)
    assert specs["image"].shape == (40, 50, 1)


def test_fill_must_fit_the_mask() -> None:
    op = MoveTogether(op=Pad(padding=(1, 1, 1, 1)), also=("mask",), fill=256)
    specs = {**SPECS, "mask": ColumnSpec((HEIGHT, WIDTH), "uint8")}
    with pytest.raises(ValueError, match="with the label 256, and labels are uint8; must be 0 to"):
        compute_column_specs([op], specs)
