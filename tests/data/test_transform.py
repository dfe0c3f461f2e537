"""Running a list of map ops: chaining (D-04), each op's own randomness, errors that name the op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.geometry import CenterCrop, Cutout, RandomCrop, RandomHorizontalFlip
from pipeline.data.ops.resize import Resize
from pipeline.data.ops.values import Hwc2Chw, Normalize, OneHot, Rescale, TypeCast
from pipeline.data.random import seed_words, uniforms
from pipeline.data.transform import apply_ops, compute_column_specs

SPECS = {"image": ColumnSpec((8, 8, 3), "uint8"), "label": ColumnSpec((), "uint8")}
RNG = np.random.default_rng(0)
COLUMNS = {
    "image": RNG.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8),
    "label": RNG.integers(0, 10, 6, dtype=np.uint8),
}
SEED = seed_words(9)
SAMPLE = np.array([5, 0, 3, 2, 4, 1], np.int32)
TRAINING = (
    RandomCrop(size=(8, 8), padding=(2, 2, 2, 2)),
    RandomHorizontalFlip(),
    Cutout(size=2),
    Resize(size=(12, 12)),
    Rescale(factor=1 / 255, shift=0.0),
    Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
    Hwc2Chw(),
    TypeCast(dtype="int32"),
)


def test_specs_are_computed_through_the_op_list():
    assert compute_column_specs(TRAINING, SPECS) == {
        "image": ColumnSpec((3, 12, 12), "float32", "chw"),
        "label": ColumnSpec((), "int32"),
    }


def test_empty_op_list_changes_nothing():
    assert compute_column_specs((), SPECS) == SPECS
    assert apply_ops(np, (), COLUMNS, SEED, 0, SAMPLE) == COLUMNS


def test_arrays_are_sharded_as_the_specs_say():
    result = apply_ops(np, TRAINING, COLUMNS, SEED, 0, SAMPLE)
    specs = compute_column_specs(TRAINING, SPECS)
    assert set(result) == set(specs)
    for name, values in result.items():
        assert (values.shape[1:], values.dtype.name) == (specs[name].shape, specs[name].dtype)


def test_ops_are_applied_in_sequence():
    ops = (CenterCrop(size=(4, 4)), Rescale(factor=2.0, shift=1.0), Rescale(factor=3.0, shift=0.0))
    result = apply_ops(np, ops, COLUMNS, SEED, 0, SAMPLE)
    expected = (COLUMNS["image"][:, 2:6, 2:6].astype(np.float32) * 2 + 1) * 3
    np.testing.assert_array_equal(result["image"], expected)
    np.testing.assert_array_equal(result["label"], COLUMNS["label"])


def test_op_draws_depend_on_its_position():
    ops = (RandomHorizontalFlip(), RandomHorizontalFlip())
    result = apply_ops(np, ops, COLUMNS, SEED, 4, SAMPLE)["image"]
    first, second = (uniforms(np, SEED, 4, SAMPLE, op, 1)[:, 0] < 0.5 for op in range(2))
    mirrored = first ^ second
    assert mirrored.any()
    assert not mirrored.all()
    images = COLUMNS["image"]
    expected = np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
    np.testing.assert_array_equal(result, expected)


def test_augmentation_of_a_sample_is_independent_of_its_batch():
    whole = apply_ops(np, TRAINING, COLUMNS, SEED, 7, SAMPLE)
    rows = [4, 1]
    part = {name: values[rows] for name, values in COLUMNS.items()}
    result = apply_ops(np, TRAINING, part, SEED, 7, SAMPLE[rows])
    np.testing.assert_array_equal(result["image"], whole["image"][rows])


def test_every_epoch_augments_differently():
    epochs = [apply_ops(np, TRAINING, COLUMNS, SEED, n, SAMPLE)["image"] for n in range(3)]
    assert len({images.tobytes() for images in epochs}) == 3


@pytest.mark.slow
def test_compiled_program_serves_all_seeds_and_matches_the_host():
    traces = []

    @jax.jit
    def compiled(columns, seed, epoch, sample):
        traces.append(seed)
        return apply_ops(jnp, TRAINING, columns, seed, epoch, sample)

    for seed, epoch in ((0, 0), (2**40 + 1, 3)):
        keys = (seed_words(seed), np.int32(epoch), SAMPLE)
        host = apply_ops(np, TRAINING, COLUMNS, *keys)
        device = compiled(COLUMNS, *keys)
        np.testing.assert_allclose(device["image"], host["image"], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(device["label"], host["label"])
    assert len(traces) == 1


def test_unfit_op_is_named_by_position_and_name():
    ops = (CenterCrop(size=(4, 4)), CenterCrop(size=(6, 6)))
    with pytest.raises(ValueError, match=r"^ops\.1 \(center_crop\): can't crop 6x6 from 4x4"):
        compute_column_specs(ops, SPECS)


def test_unknown_column_is_refused_with_known_columns():
    ops = (OneHot(classes=10), OneHot(column="labels", classes=10))
    expected = r"^ops\.1 \(one_hot\): there is no column 'labels'; the columns are image, label$"
    with pytest.raises(ValueError, match=expected):
        compute_column_specs(ops, SPECS)
