"""Layers that are compiled while the rest of a network runs operation by operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import cache, partial
from types import FunctionType
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.tree_util import PyTreeDef

from pipeline.models.layers.path_patterns import Path, covers

Interceptor = Callable[..., Any]
"""(call, args, kwargs, context) -> the result of a method of a module, as flax intercepts it."""

_inside: ContextVar[bool] = ContextVar("_inside", default=False)
"""Whether a layer is being compiled: the layers inside of it are a part of that program."""


def compile_layers(patterns: Sequence[str]) -> Interceptor:
    """Make an interceptor that compiles the calls of the modules that a pattern covers.

    A module is compiled once for each shape and type of its arrays and each value of its other
    arguments, and so is its backward pass; inside of one, Python runs while it is compiled only.
    Results are those of the module as XLA fuses it, so last digits may differ, and its dropout
    draws other numbers.
    """

    def intercept(
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        module = context.module
        is_forward = context.method_name == "__call__" and not module.is_initializing()
        if _inside.get() or not is_forward or not _is_compiled(module, patterns):
            return call(*args, **kwargs)
        _keep_functions(module)
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = tuple(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
        arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
        others = tuple(leaf for leaf, array in zip(leaves, is_array, strict=True) if not array)
        return _compiled(tree, is_array, others)(module, arrays)

    return intercept


def _is_compiled(module: nn.Module, patterns: Sequence[str]) -> bool:
    return any(covers(pattern, module.path) for pattern in patterns) and not _has_arrays(module)


@cache
def _compiled(
    tree: PyTreeDef, is_array: tuple[bool, ...], others: tuple[Any, ...]
) -> Callable[..., Any]:
    """A compiled call of a module, (module, arrays) -> result, kept from step to step."""

    def call(module: nn.Module, arrays: list[Any]) -> Any:
        from_arrays, from_others = iter(arrays), iter(others)
        leaves = [next(from_arrays) if array else next(from_others) for array in is_array]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        token = _inside.set(True)
        try:
            return module(*args, **kwargs)
        finally:
            _inside.reset(token)

    return nn.jit(call)


def list_layers(paths: dict[Path, None]) -> Interceptor:
    """Make an interceptor that adds the paths of the modules that are called to `paths`."""

    def intercept(
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        module = context.module
        if context.method_name == "__call__" and module.path and not _has_arrays(module):
            paths[module.path] = None
        return call(*args, **kwargs)

    return intercept


def _has_arrays(module: nn.Module) -> bool:
    """Whether a module has arrays among its fields, as attention has the mask of its tokens; a
    program would take them for constants."""
    values = [getattr(module, field.name, None) for field in dataclasses.fields(module)]
    values += [vars(value) for value in values if dataclasses.is_dataclass(value)]
    leaves = jax.tree.leaves([value for value in values if not isinstance(value, nn.Module)])
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)


_functions: dict[Hashable, Any] = {}
MAX_DEPTH = 8


def _keep_functions(module: nn.Module) -> None:
    """Replace functions among a module's fields by the first ones that are equal to them.

    flax makes modules again in every step, and an initialiser with them; it takes functions for
    equal where they are the same object, and would compile the module again.
    """
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None)
        if isinstance(value, FunctionType | partial):
            try:
                kept = _functions.setdefault(_identity(value, 0), value)
            except TypeError:
                # It holds something that can't be compared, so no other is equal to it.
                continue
            object.__setattr__(module, field.name, kept)


def _identity(value: Any, depth: int) -> Hashable:
    """A key that equal functions share: their code, and the values that they have bound."""
    if depth < MAX_DEPTH and isinstance(value, FunctionType):
        bound = [cell.cell_contents for cell in value.__closure__ or ()]
        bound += [value.__defaults__, *(value.__kwdefaults__ or {}).items()]
        return value.__code__, *(_identity(one, depth + 1) for one in bound)
    if depth < MAX_DEPTH and isinstance(value, partial):
        bound = [value.func, *value.args, *value.keywords.items()]
        return partial, *(_identity(one, depth + 1) for one in bound)
    if depth < MAX_DEPTH and isinstance(value, tuple):
        return tuple(_identity(one, depth + 1) for one in value)
    return value
