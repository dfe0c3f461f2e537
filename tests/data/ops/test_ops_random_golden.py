"""Draws of random ops and of MindSpore's, as two samples of one distribution (D-15)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pipeline.data.ops.color import RandomColorAdjust
from pipeline.data.ops.geometry import Cutout, RandomCrop, RandomVerticalFlip
from pipeline.data.ops.policies import AutoAugment, RandAugment
from pipeline.data.ops.resize import RandomResizedCrop
from pipeline.data.ops.together import CutMix, MixUp, mix_up
from pipeline.data.random import seed_words, uniforms

with np.load(Path(__file__).parents[2] / "golden/map_ops/random.npz") as stored:
    GOLDEN = dict(stored)
HEIGHT, WIDTH, BATCH, MIXED = 18, 24, 4, (6, 8)
SAMPLES = 12_000
LEAST_P = 1e-3


def drawn(op, samples=SAMPLES):
    """The op's own draws for a number of samples."""
    return uniforms(np, seed_words(31), 0, np.arange(samples), 0, op.draws)


def places():
    rows, columns = np.mgrid[1 : HEIGHT + 1, 1 : WIDTH + 1]
    return np.stack([rows, columns, rows], axis=-1).astype(np.uint8)[None]


def assert_alike(theirs, ours):
    """Pearson's test of two samples; what is rare counts together."""
    counts = [Counter(map(bytes, np.ascontiguousarray(sample))) for sample in (theirs, ours)]
    sizes = np.array([len(theirs), len(ours)])
    keys = sorted(counts[0] | counts[1])
    table = np.array([[count[key] for key in keys] for count in counts])
    common = table.sum(axis=0) * sizes.min() / sizes.sum() >= 8
    rare = table[:, ~common].sum(axis=1, keepdims=True)
    table = np.concatenate([table[:, common], rare] if rare.all() else [table[:, common]], axis=1)
    assert table.shape[1] > 1
    assert stats.chi2_contingency(table).pvalue > LEAST_P


def test_statistic_distinguishes_distributions():
    rng = np.random.default_rng(0)
    fair, bent = rng.random(4000) < 0.5, rng.random(SAMPLES) < 0.45
    with pytest.raises(AssertionError):
        assert_alike(fair[:, None], bent[:, None])


def test_random_resized_crop_boxes_match_golden():
    op = RandomResizedCrop(size=(64, 64), scale=(0.2, 0.9), ratio=(0.5, 3.0), max_attempts=2)
    box = op.draw_box(np, drawn(op), HEIGHT, WIDTH)
    ours = np.stack([box.top, box.left, box.height, box.width], axis=-1).astype(np.int8)
    theirs = GOLDEN["resized_crops"]
    for first, last in ((0, 1), (1, 2), (2, 3), (3, 4), (2, 4)):
        assert_alike(theirs[:, first:last], ours[:, first:last])


@pytest.mark.medium
def test_random_crop_places_match_golden():
    op = RandomCrop(size=(HEIGHT, WIDTH), padding=(1, 3, 2, 0))
    ours = op(np, places().repeat(SAMPLES, axis=0), drawn(op))[:, -5, 5, :2]
    assert_alike(GOLDEN["crops"], ours.astype(np.int8))


@pytest.mark.medium
def test_cutout_holes_match_golden():
    op = Cutout(size=5, convention="mindspore")
    blank = op(np, places().repeat(SAMPLES, axis=0), drawn(op))[..., 0] == 0
    ours = np.stack([edge for axis in (2, 1) for edge in edges(blank.any(axis=axis))], axis=-1)
    theirs = GOLDEN["cutouts"]
    for part in (slice(0, 2), slice(2, 4)):
        assert_alike(theirs[:, part], ours[:, part].astype(np.int8))


def edges(covered):
    """First and last place that is covered in each row, -1 where none is."""
    length = covered.shape[1]
    some = covered.any(axis=1)
    last = length - 1 - covered[:, ::-1].argmax(axis=1)
    return np.where(some, covered.argmax(axis=1), -1), np.where(some, last, -1)


def test_vertical_flip_share_matches_golden():
    op = RandomVerticalFlip(prob=0.3)
    ours = op(np, places().repeat(SAMPLES, axis=0), drawn(op))[:, 0, 0, 0] != 1
    assert_alike(GOLDEN["flips"][:, None], ours[:, None].astype(np.int8))


def test_brightness_factors_match_golden():
    op = RandomColorAdjust(brightness=(0.25, 1.0))
    ours = op(np, np.full((SAMPLES, 1, 1, 3), 200, np.uint8), drawn(op))[:, 0, 0, :1]
    assert stats.ks_2samp(GOLDEN["brightness"], ours[:, 0]).pvalue > LEAST_P
    assert (GOLDEN["brightness"].min(), GOLDEN["brightness"].max()) == (ours.min(), ours.max())


