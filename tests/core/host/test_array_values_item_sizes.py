"""Bytes of elements."""

from __future__ import annotations

from typing import get_args

import jax.numpy as jnp
import pytest

from pipeline.backends.ascend.chip.hardware import Dtype
from pipeline.core.host.array_values import get_item_bytes, get_stored_bytes


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_dtype_sizes_match_jax(dtype: str) -> None:
    assert get_item_bytes(dtype) == jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("float32", 4), ("bfloat16", 2), ("bool", 1 / 8), ("key<fry>", 8)]
)
def test_masks_are_packed_in_device_memory(dtype: str, nbytes: float) -> None:
    assert get_stored_bytes(dtype) == nbytes


def test_unknown_type_is_an_error() -> None:
    with pytest.raises(TypeError, match="float3"):
        get_item_bytes("float3")
