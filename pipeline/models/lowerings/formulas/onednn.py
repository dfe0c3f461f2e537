"""oneDNN's convolution and matrix product, as custom calls of XLA:CPU.

jaxlib for x86-64 Linux is built with oneDNN, but its compiler uses another library, YNNPACK. XLA's
directory `xla/service/cpu` has the custom calls, and `onednn_config.proto` their configuration.
oneDNN's convolution is 1.2 to 2.5 times as fast in float32 on AVX-512. With bfloat16 it is some 3
times as fast, if the processor multiplies bfloat16.

A call that oneDNN refuses ends the process. So a child process tries both calls, by `probe`. A
program with such calls can't be written into XLA's persistent cache.

A library that is built on this machine (`tune/onednn_library.py`) has the same calls for XLA's
foreign function interface, with the same bits. Programs with its calls can be written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.models.lowerings.problem import Slide, make_window

CALLS = "__onednn$"
"""Prefix of the names of jaxlib's calls in a compiled program."""

LIBRARY_CALLS = "pipeline_onednn$"
"""Prefix of the names of the library's calls in a compiled program."""

EXTRA = "recipe-pipeline[onednn]"
LIBRARY_PACKAGES = ("onednn-cpu-gomp", "onednn-devel-cpu-gomp")
"""Packages of the extra: oneDNN with the threads of GNU's OpenMP, and its headers."""

_PIXELS = {"batch_dim": "0", "feature_dim": "3", "spatial_dims": ["1", "2"]}
_FILTER = {"input_feature_dim": "2", "output_feature_dim": "3", "spatial_dims": ["0", "1"]}


@dataclass
class _LibraryUse:
    """Digest of the loaded library, and its `OnednnCalls` by type of operand."""

    digest: str = ""
    calls: Mapping[str, Any] = field(default_factory=dict)


_USE = _LibraryUse()


def is_library_installed() -> bool:
    """Return whether the packages of the library are installed."""
    try:
        return all(distribution(name) for name in LIBRARY_PACKAGES)
    except PackageNotFoundError:
        return False


def use_library(digest: str, calls: Mapping[str, Any]) -> None:
    """Compute operands of these types by the loaded library from now on, others by jaxlib."""
    _USE.digest = digest
    _USE.calls = calls


def describe_calls() -> str:
    """Return the identity of the calls that new programs have."""
    return f"{_USE.digest} {sorted(_USE.calls)}" if _USE.calls else "jaxlib"


def convolve(images: Array, kernel: Array, slide: Slide, dtype: Any = None) -> Array:
    """Convolve images NHWC with a kernel HWIO; the result has `dtype`, by default the operands'.

    Products of bfloat16 are summed in float32.
    """
    batch, height, width, _ = images.shape
    rows, columns, _, features = kernel.shape
    window = make_window(
        (height, width), (rows, columns), slide.strides, slide.pads, slide.dilation, slide.groups
    )
    shape = (batch, *window.output_size, features)
    result = jax.ShapeDtypeStruct(shape, dtype or images.dtype)
    if (library := _USE.calls.get(str(images.dtype))) is not None:
        return library.convolve(result, images, kernel, slide)
    config = {
        "onednn_conv_config": {
            "dims": "4",
            "feature_groups": str(slide.groups),
            "input": {"dims": "4", "data": _PIXELS},
            "kernel": {"dims": "4", "filter": _FILTER},
            "output": {"dims": "4", "data": _PIXELS},
            "window": {
                "size": _to_texts(kernel.shape[:2]),
                "pad_left": _to_texts(before for before, _ in slide.pads),
                "pad_right": _to_texts(after for _, after in slide.pads),
                "strides": _to_texts(slide.strides),
                "window_dilations": _to_texts(slide.dilation),
            },
        }
    }
    return _call_onednn("convolution", result, config, images, kernel)


def matmul(
    a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False, dtype: Any = None
) -> Array:
    """Multiply two matrices, or two stacks of n matrices; either may be transposed first.

    Sums are in float32. The result has `dtype`, by default `a`'s.
    """
    rows = a.shape[-1 if transpose_a else -2]
    columns = b.shape[-2 if transpose_b else -1]
    result = jax.ShapeDtypeStruct((*a.shape[:-2], rows, columns), dtype or a.dtype)
    transposes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    if (library := _USE.calls.get(str(a.dtype))) is not None:
        return library.multiply(result, a, b, transposes)
    config = {"onednn_matmul_config": transposes}
    return _call_onednn("matmul", result, config, a, b)


def _to_texts(values: Any) -> list[str]:
    """Return integers as texts: the form of 64-bit integers in a protocol buffer's JSON."""
    return [str(value) for value in values]


def _call_onednn(
    name: str, result: jax.ShapeDtypeStruct, config: Any, left: Array, right: Array
) -> Array:
    # Version 2 passes the configuration as text, which XLA parses as JSON.
    call = jax.ffi.ffi_call(
        CALLS + name, result, custom_call_api_version=2, legacy_backend_config=json.dumps(config)
    )
    return call(left, right)


def probe(dtype: str) -> None:
    """Check both calls on small operands. Call it in a child process.

    Raises AssertionError for a wrong result; the process ends if oneDNN refuses.
    """
    values = np.linspace(-1, 1, 2 * 6 * 6 * 16, dtype=np.float32)
    images = jnp.asarray(values.reshape(2, 6, 6, 16), dtype)
    kernel = jnp.asarray(np.resize(values, (3, 3, 16, 16)), dtype)
    slide = Slide(strides=(2, 2), pads=((1, 1), (1, 1)))
    result = jax.jit(lambda x, k: convolve(x, k, slide))(images, kernel)
    expected = jax.lax.conv_general_dilated(
        images.astype(jnp.float32),
        kernel.astype(jnp.float32),
        (2, 2),
        ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    np.testing.assert_allclose(result.astype(np.float32), expected, rtol=0.02, atol=0.02)
    depthwise = jax.jit(lambda x, k: convolve(x, k, Slide(groups=16)))(images, kernel[:, :, :1])
    sums = (images[:, :3, :3] * kernel[:, :, 0]).astype(jnp.float32).sum((1, 2))
    np.testing.assert_allclose(depthwise[:, 0, 0].astype(np.float32), sums, rtol=0.02, atol=0.05)
    square = jax.jit(lambda a: matmul(a, a, transpose_a=True, dtype=jnp.float32))
    rows = images.reshape(-1, 16)
    exact = np.asarray(rows, np.float64).T @ np.asarray(rows, np.float64)
    np.testing.assert_allclose(square(rows), exact, rtol=0.02, atol=0.02)
    products = square(jnp.stack([rows, 2 * rows]))
    np.testing.assert_allclose(products, np.stack([exact, 4 * exact]), rtol=0.02, atol=0.05)
