"""ZCA whitening, and any linear map of images (D-19)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.core.reporter import Reporter
from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.affine import LinearMap, compute_zca
from pipeline.stages.data import load_data

ROOT = Path(__file__).parents[3]
TWIN = ("dataset.name=synthetic", "+dataset.like=mnist")
SHAPE = (3, 2, 2)


@pytest.fixture
def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(12, 12))
    return (rng.normal(size=(400, 12)) @ mixing + 5).reshape(400, *SHAPE).astype(np.float32)


@pytest.fixture
def op(tmp_path: Path, images: np.ndarray) -> LinearMap:
    np.savez(tmp_path / "zca.npz", **compute_zca(images, 1e-6))
    return LinearMap(file=tmp_path / "zca.npz")


def test_whitened_images_are_uncorrelated_by_a_symmetric_map(
    op: LinearMap, images: np.ndarray
) -> None:
    white = op(np, images, None)
    assert (white.shape, white.dtype) == (images.shape, np.float32)
    vectors = white.reshape(400, -1)
    np.testing.assert_allclose(np.cov(vectors, rowvar=False), np.eye(12), atol=2e-3)
    # Of all whitening maps, ZCA's is the symmetric one.
    with np.load(op.file) as arrays:
        np.testing.assert_allclose(arrays["matrix"], arrays["matrix"].T, atol=1e-6)
    np.testing.assert_allclose(np.asarray(op(jnp, jnp.asarray(images), None)), white, atol=1e-4)


def test_unfit_files_are_refused(op: LinearMap, tmp_path: Path) -> None:
    assert op.output(ColumnSpec(SHAPE, "uint8")) == ColumnSpec(SHAPE, "float32")
    with pytest.raises(ValueError, match=r"images of 4 values need \(4,\) and \(4, 4\)"):
        op.output(ColumnSpec((2, 2, 1), "float32"))
    for name, content, message in (
        ("none.npz", None, "can't be read: No such file"),
        ("text.npz", b"text", "text.npz: "),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            LinearMap(file=tmp_path / name).output(ColumnSpec(SHAPE, "float32"))
    for arrays in ({"mean": np.zeros(12)}, {"mean": np.full(12, np.nan), "matrix": np.eye(12)}):
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(ValueError, match=r"bad.npz: (lacks matrix|must hold finite floats)"):
            LinearMap(file=tmp_path / "bad.npz").output(ColumnSpec(SHAPE, "float32"))


@pytest.mark.slow
def test_zca_example_writes_a_file_that_a_recipe_reads(tmp_path: Path) -> None:
    file = tmp_path / "zca.npz"
    script = str(ROOT / "examples" / "zca.py")
    subprocess.run([sys.executable, script, str(file), "mlp_mnist", *TWIN], cwd=ROOT, check=True)
    op = f"{{name: linear_map, file: {file}}}"
    ops = f"[{{name: rescale, factor: 0.00392156862745098, shift: 0.0}}, {op}]"
    recipe = load_recipe(
        "mlp_mnist", [*TWIN, f"dataset.train.ops={ops}", f"dataset.eval.ops={ops}"]
    )
    assert load_data(recipe, Reporter()).inputs.shape == (28, 28, 1)
