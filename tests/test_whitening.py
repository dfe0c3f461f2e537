"""The whitening example: responses of its filters are uncorrelated, with a variance of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.whitening import whitening

ROOT = Path(__file__).parents[1]


def test_responses_are_uncorrelated() -> None:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(3, 3))
    images = rng.normal(size=(64, 12, 12, 3)) @ mixing
    filters = whitening(images)
    assert (filters.shape, filters.dtype) == ((2, 2, 3, 24), np.float32)
    np.testing.assert_array_equal(filters[..., :12], -filters[..., 12:])
    patches = np.lib.stride_tricks.sliding_window_view(images, (2, 2), axis=(1, 2))
    responses = np.einsum("bhwcij,ijcf->bhwf", patches, filters[..., :12]).reshape(-1, 12)
    np.testing.assert_allclose(np.cov(responses, rowvar=False), np.eye(12), atol=0.02)


@pytest.mark.slow
def test_written_filters_are_the_first_kernel_of_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "whitening.npz"
    twin = ["dataset.name=synthetic", "+dataset.like=cifar10"]
    script = str(ROOT / "examples" / "whitening.py")
    ran = subprocess.run(
        [sys.executable, script, str(file), "cnn6_cifar10_speedrun", *twin],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    with np.load(file) as arrays:
        assert arrays["views_0/conv_0/kernel"].shape == (2, 2, 3, 24)
