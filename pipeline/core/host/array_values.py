"""Sizes of elements by JAX's names of types, and reads of arrays' values by custom code.

Eager mode differentiates outside of jit, so each array has its value while custom code runs. A
traced function can't have it.
"""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers bfloat16, float8 and int4 with numpy)
import numpy as np
from jax.errors import (
    ConcretizationTypeError,
    NonConcreteBooleanIndexError,
    TracerArrayConversionError,
    TracerIntegerConversionError,
)

from pipeline.core.errors import RecipeError
from pipeline.core.host.jax_private import make_values_readable

KEY_BYTES = 8
"""Size of a random key, whose type is `key<...>`."""
MASK_BYTES = 1 / 8
"""Size of a bool in the memory of an Ascend, where it is one bit."""


def get_item_bytes(dtype: str) -> int:
    """Return the size of an element during a computation. Raises TypeError for an unknown type."""
    return KEY_BYTES if dtype.startswith("key") else np.dtype(dtype).itemsize


def get_stored_bytes(dtype: str) -> float:
    """Return the size of an element in device memory, in which masks are packed."""
    return MASK_BYTES if dtype == "bool" else get_item_bytes(dtype)


VALUE_READS = (
    ConcretizationTypeError,
    NonConcreteBooleanIndexError,
    TracerArrayConversionError,
    TracerIntegerConversionError,
)
"""JAX's errors for a read of a value that a traced array doesn't have."""
_is_eager: ContextVar[bool] = ContextVar("_is_eager", default=False)
"""Whether `find_shapes` may run a function instead of tracing it."""


@contextmanager
def allow_reads(is_eager: bool) -> Iterator[None]:
    """Let custom code read values in the body if the mode is eager."""
    if is_eager:
        make_values_readable()
    token = _is_eager.set(is_eager)
    try:
        yield
    finally:
        _is_eager.reset(token)


def find_shapes(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Return the shapes and dtypes of a function's result, as `jax.eval_shape` does.

    A function that reads values is run if the body of `allow_reads` allows it, with zeros for
    arguments that are shapes. Raises one of `VALUE_READS` otherwise.
    """
    try:
        return jax.eval_shape(function, *arguments, **keywords)
    except Exception as error:  # custom code may wrap JAX's error
        if not (_is_eager.get() and is_value_read(error)):
            raise
    arrays, named_arrays = jax.tree.map(_fill_with_zeros, (arguments, keywords))
    result = function(*arrays, **named_arrays)
    return jax.eval_shape(lambda: result)


def _fill_with_zeros(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def is_value_read(error: BaseException | None) -> bool:
    """Return whether an error, or one during whose handling it was raised, is in `VALUE_READS`."""
    return _find_value_read(error) is not None


def _find_value_read(error: BaseException | None) -> BaseException | None:
    """Return the first error in `VALUE_READS` among an error and its causes; None without one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, VALUE_READS):
            return error
        seen.add(id(error))  # Contexts of errors that were raised again may form a circle.
        # Code that wraps an error often raises in `except` without `from`.
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def convert_value_reads() -> Iterator[None]:
    """Turn the error for a read of a traced array's value into a RecipeError with its place."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        if not is_value_read(error):
            raise
        raise RecipeError(explain_value_read(error)) from error


def explain_value_read(error: Exception) -> str:
    """Return the layer and the line of custom code that read a value, and what would be right."""
    read = _find_value_read(error) or error
    layer = _find_layer(read)
    place = locate_custom_code(read, shows_code=True)
    if layer:
        place = f"layer {layer} ({place})" if place else f"layer {layer}"
    return (
        f"{place or 'custom code'} reads the value of an array, which a traced function doesn't "
        "have; must choose by jnp.where or jax.lax.cond, or train on cpu or gpu with "
        "train.mode=eager"
    )


def _find_layer(error: BaseException) -> str:
    """Return the path of the innermost layer, in the frames of an error; "" outside of layers."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for name in ("context", "self"):
            # A flax module or a LayerContext. Other values may have any attributes.
            try:
                path = frame.f_locals[name].path
            except (KeyError, AttributeError, ValueError):
                continue
            if isinstance(path, tuple) and path and all(isinstance(part, str) for part in path):
                return "/".join(path)
    return ""


def locate_custom_code(error: BaseException, *, shows_code: bool = False) -> str:
    """Return file and line of the innermost call in custom code, and its code if `shows_code`, as
    text; "" if none exists.

    Installed packages and this package aren't custom code.
    """
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = {Path(__file__).parents[2], *(Path(sysconfig.get_path(name)) for name in names)}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        is_library = not libraries.isdisjoint(file.parents) or not {
            "site-packages",
            "dist-packages",
        }.isdisjoint(file.parts)
        if file.is_file() and not is_library and frame.lineno is not None:
            code = linecache.getline(frame.filename, frame.lineno).strip() if shows_code else ""
            place = f"{file.name}, line {frame.lineno}"
            return f"{place}: `{code}`" if code else place
    return ""
