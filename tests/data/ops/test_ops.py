"""Map ops of every module: host and device agree, and fields and images are checked (D-05)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.registry import list_components
from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.affine import RandomAffine, RandomRotation
from pipeline.data.ops.color import RandomColorAdjust
from pipeline.data.ops.geometry import (
    CenterCrop,
    Cutout,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
)
from pipeline.data.ops.policies import AutoAugment, RandAugment
from pipeline.data.ops.resize import RandomResizedCrop, Resize
from pipeline.data.ops.together import MixUp
from pipeline.data.ops.values import Hwc2Chw, Normalize, OneHot, Rescale, TypeCast, Whiten
from tests.data.ops.op_calls import (
    BYTES,
    CIFAR,
    FLOATS,
    GREY,
    IMAGE,
    LABEL,
    on_host,
    op_id,
    spec_of,
    uniforms_for,
)

IMAGE_OPS = [
    Resize(size=(5, 20)),
    *(
        Resize(size=(5, 20), interpolation=name)
        for name in ("nearest", "cubic", "area", "pil_cubic", "antialias")
    ),
    Resize(size=(5, 6), interpolation="area"),
    Resize(size=4),
    *(
        RandomResizedCrop(size=(8, 5), interpolation=name)
        for name in ("linear", "nearest", "cubic")
    ),
    RandomCrop(size=(6, 9), padding=(1, 2, 3, 4)),
    CenterCrop(size=(4, 4)),
    RandomHorizontalFlip(),
    RandomVerticalFlip(),
    Pad(padding=(1, 2, 3, 4), fill=3),
    *(Pad(padding=(1, 2, 3, 4), mode=mode) for mode in ("edge", "reflect", "symmetric")),
    Cutout(size=3, holes=2),
    Cutout(size=3, holes=2, convention="mindspore"),
    *(RandomRotation(degrees=90.0, interpolation=name, fill=9) for name in ("linear", "nearest")),
    *(
        RandomAffine(
            degrees=40.0,
            translate_x=(-0.2, 0.3),
            translate_y=(-0.1, 0.1),
            scale=(0.5, 1.5),
            shear_x=(-20.0, 30.0),
            shear_y=(-5.0, 5.0),
            interpolation=name,
            fill=9,
        )
        for name in ("linear", "nearest")
    ),
    Whiten(),
    RandomColorAdjust(
        brightness=(0.6, 1.4), contrast=(0.6, 1.4), saturation=(0.6, 1.4), hue=(-0.1, 0.1)
    ),
    RandomColorAdjust(contrast=(0.7, 0.7), saturation=(1.3, 1.3)),
    RandomColorAdjust(hue=(0.1, 0.4)),
    RandomColorAdjust(),
    RandAugment(num_ops=3, fill=9),
    RandAugment(magnitude=20, interpolation="linear", convention="paper"),
    *(AutoAugment(policy=policy) for policy in ("imagenet", "cifar10", "svhn")),
    Rescale(factor=1 / 255, shift=-0.5),
    Normalize(**CIFAR),
    Hwc2Chw(),
    TypeCast(column="image", dtype="float32"),
]
FUSED = ("rescale", "resize", "random_resized_crop", "whiten")


def takes(op, values):
    """Whether the op says that it can be applied."""
    try:
        op.output(spec_of(values))
    except ValueError as error:
        return "uint8 images" not in str(error)
    return True


CASES = [
    pytest.param(op, values, id=f"{op_id(op)}-{values.dtype}")
    for op in IMAGE_OPS
    for values in (BYTES, FLOATS)
    if takes(op, values)
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "values"), CASES)
def test_host_and_compiled_device_agree(op, values):
    uniforms = uniforms_for(op)
    host = op(np, values, uniforms)
    device = jax.jit(lambda *arrays: op(jnp, *arrays))(values, uniforms)
    assert device.dtype == host.dtype
    contracted = op.name in FUSED and host.dtype == np.float32
    tolerance = 1e-6 if contracted else 0  # XLA may fuse a multiply and an add into one rounding
    np.testing.assert_allclose(device, host, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("op", "values"), CASES)
def test_output_matches_reported_shape_and_dtype(op, values):
    reported, got = op.output(spec_of(values)), on_host(op, values)
    assert (reported.shape, reported.dtype) == (got.shape[1:], got.dtype.name)


def test_every_op_is_registered():
    assert set(list_components("op")) == {
        "auto_augment",
        "bounding_box_crop",
        "center_crop",
        "constant_labels",
        "copy",
        "cut_mix",
        "cutout",
        "hwc2chw",
        "linear_map",
        "log_mel",
        "mix_up",
        "move_together",
        "normalize",
        "one_hot",
        "pad",
        "rand_augment",
        "random_affine",
        "random_color_adjust",
        "random_crop",
        "random_horizontal_flip",
        "random_resized_crop",
        "random_roll",
        "random_rotation",
        "progressive_size",
        "random_size",
        "random_vertical_flip",
        "rescale",
        "resize",
        "type_cast",
        "whiten",
    }


SPATIAL = [op for op in IMAGE_OPS if op.name not in ("rescale", "type_cast")]


@pytest.mark.parametrize("op", SPATIAL, ids=op_id)
def test_image_op_refuses_non_image_column(op):
    with pytest.raises(ValueError, match=r"\(height, width, channels\), not values of shape \(\)"):
        op.output(LABEL)


@pytest.mark.parametrize("op", SPATIAL, ids=op_id)
def test_image_op_refuses_channels_first(op):
    with pytest.raises(ValueError, match=r"not the \(3, 7, 9\) .* list it before hwc2chw"):
        op.output(Hwc2Chw().output(IMAGE))


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        (Resize, {"size": [32]}),
        (Resize, {"size": [0, 32]}),
        (Resize, {"size": ["32", 32]}),
        (Resize, {"size": [32, 32], "interpolation": "cubical"}),
        (Resize, {"size": 0}),
        (Resize, {"size": 2.5}),
        (Pad, {"padding": [1, 1]}),
        (Pad, {"padding": [-1, 0, 0, 0]}),
        (RandomHorizontalFlip, {"prob": 1.5}),
        (Pad, {"padding": [1, 1, 1, 1], "mode": "wrap"}),
        (Cutout, {"size": 8, "holes": 0}),
        (RandomResizedCrop, {"size": [8, 8], "scale": [0.9, 0.1]}),
        (RandomResizedCrop, {"size": [8, 8], "ratio": [0.0, 1.0]}),
        (RandomColorAdjust, {"contrast": [-0.5, 1.0]}),
        (RandomColorAdjust, {"hue": [-0.6, 0.1]}),
        (RandomRotation, {"degrees": -3.0}),
        (RandomRotation, {"degrees": 3.0, "fill": 256}),
        (RandAugment, {"num_magnitude_bins": 1}),
        (AutoAugment, {"policy": "mnist"}),
        (MixUp, {"alpha": 0.0}),
        (OneHot, {"classes": 3, "smoothing": 1.5}),
        (Normalize, {"mean": [0.0], "std": [0.0]}),
        (TypeCast, {"dtype": "int64"}),
        (OneHot, {"classes": 0}),
    ],
)
def test_wrong_field_is_refused(op, wrong):
    with pytest.raises(ValidationError, match=next(reversed(wrong))):
        op.model_validate(wrong)


def test_op_is_parsed_from_recipe_form():
    op = RandomCrop.model_validate(
        {"name": "random_crop", "size": [32, 32], "padding": [4, 4, 4, 4]}
    )
    assert op == RandomCrop(size=(32, 32), padding=(4, 4, 4, 4))
    assert op.output(ColumnSpec((32, 32, 3), "uint8")).shape == (32, 32, 3)


@pytest.mark.parametrize("op", [RandomColorAdjust(), RandAugment(), AutoAugment()], ids=op_id)
@pytest.mark.parametrize("wrong", [GREY, spec_of(FLOATS)], ids=["grey", "float32"])
def test_color_op_refuses_non_rgb_bytes(op, wrong):
    with pytest.raises(
        ValueError, match=r"needs uint8 images of 3 channels, not .* before rescale"
    ):
        op.output(wrong)
