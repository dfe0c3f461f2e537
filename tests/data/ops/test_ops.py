"""Map ops against plain loops and hand-worked numbers, on the host and compiled (D-05)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError
from scipy import stats

from pipeline.core.registry import components
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
from pipeline.data.ops.mixing import MixUp
from pipeline.data.ops.policies import AutoAugment, RandAugment
from pipeline.data.ops.resize import RandomResizedCrop, Resize
from pipeline.data.ops.values import Hwc2Chw, Normalize, OneHot, Rescale, TypeCast, Whiten

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (16, 7, 9, 3), dtype=np.uint8)
FLOATS = RNG.standard_normal((16, 7, 9, 3), dtype=np.float32)
LABELS = RNG.integers(0, 10, 16).astype(np.int32)
IMAGE = ColumnSpec((7, 9, 3), "uint8")
LABEL = ColumnSpec((), "int32")
CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}  # D-06

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
images = arrays(
    np.uint8, st.tuples(st.just(2), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
)
units = arrays(np.float32, (2, 2), elements=st.floats(0, 1, exclude_max=True, width=32))


def uniforms_for(op, batch=16):
    return np.random.default_rng(1).random((batch, op.draws), dtype=np.float32)


def on_host(op, values, uniforms=None):
    return op(np, values, uniforms_for(op, len(values)) if uniforms is None else uniforms)


def find_param_spec(values):
    return ColumnSpec(values.shape[1:], values.dtype.name)


def op_id(op):
    names = ("interpolation", "mode", "policy", "convention")
    return "-".join([op.name, *(getattr(op, name) for name in names if hasattr(op, name))])


def takes(op, values):
    """Whether the op says that it can be applied."""
    try:
        op.output(find_param_spec(values))
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
def test_output_has_shape_and_dtype(op, values):
    reported, got = op.output(find_param_spec(values)), on_host(op, values)
    assert (reported.shape, reported.dtype) == (got.shape[1:], got.dtype.name)


def test_every_op_is_registered():
    assert set(components("op")) == {
        "auto_augment",
        "center_crop",
        "cut_mix",
        "cutout",
        "hwc2chw",
        "mix_up",
        "normalize",
        "one_hot",
        "pad",
        "rand_augment",
        "random_affine",
        "random_color_adjust",
        "random_crop",
        "random_horizontal_flip",
        "random_resized_crop",
        "random_rotation",
        "random_size",
        "random_vertical_flip",
        "rescale",
        "resize",
        "type_cast",
        "whiten",
    }


SPATIAL = [op for op in IMAGE_OPS if op.name not in ("rescale", "type_cast")]


@pytest.mark.parametrize("op", SPATIAL, ids=op_id)
def test_an_image_op_refuses_what_is_not_an_image(op):
    with pytest.raises(ValueError, match=r"\(height, width, channels\), not values of shape \(\)"):
        op.output(LABEL)


@pytest.mark.parametrize("op", SPATIAL, ids=op_id)
def test_an_image_op_refuses_channels_first(op):
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
def test_a_wrong_field_is_refused(op, wrong):
    with pytest.raises(ValidationError, match=next(reversed(wrong))):
        op.model_validate(wrong)


def test_an_op_reads_as_a_recipe_writes_it():
    op = RandomCrop.model_validate(
        {"name": "random_crop", "size": [32, 32], "padding": [4, 4, 4, 4]}
    )
    assert op == RandomCrop(size=(32, 32), padding=(4, 4, 4, 4))
    assert op.output(ColumnSpec((32, 32, 3), "uint8")).shape == (32, 32, 3)


def bilinear(image, size):
    """Bilinear interpolation as its definition has it: a hat function over every source pixel."""
    height, width, _ = image.shape
    result = np.zeros((*size, image.shape[2]))
    for y in range(size[0]):
        for x in range(size[1]):
            row = min(max((y + 0.5) * height / size[0] - 0.5, 0), height - 1)
            column = min(max((x + 0.5) * width / size[1] - 0.5, 0), width - 1)
            for i in range(height):
                for j in range(width):
                    weight = max(0, 1 - abs(row - i)) * max(0, 1 - abs(column - j))
                    result[y, x] += weight * image[i, j]
    return result


SIZES = [(3, 4), (14, 18), (5, 20), (1, 1), (7, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_linear_resize_of_floats_is_bilinear(size):
    expected = [bilinear(image.astype(np.float64), size) for image in FLOATS[:2]]
    np.testing.assert_allclose(on_host(Resize(size=size), FLOATS[:2]), expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_linear_resize_of_bytes_is_bilinear_to_within_a_level(size):
    expected = np.array([bilinear(image, size) for image in BYTES[:2]])
    error = on_host(Resize(size=size), BYTES[:2]) - expected
    # Half a level of rounding, half from truncated products at quarters, and weights of 11 bits.
    assert abs(error).max() < 1.125
    assert abs(error).mean() < 0.35


def test_linear_resize_has_half_pixel_centres_and_clamps_the_edges():
    row = np.array([0, 100], np.uint8).reshape(1, 1, 2, 1)
    assert on_host(Resize(size=(1, 4)), row).ravel().tolist() == [0, 25, 75, 100]
    assert on_host(Resize(size=(1, 1)), row).ravel().tolist() == [50]


def test_nearest_resize_takes_the_pixel_at_the_floor():
    row = np.array([10, 20, 30, 40, 50], np.uint8).reshape(1, 1, 5, 1)
    wide, narrow = (Resize(size=(1, n), interpolation="nearest") for n in (10, 2))
    assert on_host(wide, row).ravel().tolist() == [10, 10, 20, 20, 30, 30, 40, 40, 50, 50]
    assert on_host(narrow, row).ravel().tolist() == [10, 30]


@pytest.mark.slow
@given(values=images, interpolation=st.sampled_from(["linear", "nearest"]))
def test_resize_to_the_same_size_changes_nothing(values, interpolation):
    op = Resize(size=values.shape[1:3], interpolation=interpolation)
    np.testing.assert_array_equal(on_host(op, values), values)
    floats = values.astype(np.float32) / 7
    np.testing.assert_array_equal(on_host(op, floats), floats)


@pytest.mark.slow
@given(level=st.integers(0, 255), height=st.integers(1, 300), width=st.integers(1, 300))
def test_resize_keeps_an_even_image_even(level, height, width):
    values = np.full((1, 3, 5, 1), level, np.uint8)
    assert (on_host(Resize(size=(height, width)), values) == level).all()


def test_resize_keeps_half_precision():
    assert on_host(Resize(size=(4, 4)), FLOATS.astype(np.float16)).dtype == np.float16


@pytest.mark.parametrize(
    ("size", "image", "expected"),
    [(4, (7, 9), (4, 5)), (4, (9, 7), (5, 4)), (20, (5, 5), (20, 20)), (3, (100, 7), (42, 3))],
)
def test_resize_to_one_number_keeps_the_aspect(size, image, expected):
    assert Resize(size=size).output(ColumnSpec((*image, 3), "uint8")).shape == (*expected, 3)


def test_pillows_kernels_take_bytes_alone():
    with pytest.raises(ValueError, match="antialias needs uint8 images, not float32; resize befor"):
        Resize(size=(4, 4), interpolation="antialias").output(find_param_spec(FLOATS))


def test_area_refuses_sums_that_leave_int32():
    with pytest.raises(ValueError, match="average over images as large as 3000x3000; crop first"):
        Resize(size=4, interpolation="area").output(ColumnSpec((3000, 3000, 3), "uint8"))


def test_resize_refuses_integers_other_than_bytes():
    with pytest.raises(ValueError, match="needs uint8, float16 or float32 images, not int32"):
        Resize(size=(4, 4)).output(ColumnSpec((7, 9, 3), "int32"))


def test_random_crop_crops_each_padded_image_where_its_uniforms_say():
    op = RandomCrop(size=(6, 5), padding=(1, 2, 3, 4))
    uniforms = uniforms_for(op)
    result = on_host(op, BYTES, uniforms)
    for image, (v, h), got in zip(BYTES, uniforms, result, strict=True):
        padded = np.zeros((10, 16, 3), np.uint8)
        padded[1:8, 3:12] = image
        top, left = int(v * 5), int(h * 12)  # 10 - 6 + 1 and 16 - 5 + 1 places
        np.testing.assert_array_equal(got, padded[top : top + 6, left : left + 5])


def test_random_crop_reaches_every_place():
    op = RandomCrop(size=(2, 2), padding=(1, 0, 0, 1))
    values = np.arange(1, 10, dtype=np.uint8).reshape(1, 3, 3, 1).repeat(400, axis=0)
    corners = {tuple(crop.ravel()) for crop in on_host(op, values)}
    padded = np.pad(values[0, :, :, 0], ((1, 0), (0, 1)))
    assert corners == {
        tuple(padded[y : y + 2, x : x + 2].ravel()) for y in range(3) for x in range(3)
    }


@pytest.mark.slow
@given(values=images, uniforms=units)
def test_random_crop_of_the_full_size_without_padding_changes_nothing(values, uniforms):
    op = RandomCrop(size=values.shape[1:3])
    np.testing.assert_array_equal(on_host(op, values, uniforms), values)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        (RandomCrop(size=(8, 9)), "8x9 from 7x9"),
        (RandomCrop(size=(9, 12), padding=(1, 1, 1, 1)), "9x12 from 9x11"),
        (CenterCrop(size=(7, 10)), "7x10 from 7x9"),
    ],
)
def test_a_crop_larger_than_the_image_is_refused(op, sizes):
    with pytest.raises(ValueError, match=f"can't crop {sizes}, padding included"):
        op.output(IMAGE)


@pytest.mark.parametrize(
    ("size", "rows", "columns"), [((7, 9), (0, 7), (0, 9)), ((4, 4), (1, 5), (2, 6))]
)
def test_center_crop_keeps_the_middle(size, rows, columns):
    expected = BYTES[:, slice(*rows), slice(*columns)]
    np.testing.assert_array_equal(on_host(CenterCrop(size=size), BYTES), expected)


def test_pad_surrounds_with_the_fill():
    values = np.array([[[[1], [2]]]], np.uint8)
    result = on_host(Pad(padding=(1, 0, 0, 2), fill=9), values)
    assert result[0, :, :, 0].tolist() == [[9, 9, 9, 9], [1, 2, 9, 9]]


@pytest.mark.slow
@given(
    values=images, padding=st.tuples(*[st.integers(0, 3)] * 4), fill=st.sampled_from([0, 7, 255])
)
def test_cropping_the_padding_away_gives_the_image_back(values, padding, fill):
    padded = on_host(Pad(padding=padding, fill=fill), values)
    top, _, left, _ = padding
    _, height, width, _ = values.shape
    np.testing.assert_array_equal(padded[:, top : top + height, left : left + width], values)
    assert padded.sum() == values.sum() + fill * (padded.size - values.size)


@pytest.mark.parametrize("fill", [-1, 256, 0.5])
def test_a_fill_that_is_no_byte_is_refused(fill):
    with pytest.raises(ValueError, match=rf"uint8 images with {float(fill)}; .* from 0 to 255"):
        Pad(padding=(1, 1, 1, 1), fill=fill).output(IMAGE)


def test_float_images_take_any_fill():
    op = Pad(padding=(1, 0, 0, 0), fill=-0.5)
    assert op.output(find_param_spec(FLOATS)).shape == (8, 9, 3)
    assert (on_host(op, FLOATS)[:, 0] == -0.5).all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("edge", [1, 1, 1, 2, 3, 3]),
        ("reflect", [3, 2, 1, 2, 3, 2]),
        ("symmetric", [2, 1, 1, 2, 3, 3]),
    ],
)
def test_pad_repeats_or_mirrors_the_image(mode, expected):
    values = np.array([1, 2, 3], np.uint8).reshape(1, 1, 3, 1)
    result = on_host(Pad(padding=(0, 0, 2, 1), mode=mode), values)
    assert result.ravel().tolist() == expected


def test_pad_refuses_to_mirror_more_than_there_is():
    with pytest.raises(ValueError, match="of 7x9; reflect allows at most 6 rows and 8 columns"):
        Pad(padding=(7, 0, 0, 0), mode="reflect").output(IMAGE)


@pytest.mark.slow
@given(values=images, uniforms=units, prob=st.floats(0, 1), vertical=st.booleans())
def test_flipping_twice_with_the_same_uniforms_changes_nothing(values, uniforms, prob, vertical):
    op = (RandomVerticalFlip if vertical else RandomHorizontalFlip)(prob=prob)
    once = on_host(op, values, uniforms)
    np.testing.assert_array_equal(on_host(op, once, uniforms), values)


def test_flip_mirrors_the_images_whose_uniform_is_below_prob():
    uniforms = np.array([[0.0], [0.29], [0.31], [0.99]], np.float32)
    result = on_host(RandomHorizontalFlip(prob=0.3), BYTES[:4], uniforms)
    mirrored = np.array([[list(reversed(row)) for row in image] for image in BYTES[:2]])
    np.testing.assert_array_equal(result, np.concatenate([mirrored, BYTES[2:4]]))


@pytest.mark.parametrize("prob", [0.0, 1.0])
def test_flip_is_sure_at_the_ends_of_prob(prob):
    extremes = np.array([[0.0], [1 - 2**-24]], np.float32)
    expected = BYTES[:2, :, ::-1] if prob else BYTES[:2]
    result = on_host(RandomHorizontalFlip(prob=prob), BYTES[:2], extremes)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("holes", [1, 3])
def test_cutout_blanks_squares_around_their_centres_clipped_at_the_edges(size, holes):
    op = Cutout(size=size, holes=holes)
    uniforms = uniforms_for(op)
    expected = FLOATS.copy()
    for image, drawn in zip(expected, uniforms, strict=True):
        for v, h in zip(drawn[:holes], drawn[holes:], strict=True):
            top, left = int(v * 7) - size // 2, int(h * 9) - size // 2
            image[max(top, 0) : top + size, max(left, 0) : left + size] = 0
    np.testing.assert_array_equal(on_host(op, FLOATS, uniforms), expected)


def test_a_hole_larger_than_the_image_is_refused():
    with pytest.raises(ValueError, match="a hole of 8x8 is larger than the image of 7x9"):
        Cutout(size=8).output(IMAGE)


def test_rescale_multiplies_then_adds():
    result = on_host(Rescale(factor=0.5, shift=-1), np.array([[0, 1, 255]], np.uint8))
    assert result.dtype == np.float32
    assert result.tolist() == [[-1, -0.5, 126.5]]


def test_two_rescales_are_the_normalisation_of_mnist():
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)  # D-06
    scaled = on_host(Rescale(factor=1 / 255, shift=0), pixels)
    twice = on_host(Rescale(factor=1 / 0.3081, shift=-0.1307 / 0.3081), scaled)
    once = on_host(Normalize(mean=(0.1307,), std=(0.3081,)), scaled)
    np.testing.assert_allclose(twice, once, atol=1e-6)


def test_normalize_works_channel_by_channel():
    result = on_host(Normalize(**CIFAR), FLOATS)
    for channel, (mean, std) in enumerate(zip(*CIFAR.values(), strict=True)):
        expected = (FLOATS[..., channel].astype(np.float64) - mean) / std
        np.testing.assert_allclose(result[..., channel], expected, rtol=1e-6, atol=1e-6)


def test_normalize_refuses_another_number_of_channels():
    with pytest.raises(ValueError, match="have 1 values for images of 3 channels"):
        Normalize(mean=(0.5,), std=(0.5,)).output(IMAGE)


def test_normalize_refuses_mean_and_std_of_different_length():
    with pytest.raises(ValidationError, match="mean has 3 values and std has 1"):
        Normalize(mean=(0.5, 0.5, 0.5), std=(0.5,))


def test_hwc2chw_moves_the_channels_first():
    reported, result = Hwc2Chw().output(IMAGE), on_host(Hwc2Chw(), BYTES)
    assert (reported.shape, reported.layout) == ((3, 7, 9), "chw")
    for channel in range(3):
        np.testing.assert_array_equal(result[:, channel], BYTES[..., channel])


def test_type_cast_takes_the_label_by_default():
    assert TypeCast(dtype="int32").column == "label"
    assert TypeCast(dtype="int32").output(ColumnSpec((), "uint8")) == LABEL
    assert on_host(TypeCast(dtype="int32"), LABELS.astype(np.uint8)).dtype == np.int32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
@pytest.mark.parametrize("xp", [np, jnp])
def test_one_hot_has_a_single_one_at_the_label(xp, dtype):
    op = OneHot(classes=10)
    result = op(xp, xp.asarray(LABELS.astype(dtype)), None)
    np.testing.assert_array_equal(result, np.eye(10, dtype=np.float32)[LABELS])
    assert result.dtype == np.float32
    assert op.column == "label"
    assert op.output(LABEL) == ColumnSpec((10,), "float32")


def test_one_hot_of_a_label_out_of_range_is_all_zeros():
    assert not on_host(OneHot(classes=4), np.array([-1, 4])).any()


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_one_hot_refuses_labels_that_are_no_integers(dtype):
    with pytest.raises(ValueError, match=f"needs integer labels, not {dtype}"):
        OneHot(classes=10).output(ColumnSpec((), dtype))


def test_one_hot_with_smoothing_shares_it_among_all_classes():
    result = on_host(OneHot(classes=4, smoothing=0.2), np.array([1, 7]))
    np.testing.assert_allclose(result, [[0.05, 0.85, 0.05, 0.05], [0, 0, 0, 0]], rtol=1e-6)


GREY = ColumnSpec((7, 9, 1), "uint8")


@pytest.mark.parametrize("op", [RandomColorAdjust(), RandAugment(), AutoAugment()], ids=op_id)
@pytest.mark.parametrize("wrong", [GREY, find_param_spec(FLOATS)], ids=["grey", "float32"])
def test_an_op_on_colours_refuses_what_is_not_rgb_bytes(op, wrong):
    with pytest.raises(
        ValueError, match=r"needs uint8 images of 3 channels, not .* before rescale"
    ):
        op.output(wrong)


def test_rotation_refuses_another_number_of_channels():
    with pytest.raises(ValueError, match="fill has 3 values for images of 1 channels"):
        RandomRotation(degrees=5.0, fill=(1, 2, 3)).output(GREY)


def test_rand_augment_refuses_a_magnitude_beyond_its_bins():
    with pytest.raises(
        ValidationError, match="magnitude = 31: must be below num_magnitude_bins = 31"
    ):
        RandAugment(magnitude=31)


def test_rotation_by_a_quarter_is_counter_clockwise():
    square = BYTES[:2, :7, :7]
    result = on_host(RandomRotation(degrees=(90.0, 90.0)), square)
    np.testing.assert_array_equal(result, np.rot90(square, axes=(1, 2)))


@pytest.mark.slow
def test_rotation_draws_evenly_from_its_range():
    marked = np.zeros((1, 41, 41, 1), np.uint8)
    marked[0, 20, 40] = 255  # Right of the centre, 20 pixels away.
    op = RandomRotation(degrees=(10.0, 50.0), interpolation="linear")
    rotated = on_host(op, marked.repeat(4000, axis=0))[..., 0].astype(float)
    row, column = ((rotated * place).sum(axis=(1, 2)) for place in np.mgrid[:41, :41] - 20)
    angles = np.degrees(np.arctan2(-row, column))
    assert stats.kstest(angles, stats.uniform(10, 40).cdf).pvalue > 1e-3


def test_a_crop_that_never_fits_is_the_largest_central_one():
    op = RandomResizedCrop(size=(4, 4), scale=(1.0, 1.0), ratio=(3.0, 3.0), max_attempts=3)
    box = op.draw_box(np, uniforms_for(op), 7, 9)
    assert [part[0] for part in (box.top, box.left, box.height, box.width)] == [2, 0, 3, 9]


@pytest.mark.slow
@given(uniforms=arrays(np.float32, (4, 22), elements=st.floats(0, 1, exclude_max=True, width=32)))
def test_a_resized_crop_lies_within_the_image(uniforms):
    box = RandomResizedCrop(size=(4, 4), scale=(0.01, 1.0), ratio=(0.1, 10.0)).draw_box(
        np, uniforms, 7, 9
    )
    for first, length, side in ((box.top, box.height, 7), (box.left, box.width, 9)):
        assert ((first >= 0) & (length >= 1) & (first + length <= side)).all()


@pytest.mark.parametrize("interpolation", ["linear", "nearest", "cubic"])
def test_a_resized_crop_is_a_crop_that_is_resized(interpolation):
    op = RandomResizedCrop(size=(8, 5), interpolation=interpolation)
    uniforms = uniforms_for(op)
    box = op.draw_box(np, uniforms, 7, 9)
    resize = Resize(size=(8, 5), interpolation=interpolation)
    for n, got in enumerate(on_host(op, BYTES, uniforms)):
        top, left, height, width = (
            int(part[n]) for part in (box.top, box.left, box.height, box.width)
        )
        crop = BYTES[n : n + 1, top : top + height, left : left + width]
        np.testing.assert_array_equal(got, on_host(resize, crop)[0])


def test_colour_changes_by_nothing_change_nothing():
    op = RandomColorAdjust(brightness=(1.0, 1.0), contrast=(1.0, 1.0), saturation=(1.0, 1.0))
    np.testing.assert_array_equal(on_host(op, BYTES), BYTES)


def test_drawn_factors_are_those_of_a_blend_in_exact_arithmetic():
    op = RandomColorAdjust(saturation=(0.5, 1.5))
    uniforms = uniforms_for(op)
    lumas = BYTES @ np.array([0.299, 0.587, 0.114])
    factors = 0.5 + uniforms[:, 2]
    expected = lumas[..., None] + (BYTES - lumas[..., None]) * factors[:, None, None, None]
    assert abs(on_host(op, BYTES, uniforms) - expected.clip(0, 255)).max() < 1.1