POLICIES = {
    "auto_augment/imagenet/nearest": AutoAugment(policy="imagenet", fill=7),
    "auto_augment/cifar10/nearest": AutoAugment(policy="cifar10", fill=7),
    "auto_augment/svhn/nearest": AutoAugment(policy="svhn", fill=7),
    "random_color_adjust/0/orders": RandomColorAdjust(
        brightness=(0.5, 0.5), contrast=(1.5, 1.5), saturation=(1.25, 1.25), hue=(0.2, 0.2)
    ),
} | {
    f"rand_augment/{magnitude}/{interpolation}": RandAugment(
        num_ops=1, magnitude=magnitude, interpolation=interpolation, fill=7
    )
    for magnitude in (1, 9, 22)
    for interpolation in ("nearest", "linear")
}


@pytest.mark.slow
@pytest.mark.parametrize("key", POLICIES)
def test_policy_outcomes_match_golden(key):
    op = POLICIES[key]
    image = GOLDEN["policy_image"][None]
    ours = op(np, image.repeat(SAMPLES, axis=0), drawn(op)).reshape(SAMPLES, -1)
    images, counts = GOLDEN[f"{key}/images"], GOLDEN[f"{key}/counts"]
    theirs = images.reshape(len(images), -1)
    possible = set(map(bytes, ours))
    seen = counts >= 3  # Of 4,000; what is rarer than that may be missing among ours.
    assert [row for row in map(bytes, theirs[seen]) if row not in possible] == []
    assert_alike(theirs.repeat(counts, axis=0), ours)


def test_mix_up_matches_golden_for_equal_partners_and_lambda():
    images, labels = GOLDEN["mix_up_images"], np.eye(BATCH, dtype=np.float32)
    for mixed, mixed_labels in zip(GOLDEN["mix_up_mixed"], GOLDEN["mix_up_labels"], strict=False):
        shares = lambdas(mixed_labels)
        if len(shares) == 0:
            continue
        others = np.where(labels == 1, 0, mixed_labels)
        partner = np.where(others.any(axis=1), others.argmax(axis=1), np.arange(BATCH))
        got = mix_up(np, (images, labels), partner, shares[:1], np.zeros(1, np.int32))
        np.testing.assert_array_equal(got[0], mixed)
        np.testing.assert_allclose(got[1], mixed_labels, atol=1e-6)


def lambdas(labels):
    """A batch's lambda, once for every sample that has another one for a partner."""
    own = np.diagonal(labels, axis1=-2, axis2=-1)
    return own[own < 1]


@pytest.mark.slow
def test_mix_up_lambdas_and_partners_match_golden():
    theirs = GOLDEN["mix_up_labels"]
    op = MixUp(alpha=0.4)
    labels = np.eye(BATCH, dtype=np.float32)
    blank = np.zeros((BATCH, 1, 1, 1), np.uint8)
    batches = drawn(op, 4000 * BATCH).reshape(-1, BATCH, op.draws)
    ours = [op.map(np, (blank, labels), batch)[1] for batch in batches]
    firsts = [
        [lambdas(label)[0] for label in some if len(lambdas(label))] for some in (theirs, ours)
    ]
    assert stats.ks_2samp(*firsts).pvalue > LEAST_P
    assert_alike(partners_in(theirs), partners_in(np.stack(ours)))


def partners_in(labels):
    """The permutation of batches of labels, int8 (batches, BATCH)."""
    others = np.where(np.eye(BATCH) == 1, 0, labels)
    return np.where(others.any(axis=-1), others.argmax(axis=-1), np.arange(BATCH)).astype(np.int8)


@pytest.mark.slow
def test_cut_mix_boxes_match_golden():
    op, ours = CutMix(prob=0.7), []
    levels = np.arange(1, BATCH + 1, dtype=np.uint8)[:, None, None, None]
    images = np.broadcast_to(levels, (BATCH, *MIXED, 1))
    for batch in drawn(op, SAMPLES).reshape(-1, BATCH, op.draws):
        mixed, labels = op.map(np, (images, np.eye(BATCH, dtype=np.float32)), batch)
        box = mixed[..., 0] != levels[..., 0]
        result = np.stack([edge for axis in (2, 1) for edge in edges(box.any(axis=axis))], axis=-1)
        changed = box.any(axis=(1, 2))
        share = 1 - box.mean(axis=(1, 2))
        np.testing.assert_allclose(np.diagonal(labels)[changed], share[changed], atol=1e-6)
        ours.append(result + np.where(changed[:, None], [0, 1, 0, 1], 1))
    theirs = GOLDEN["cut_mixes"][:, 1:5].astype(np.int8)
    ours = np.concatenate(ours).astype(np.int8)
    for part in (slice(0, 2), slice(2, 4), slice(0, 4)):
        assert_alike(theirs[:, part], ours[:, part])
