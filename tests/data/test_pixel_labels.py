"""Labels of pixels follow their pixels through map ops (D-05)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.registry import list_components
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import MapOp
from pipeline.data.ops.affine import RandomAffine, RandomRotation
from pipeline.data.ops.geometry import (
    CenterCrop,
    Cutout,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
)
from pipeline.data.ops.policies import AutoAugment, RandAugment
from pipeline.data.ops.resize import ProgressiveSize, RandomResizedCrop, RandomSize, Resize
from pipeline.data.ops.together import make_joint_ops
from pipeline.data.ops.values import Hwc2Chw, OneHot, Rescale
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops, compute_column_specs, list_read_columns

BATCH, HEIGHT, WIDTH = 6, 9, 12
SPECS = {
    "image": ColumnSpec((HEIGHT, WIDTH, 3), "uint8"),
    "label": ColumnSpec((HEIGHT, WIDTH), "int32"),
}
NONE = -100

EXACT: list[MapOp] = [
    RandomHorizontalFlip(),
    RandomVerticalFlip(),
    CenterCrop(size=(5, 8)),
    RandomCrop(size=(6, 7)),
    RandomCrop(size=(9, 12), padding=(2, 1, 0, 3)),
    Pad(padding=(1, 2, 3, 4)),
    *(Pad(padding=(1, 2, 3, 4), mode=mode) for mode in ("edge", "reflect", "symmetric")),
    Resize(size=(5, 20), interpolation="nearest"),
    RandomResizedCrop(size=(8, 5), interpolation="nearest"),
    RandomRotation(degrees=60.0, fill=255),
    RandomAffine(degrees=60.0, scale=(0.7, 1.3), shear_x=(-20.0, 20.0), fill=255),
    RandomSize(sizes=((5, 20), (3, 4)), interpolation="nearest"),
    ProgressiveSize(sizes=((5, 20), (3, 4)), after_epochs=(1,), interpolation="nearest"),
]
"""Ops that copy pixels, so that a label can be read off the pixel that it belongs to."""


def columns() -> dict[str, Any]:
    """Pixels that say where they were, 1 and up: so does their label."""
    numbers = np.arange(1, BATCH * HEIGHT * WIDTH + 1).reshape(BATCH, HEIGHT, WIDTH)
    image = np.stack([numbers % 101, numbers % 103, numbers % 107], -1).astype(np.uint8)
    return {"image": image, "label": numbers.astype(np.int32)}


def mapped(xp: Any, ops: tuple[MapOp, ...], given: dict[str, Any], epoch: int = 0) -> Any:
    rows = np.arange(BATCH, dtype=np.int32)
    return apply_ops(xp, ops, given, seed_words(5), np.int32(epoch), rows)


@pytest.mark.parametrize("op", EXACT, ids=lambda op: f"{op.name}-{op.model_dump_json()[:40]}")
def test_pixel_labels_move_with_their_pixels(op: MapOp) -> None:
    given = columns()
    ops = make_joint_ops((op,), SPECS, NONE)
    result = mapped(np, ops, given)
    alone = mapped(np, (op,), {"image": given["image"]} | {"label": np.zeros(BATCH, np.int32)})
    assert np.array_equal(result["image"], alone["image"])
    where = np.argwhere(result["label"] != NONE)
    assert len(where) > 0
    for sample, row, column in where:
        number = result["label"][sample, row, column]
        expected = [number % 101, number % 103, number % 107]
        assert result["image"][sample, row, column].tolist() == expected
    uncovered = result["image"][result["label"] == NONE]
    assert (uncovered == (255 if getattr(op, "fill", 0) == 255 else 0)).all()
    specs = compute_column_specs(ops, SPECS)
    assert (BATCH, *specs["label"].shape) == result["label"].shape
    assert result["label"].dtype == np.int32


@pytest.mark.slow
def test_host_and_compiled_step_agree() -> None:
    given = columns()
    ops = make_joint_ops(
        (
            RandomRotation(degrees=60.0),
            RandomResizedCrop(size=(8, 5)),
            RandomHorizontalFlip(),
            Pad(padding=(1, 0, 2, 0)),
        ),
        SPECS,
        -100,
    )
    host = mapped(np, ops, given)
    compiled = jax.jit(lambda given: mapped(jnp, ops, given))(given)
    assert np.array_equal(host["label"], compiled["label"])
    assert np.array_equal(host["image"], compiled["image"])


@pytest.mark.parametrize("name", ["linear", "cubic", "area"])
def test_labels_are_resized_to_the_nearest_pixel(name: str) -> None:
    """A label between two classes would be a third one."""
    given = columns()
    given["label"] = given["label"] % 2 * 7
    ops = make_joint_ops((Resize(size=(5, 7), interpolation=name),), SPECS, None)
    result = mapped(np, ops, given)
    assert set(np.unique(result["label"])) == {0, 7}
    nearest = make_joint_ops((Resize(size=(5, 7), interpolation="nearest"),), SPECS, None)
    assert np.array_equal(result["label"], mapped(np, nearest, given)["label"])


def test_row_labels_move_with_their_rows() -> None:
    """Images of width 1 have a label for each row."""
    specs = {"image": ColumnSpec((10, 1, 1), "float32"), "label": ColumnSpec((10,), "int32")}
    ops = make_joint_ops((RandomCrop(size=(4, 1)),), specs, None)
    tokens = np.arange(BATCH * 10).reshape(BATCH, 10)
    given = {"image": tokens[..., None, None].astype(np.float32), "label": tokens.astype(np.int32)}
    result = mapped(np, ops, given)
    assert result["label"].shape == (BATCH, 4)
    assert np.array_equal(result["image"][..., 0, 0], result["label"])
    assert len({int(row[0]) % 10 for row in result["label"]}) > 1
    with pytest.raises(ValueError, match=r"^ops\.0 \(pad\): makes \(10, 3, 1\) of .* the width 1"):
        compute_column_specs(make_joint_ops((Pad(padding=(0, 0, 1, 1)),), specs, 0), specs)


@pytest.mark.parametrize(
    "label",
    [
        ColumnSpec((), "int32"),
        ColumnSpec((10,), "float32"),
        ColumnSpec((9,), "int32"),
    ],
)
def test_labels_without_position_are_unchanged(label: ColumnSpec) -> None:
    """One a sample, one-hot, or several of them, as many as the image is high."""
    ops = (RandomHorizontalFlip(), RandAugment(), Rescale(factor=1.0, shift=0.0))
    assert make_joint_ops(ops, {**SPECS, "label": label}, None) == ops


def test_op_on_a_missing_column_is_named() -> None:
    ops = (RandomHorizontalFlip(),)
    specs = {"tokens": ColumnSpec((10,), "int32"), "label": ColumnSpec((10,), "int32")}
    expected = r"^ops\.0 \(random_horizontal_flip\): there is no column 'image'; the columns"
    with pytest.raises(ValueError, match=expected):
        compute_column_specs(make_joint_ops(ops, specs, None), specs)


def test_ops_without_shifts_leave_labels_unchanged() -> None:
    ops = (Cutout(size=2), Rescale(factor=1.0, shift=0.0), Hwc2Chw())
    assert make_joint_ops(ops, SPECS, None) == ops


@pytest.mark.parametrize(
    ("ops", "label", "message"),
    [
        (
            [Cutout(size=2), Pad(padding=(1, 0, 0, 0))],
            SPECS["label"],
            r"^ops\.1 \(pad\): makes pixels that have no label; set dataset\.ignore_index to the",
        ),
        ([RandomRotation(degrees=5.0)], SPECS["label"], r"^ops\.0 \(random_rotation\): makes pix"),
        (
            [RandomCrop(size=(9, 12), padding=(1, 1, 1, 1))],
            SPECS["label"],
            r"^ops\.0 \(random_crop\): makes pixels that have no label",
        ),
        (
            [RandAugment()],
            SPECS["label"],
            r"^ops\.0 \(rand_augment\): moves pixels in a way that labels of pixels can't follow",
        ),
        ([AutoAugment()], SPECS["label"], r"^ops\.0 \(auto_augment\): moves pixels in a way"),
        (
            [OneHot(classes=4), RandomHorizontalFlip()],
            SPECS["label"],
            r"^ops\.1 \(random_horizontal_flip\): .* float32 of shape \(9, 12, 4\); list the ",
        ),
        (
            [RandomHorizontalFlip()],
            ColumnSpec((3, 4), "int32"),
            r"^ops\.0 .*images of shape \(9, 12, 3\), and labels of shape \(3, 4\) are not one for",
        ),
    ],
)
def test_ops_unsupported_for_labels_are_refused(
    ops: list[MapOp], label: ColumnSpec, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_joint_ops(ops, {**SPECS, "label": label}, None)


def test_every_op_that_moves_pixels_is_marked() -> None:
    """Those that are known to; an op that is added to the package has to be put on either side."""
    moving = {
        name for name, op in list_components("op").items() if getattr(op, "moves_pixels", False)
    }
    still = {
        *("cut_mix", "mix_up", "cutout", "hwc2chw", "linear_map", "normalize", "one_hot"),
        *("constant_labels", "random_color_adjust", "rescale", "type_cast", "whiten"),
        *("copy", "log_mel", "random_roll"),
    }
    assert moving == {op.name for op in EXACT} | {
        "auto_augment",
        "bounding_box_crop",
        "move_together",
        "rand_augment",
    }
    assert moving | still == set(list_components("op"))


@pytest.mark.parametrize("op", [Pad(padding=(1, 1, 1, 1)), RandomRotation(degrees=9.0)])
def test_label_of_the_border_must_fit_the_labels(op: MapOp) -> None:
    specs = {**SPECS, "label": ColumnSpec((HEIGHT, WIDTH), "uint8")}
    with pytest.raises(ValueError, match=r"with the label -100, and labels are uint8; must be 0"):
        make_joint_ops((op,), specs, NONE)
    make_joint_ops((op,), specs, 255)


def test_prediction_without_labels_applies_the_op() -> None:
    ops = make_joint_ops((CenterCrop(size=(5, 8)),), SPECS, None)
    assert list_read_columns(ops, ["image"]) == ("image",)
    image = {"image": columns()["image"]}
    assert apply_ops(np, ops, image, seed_words(0), 0, np.arange(BATCH))["image"].shape[1] == 5
