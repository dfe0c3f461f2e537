"""Observation of the calls of flax modules, and the compilation of some layers of a network that
otherwise runs operation by operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.tree_util import PyTreeDef

from pipeline.models.layers.path_patterns import LayerPath, covers


def observe_modules(
    on_call: Callable[[nn.Module, tuple[Any, ...]], None] = lambda module, args: None,
    on_result: Callable[[nn.Module, Any], None] = lambda module, result: None,
) -> AbstractContextManager[None]:
    """Observe the calls of all modules in the body, outer and inner ones.

    `on_call` gets a module and its positional arguments, `on_result` a module and its result.
    """

    def intercept(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        is_forward = context.method_name == "__call__"
        if is_forward:
            on_call(context.module, args)
        result = call(*args, **kwargs)
        if is_forward:
            on_result(context.module, result)
        return result

    return nn.intercept_methods(intercept)


Interceptor = Callable[..., Any]
"""(call, args, kwargs, context) -> the result of a module's method, as flax intercepts it."""

_is_compiling: ContextVar[bool] = ContextVar("_is_compiling", default=False)
"""Whether a layer is being compiled, with its inner layers in the same program."""


def compile_layers(patterns: Sequence[str]) -> Interceptor:
    """Return an interceptor that compiles the calls of the modules that a pattern covers.

    A module and its backward pass are compiled once for each shape and type of its arrays and each
    value of its other arguments. The module's Python code runs only during compilation. XLA fuses
    the operations, so last digits may differ, and dropout draws other numbers.
    """

    def intercept(
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        module = context.module
        is_forward = context.method_name == "__call__" and not module.is_initializing()
        is_covered = is_forward and any(covers(pattern, module.path) for pattern in patterns)
        if _is_compiling.get() or not is_covered or _has_arrays(module):
            return call(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        try:
            statics = _Statics(tuple(leaf for leaf in leaves if not _is_array(leaf)))
            compiled = _compile_call(tree, tuple(map(_is_array, leaves)), statics)
        # An argument without a hash may differ at the next call, as may a value that isn't bound.
        except (TypeError, ValueError):
            return call(*args, **kwargs)
        _reuse_functions(module)
        return compiled(module, arrays)

    return intercept


class _Statics:
    """Arguments that aren't arrays, equal to others of the same types: 1 isn't True or 1.0."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values
        self._key = _make_key(values, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Statics) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=1024)
def _compile_call(
    tree: PyTreeDef, are_arrays: tuple[bool, ...], statics: _Statics
) -> Callable[..., Any]:
    """Return a compiled function (module, arrays) -> result, cached for all steps. The leaves of
    `tree`, the module's arguments, come in order from the arrays and `statics`."""

    def call(module: nn.Module, arrays: list[Any]) -> Any:
        sources = {True: iter(arrays), False: iter(statics.values)}
        leaves = [next(sources[is_array]) for is_array in are_arrays]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        token = _is_compiling.set(True)
        try:
            return module(*args, **kwargs)
        finally:
            _is_compiling.reset(token)

    return nn.jit(call)


def record_module_paths(paths: dict[LayerPath, None]) -> AbstractContextManager[None]:
    """Add the path of each module that is called in the body to `paths`."""

    def add_path(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.path and not _has_arrays(module):
            paths[module.path] = None

    return observe_modules(on_call=add_path)


def _has_arrays(value: Any) -> bool:
    """Return whether a field of a module or dataclass, or of one that it holds, has arrays, such as
    a mask of tokens. They would be constants of the compiled program."""
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return False
    names = {field.name for field in dataclasses.fields(value)}
    if not isinstance(value, nn.Module):  # such as a cached property
        names |= set(getattr(value, "__dict__", ()))
    leaves = jax.tree.leaves([getattr(value, name, None) for name in sorted(names - {"parent"})])
    return any(_is_array(leaf) or _has_arrays(leaf) for leaf in leaves)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


_functions: dict[Hashable, Any] = {}
"""The first function of each key, see `_make_key`."""
MAX_DEPTH = 16
"""Values that functions bind at a deeper level are compared by identity or equality: a function is
two levels. Without a limit a function that binds itself would have no end."""


def _reuse_functions(module: nn.Module) -> None:
    """Replace a module's fields that are functions by the first equal functions, also in the
    modules that its fields hold. flax makes modules and initialisers in every step, and compares
    functions by identity. So it would compile the module in every step."""
    for field in dataclasses.fields(module):
        if field.name != "parent" and hasattr(module, field.name):
            value = getattr(module, field.name)
            reused = _reuse(value)
            if reused is not value:
                object.__setattr__(module, field.name, reused)


def _reuse(value: Any) -> Any:
    """Return a field's value with the first equal functions in place of its functions."""
    if isinstance(value, nn.Module):
        _reuse_functions(value)
    elif type(value) is tuple:
        return tuple(map(_reuse, value))
    elif isinstance(value, FunctionType | partial):
        # A function with an unhashable bound value, or with one that isn't set yet, stays.
        with suppress(TypeError, ValueError):
            return _functions.setdefault(_make_key(value, 0), value)
    return value


def _make_key(value: Any, depth: int) -> Hashable:
    """Return a key that values of the same types share if they are equal, and functions if their
    code, globals and bound values are."""
    if depth < MAX_DEPTH and isinstance(value, FunctionType):
        bound = (
            tuple(cell.cell_contents for cell in value.__closure__ or ()),
            value.__defaults__,
            tuple((value.__kwdefaults__ or {}).items()),
        )
        return value.__code__, id(value.__globals__), _make_key(bound, depth)
    if depth < MAX_DEPTH and isinstance(value, partial):
        parts = (value.func, value.args, tuple(value.keywords.items()))
        return type(value), _make_key(parts, depth)
    if depth < MAX_DEPTH and isinstance(value, tuple):
        return type(value), *(_make_key(item, depth + 1) for item in value)
    # A text tells -0.0 from 0.0, and finds NaN.
    return type(value), repr(value) if isinstance(value, float) else value
