"""Arrays of numpy's files: read back, in memory that a device uses in place, or refused."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, scalar_dtypes

from pipeline.core.files.npy import (
    ALIGNMENT_BYTES,
    count_array_bytes,
    make_aligned_zeros,
    open_archive,
    parse_npy,
    read_npy,
)

numbers = arrays(
    st.sampled_from(["uint8", "int32", "float16", "float64", "bool"]),
    array_shapes(min_dims=0, max_dims=3, min_side=0),
)


@pytest.mark.medium
@given(array=numbers, fortran=st.booleans())
def test_archive_has_the_arrays_written_by_numpy(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, fortran: bool
) -> None:
    stored = np.asfortranarray(array) if fortran else array
    path = tmp_path_factory.mktemp("npz") / "arrays.npz"
    np.savez_compressed(path, first=stored, second=np.arange(3))
    with open_archive(path) as archive:
        assert archive.names == ("first", "second")
        read = archive.read("first")
    assert read.dtype == stored.dtype
    np.testing.assert_array_equal(read, stored)


@pytest.mark.medium
@given(dtype=scalar_dtypes(), shape=array_shapes(max_dims=3))
def test_zeros_are_aligned_for_devices(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    array = make_aligned_zeros(shape, dtype)
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.ctypes.data % ALIGNMENT_BYTES == 0


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    np.save(path, np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(read_npy(path), np.arange(12).reshape(3, 4))
    content = path.read_bytes()
    np.testing.assert_array_equal(parse_npy("array", content), read_npy(path))
    with pytest.raises(
        ValueError, match=r"has shape \(3, 4\), which doesn't match the file's size"
    ):
        parse_npy("array", content[:-8])


def test_object_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    np.save(path, np.array([{}], object))
    with pytest.raises(ValueError, match="holds objects; must be plain numbers"):
        read_npy(path)


def test_foreign_file_in_place_of_an_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    for message in ("there is no such file", "must be an .npz file"):
        with pytest.raises(ValueError, match=message), open_archive(path):
            pass
        path.write_bytes(b"no archive")


def test_repeated_name_in_an_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros(1))
    content = zipfile.ZipFile(path).read("x.npy")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("x.npy", content)
    with pytest.raises(ValueError, match="2 entries are called x"), open_archive(path):
        pass


@pytest.mark.parametrize("shape", [(-1,), (2.0,), (1,) * 40])
def test_impossible_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has an impossible shape"):
        count_array_bytes("array", np.dtype("int8"), shape)


def test_pipe_is_refused(tmp_path: Path) -> None:
    """To open it would wait for a writer."""
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(ValueError, match="isn't a regular file"):
        read_npy(tmp_path / "x.npy")
    with pytest.raises(FileNotFoundError):
        read_npy(tmp_path / "y.npy")
