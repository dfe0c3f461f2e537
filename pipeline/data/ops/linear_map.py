"""A linear map of whole images, such as ZCA whitening, with values from a file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.core.files.npy import open_archive
from pipeline.core.registry import FilePath, component
from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.image import ImageOp, require_image

ARRAYS = ("mean", "matrix")


@component("op")
class LinearMap(ImageOp):
    """(image - mean) @ matrix of an image as one vector, in float32.

    The file is an .npz with mean (n,) and matrix (n, n), for images of n values: MindSpore's
    LinearTransformation. `compute_zca` computes such arrays. Last digits depend on the device.
    """

    name: Literal["linear_map"] = "linear_map"
    file: FilePath

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = require_image(value)
        self._read(height * width * channels)
        return ColumnSpec(value.shape, "float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        mean, matrix = self._read(int(np.prod(values.shape[1:])))
        vectors = values.reshape(values.shape[0], -1).astype(np.float32) - mean
        if xp is np:
            return (vectors @ matrix).reshape(values.shape)
        return xp.matmul(vectors, matrix, precision="highest").reshape(values.shape)

    def _read(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and matrix, float32. Raises ValueError if the file can't be read, or isn't
        for images of `size` values."""
        try:
            mean, matrix = _read_arrays(self.file, self.file.stat().st_mtime_ns)
        except OSError as error:
            raise ValueError(f"file = {self.file}: can't be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"file = {self.file}: {error}") from error
        if mean.shape != (size,) or matrix.shape != (size, size):
            raise ValueError(
                f"file = {self.file}: has mean {mean.shape} and matrix {matrix.shape}; images of "
                f"{size:,} values need ({size},) and ({size}, {size})"
            )
        return mean, matrix


@lru_cache(maxsize=4)
def _read_arrays(path: Path, _changed_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and matrix, float32. `_changed_ns`, the time of the file's last change, is a part
    of the cache's key alone. Raises OSError, and ValueError for a damaged file."""
    with open_archive(path) as archive:
        missing = [name for name in ARRAYS if name not in archive.names]
        if missing:
            raise ValueError(f"lacks {', '.join(missing)}; must have {' and '.join(ARRAYS)}")
        mean, matrix = (archive.read(name) for name in ARRAYS)
    for values in (mean, matrix):
        if values.dtype.kind != "f" or not np.isfinite(values).all():
            raise ValueError("must hold finite floats")
    return mean.astype(np.float32), matrix.astype(np.float32)


def compute_zca(images: np.ndarray, epsilon: float) -> dict[str, np.ndarray]:
    """Return mean and matrix, float32, that whiten images (B, H, W, C) and change them least.

    The matrix is V diag(1 / sqrt(d + epsilon)) V^T, with the eigenvectors V and eigenvalues d of
    the covariance (Bell and Sejnowski, The "independent components" of natural scenes are edge
    filters, Vision Research 37, 1997).
    """
    vectors = images.reshape(len(images), -1).astype(np.float64)
    eigenvalues, basis = np.linalg.eigh(np.cov(vectors, rowvar=False))
    matrix = basis / np.sqrt(eigenvalues.clip(min=0) + epsilon) @ basis.T
    arrays = {"mean": vectors.mean(axis=0), "matrix": matrix}
    return {name: array.astype(np.float32) for name, array in arrays.items()}
