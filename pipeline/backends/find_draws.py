"""Read the computation of an initial state: which of its arrays are drawn, value by value.

Fresh weights of most networks are a function of 32 random bits, applied to every value, times a
factor. Such arrays need no program of their own: those with the same function share one, whatever
their shapes and factors are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from pipeline.core.host.jaxpr import called_jaxpr

BITS, CONSTANT = "bits", "constant"
"""The random bits, and a number, in a `Formula`."""

Formula = tuple[Any, ...]
"""A function of random bits as nested tuples, which are equal for equal functions: `(BITS,)`, a
constant (CONSTANT, its dtype, its bytes), or (primitive, its `new_dtype` or None, operand, ...)."""

_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "max": lax.max,
    "min": lax.min,
    "neg": lax.neg,
    "abs": lax.abs,
    "sqrt": lax.sqrt,
    "log": lax.log,
    "log1p": lax.log1p,
    "erf": lax.erf,
    "erf_inv": lax.erf_inv,
    "nextafter": lax.nextafter,
    "shift_right_logical": lax.shift_right_logical,
    "or": lax.bitwise_or,
    "bitcast_convert_type": lax.bitcast_convert_type,
    "convert_element_type": lax.convert_element_type,
}
"""Primitives that compute each value by itself, with what computes them."""
_UNCHANGED = frozenset(("copy", "copy_p", "stop_gradient"))
_RESHAPES = frozenset(("broadcast_in_dim", "reshape", "squeeze"))
_FOLDED: Mapping[str, Any] = {
    "mul": np.multiply,
    "add": np.add,
    "sub": np.subtract,
    "div": np.divide,
    "sqrt": np.sqrt,
    "neg": np.negative,
}
"""Operations on two constants, exactly rounded, so that numpy gives what XLA does."""


@dataclass(frozen=True)
class Draw:
    """An array of random values: `formula` of the bits of a key, times `scale`.

    The key is that of the seed, with the numbers `folds` folded in one after the other.
    """

    shape: tuple[int, ...]
    formula: Formula
    scale: float
    folds: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of its values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Fill:
    """An array of one value."""

    shape: tuple[int, ...]
    value: Any
    """A numpy scalar."""


class _UnknownError(Exception):
    """An array that is computed in a way that is not read here."""


def find_draws(computation: ClosedJaxpr) -> list[Draw | Fill | None]:
    """Read how each result of a computation of uint32 (2,), the seed, is computed.

    None stands for a result that is computed in any other way.
    """
    top = _Scope(computation.jaxpr, computation.consts, {})
    found: list[Draw | Fill | None] = []
    for result in computation.jaxpr.outvars:
        try:
            found.append(_read(top, result))
        except _UnknownError:
            found.append(None)
    return found


@dataclass(frozen=True, eq=False)
class _Scope:
    """A computation, with the values that it is called with in the one around it."""

    jaxpr: Any
    consts: Sequence[Any]
    args: Mapping[Any, tuple[_Scope, Any]]
    producers: dict[Any, Any] = field(default_factory=dict)
    inner: dict[int, _Scope] = field(default_factory=dict)
    """Scopes of the calls in it, by the identity of the equation."""

    def __post_init__(self) -> None:
        for equation in self.jaxpr.eqns:
            self.producers.update(dict.fromkeys(equation.outvars, equation))


def _resolved(scope: _Scope, atom: Any) -> tuple[_Scope, Any]:
    """Follow a value through calls to the equation, literal or input that it is."""
    while not isinstance(atom, Literal):
        if atom in scope.args:
            scope, atom = scope.args[atom]
            continue
        equation = scope.producers.get(atom)
        called = None if equation is None else called_jaxpr(equation)
        if equation is None or called is None:
            break
        key = id(equation)
        if key not in scope.inner:
            given = {
                inner: (scope, outer)
                for inner, outer in zip(called.jaxpr.invars, equation.invars, strict=True)
            }
            scope.inner[key] = _Scope(called.jaxpr, called.consts, given)
        scope, atom = scope.inner[key], called.jaxpr.outvars[equation.outvars.index(atom)]
    return scope, atom


def _read(scope: _Scope, result: Any) -> Draw | Fill:
    keys: list[tuple[int, ...]] = []
    shape = tuple(result.aval.shape)
    formula = _formula(scope, result, shape, keys)
    if formula[0] == CONSTANT:
        return Fill(shape, constant_of(formula))
    if len(set(keys)) != 1 or result.aval.dtype != np.float32 or result.aval.size >= 2**32:
        raise _UnknownError
    inner, scale = _without_scale(formula)
    return Draw(shape, inner, scale, keys[0])


def _without_scale(formula: Formula) -> tuple[Formula, float]:
    """Split off the constant factors at the end, multiplied as XLA does; 1 where there is none."""
    factors = []
    while formula[0] == "mul" and CONSTANT in (formula[2][0], formula[3][0]):
        constant, formula = sorted(formula[2:4], key=lambda part: part[0] != CONSTANT)
        factors.append(constant_of(constant))
    if len(factors) > 2:
        # In which order XLA multiplies them is not known here.
        raise _UnknownError
    return formula, float(np.prod(np.array(factors, np.float32), dtype=np.float32))


def _formula(
    scope: _Scope, atom: Any, shape: tuple[int, ...], keys: list[tuple[int, ...]]
) -> Formula:
    """The formula of a value of a shape, or of one value; adds the keys of its bits to `keys`."""
    if not isinstance(atom, Literal) and atom.aval.shape != shape and atom.aval.size != 1:
        raise _UnknownError
    scope, atom = _resolved(scope, atom)
    if isinstance(atom, Literal):
        described: Any = atom.aval
        return _constant(np.asarray(atom.val, described.dtype))
    if atom.aval.shape != shape and atom.aval.size != 1:
        raise _UnknownError
    equation = scope.producers.get(atom)
    if equation is None:
        return _constant(_value(scope, atom))
    name = equation.primitive.name
    if name == "random_bits":
        if equation.params["bit_width"] != 32 or tuple(equation.params["shape"]) != shape:
            raise _UnknownError
        keys.append(_folds(scope, equation.invars[0]))
        return (BITS,)
    if name in _RESHAPES and equation.invars[0].aval.size == 1:
        return _formula(scope, equation.invars[0], shape, keys)
    if name in _UNCHANGED:
        return _formula(scope, equation.invars[0], shape, keys)
    if name not in _ELEMENTWISE:
        raise _UnknownError
    parts = [_formula(scope, operand, shape, keys) for operand in equation.invars]
    folded = _fold(equation, parts)
    if folded is not None:
        return folded
    # Others, such as whether a type is weak, change no value.
    dtype = equation.params.get("new_dtype")
    return (name, None if dtype is None else np.dtype(dtype).name, *parts)


def apply_formula(formula: Formula, bits: Any) -> Any:
    """Compute a formula of bits, an array of any shape."""
    if formula[0] == BITS:
        return bits
    if formula[0] == CONSTANT:
        return jnp.asarray(constant_of(formula))
    name, dtype, *parts = formula
    operands = [apply_formula(part, bits) for part in parts]
    shape = np.broadcast_shapes(*(operand.shape for operand in operands))
    operands = [jnp.broadcast_to(operand, shape) for operand in operands]
    return _ELEMENTWISE[name](*operands, *(() if dtype is None else (dtype,)))


def _fold(equation: Any, parts: Sequence[Formula]) -> Formula | None:
    """A constant, where that is what an operation on constants gives without a doubt."""
    if any(part[0] != CONSTANT for part in parts):
        return None
    result: Any = equation.outvars[0].aval
    name, dtype = equation.primitive.name, result.dtype
    values = [constant_of(part) for part in parts]
    if name == "convert_element_type":
        return _constant(np.asarray(values[0]).astype(dtype))
    if name in _FOLDED and dtype == np.float32:
        return _constant(np.asarray(_FOLDED[name](*values), dtype))
    return None


def _constant(value: Any) -> Formula:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "fiub":
        raise _UnknownError
    return (CONSTANT, array.dtype.name, array.tobytes())


def constant_of(formula: Formula) -> Any:
    """The numpy scalar of a constant."""
    return np.frombuffer(formula[2], formula[1])[0]


def _value(scope: _Scope, atom: Any) -> np.ndarray:
    """The value of a constant of a computation; the seed has none."""
    for variable, value in zip(scope.jaxpr.constvars, scope.consts, strict=True):
        if variable is atom:
            return np.asarray(value)
    raise _UnknownError


def _folds(scope: _Scope, key: Any) -> tuple[int, ...]:
    """The numbers that are folded into the key of the seed to make a key."""
    folds: list[int] = []
    while True:
        scope, key = _resolved(scope, key)
        equation = None if isinstance(key, Literal) else scope.producers.get(key)
        name = equation.primitive.name if equation is not None else ""
        if equation is not None and name == "random_fold_in":
            number = _formula(scope, equation.invars[1], (), [])
            if number[0] != CONSTANT or key.aval.shape != ():
                raise _UnknownError
            folds.insert(0, int(constant_of(number)) & 0xFFFFFFFF)
            key = equation.invars[0]
        elif equation is not None and name == "random_wrap":
            _require_seed(scope, equation.invars[0], str(equation.params["impl"]))
            return tuple(folds)
        else:
            raise _UnknownError


def _require_seed(scope: _Scope, words: Any, generator: str) -> None:
    """Raise _UnknownError unless the words are the input itself, for the generator of this file."""
    scope, words = _resolved(scope, words)
    equation = None if isinstance(words, Literal) else scope.producers.get(words)
    if equation is not None and equation.primitive.name == "convert_element_type":
        scope, words = _resolved(scope, equation.invars[0])
    seed = not isinstance(words, Literal) and words in scope.jaxpr.invars and not scope.args
    if not seed or words.aval.shape != (2,) or words.aval.dtype != np.uint32:
        raise _UnknownError
    if "fry" not in generator or not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        raise _UnknownError
