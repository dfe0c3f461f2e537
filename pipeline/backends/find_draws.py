"""Find the arrays of an initial state each of whose values is a function of its own random bits.

In most networks, an initial weight is a function of 32 random bits, times a factor. Arrays with the
same function can be drawn by one program, whatever their shapes and factors are.

`interpret_jaxpr` evaluates the computation of the state with descriptions in place of arrays:
`Seed`, `Key`, `Values`, or None for any other array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from pipeline.core.host.jaxpr import find_called_jaxpr, interpret_jaxpr

BITS = "bits"
CONSTANT = "constant"
"""First items of the formulas of the random bits and of a number."""
Formula = tuple[Any, ...]
"""A function of random bits as nested tuples, so that equal functions are equal: `(BITS,)`,
`(CONSTANT, dtype, bytes)` or `(primitive, its new_dtype or None, operand, ...)`."""
_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "max": lax.max, "min": lax.min,
    "neg": lax.neg, "abs": lax.abs, "sqrt": lax.sqrt, "log": lax.log, "log1p": lax.log1p,
    "erf": lax.erf, "erf_inv": lax.erf_inv, "nextafter": lax.nextafter,
    "shift_right_logical": lax.shift_right_logical, "or": lax.bitwise_or,
    "bitcast_convert_type": lax.bitcast_convert_type,
    "convert_element_type": lax.convert_element_type,
}  # fmt: skip
"""Functions of the primitives that compute each value by itself."""
_UNCHANGED = frozenset(("copy", "copy_p", "stop_gradient"))
"""Primitives that return their operand."""
_RESHAPES = frozenset(("broadcast_in_dim", "reshape", "squeeze"))
"""Primitives that return the values of their operand in another shape."""
_EXACT: Mapping[str, Any] = {
    "mul": np.multiply, "add": np.add, "sub": np.subtract, "div": np.divide, "sqrt": np.sqrt,
    "neg": np.negative,
}  # fmt: skip
"""Operations whose result IEEE 754 defines to the bit, so that numpy's is XLA's."""


@dataclass(frozen=True)
class Draw:
    """An array of random values: `formula` of a key's random bits, times `scale`.

    The key is the seed's key, with the numbers `folds` folded in one after the other.
    """

    shape: tuple[int, ...]
    formula: Formula
    scale: float
    folds: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Fill:
    """An array of one value."""

    shape: tuple[int, ...]
    value: Any
    """A numpy scalar."""


@dataclass(frozen=True)
class Seed:
    """The words of the seed, uint32 (2,)."""


@dataclass(frozen=True)
class Key:
    """The seed's key, with the numbers `folds` folded in one after the other."""

    folds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Values:
    """An array of a formula's values."""

    formula: Formula
    folds: tuple[int, ...] | None = None
    """Numbers folded into the key of the bits; None for a constant."""
    shape: tuple[int, ...] | None = None
    """Shape of the bits; None for a constant."""


def find_draws(computation: ClosedJaxpr) -> list[Draw | Fill | None]:
    """Describe each result of a computation on the seed, uint32 (2,); None if no class fits."""
    avals: Any = computation.in_avals
    inputs: list[Any] = [
        Seed() if (aval.shape, aval.dtype) == ((2,), np.uint32) else None for aval in avals
    ]
    results = interpret_jaxpr(computation, inputs, _describe_results, _describe_constant)
    return [
        _describe_array(values, aval)
        for values, aval in zip(results, computation.out_avals, strict=True)
    ]


def _describe_array(values: Any, aval: Any) -> Draw | Fill | None:
    """Return the draw or the fill that computes an array of the state; None if neither does."""
    shape = tuple(aval.shape)
    if not isinstance(values, Values):
        return None
    if values.formula[0] == CONSTANT:
        return Fill(shape, read_constant(values.formula))
    if values.shape != shape or aval.dtype != np.float32 or aval.size >= 2**32:
        return None
    # Split off the factors that are multiplied last.
    formula = values.formula
    factors = []
    while formula[0] == "mul":
        left, right = formula[2:4]
        if CONSTANT not in (left[0], right[0]):
            break
        constant, formula = (left, right) if left[0] == CONSTANT else (right, left)
        factors.append(read_constant(constant))
    if len(factors) > 2:
        return None  # The order in which XLA multiplies three factors is unknown.
    scale = float(np.prod(np.array(factors, np.float32), dtype=np.float32))
    return Draw(shape, formula, scale, values.folds or ())


def _describe_constant(atom: Any, value: Any) -> Values | None:
    is_number = isinstance(atom.aval.dtype, np.dtype) and atom.aval.dtype.kind in "fiub"
    if not is_number or atom.aval.size != 1:
        return None
    return Values(_make_constant(np.asarray(value, atom.aval.dtype)))


def _describe_results(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    called = find_called_jaxpr(equation)
    if called is not None:
        return interpret_jaxpr(called, operands, _describe_results, _describe_constant)
    if len(equation.outvars) != 1:
        return [None] * len(equation.outvars)
    return [_describe_result(equation, operands)]


def _describe_result(equation: JaxprEqn, operands: list[Any]) -> Any:
    name = equation.primitive.name
    params = equation.params
    aval: Any = equation.outvars[0].aval
    match operands:
        case [Seed()] if name == "random_wrap":
            partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
            is_threefry = "fry" in str(params["impl"])  # JAX's tag of the generator
            return Key() if is_threefry and partitionable else None
        case [Seed() as seed] if name == "convert_element_type" and aval.dtype == np.uint32:
            return seed
        case [Key(folds), Values((kind, *_)) as number] if kind == CONSTANT:
            fold = int(read_constant(number.formula)) & 0xFFFFFFFF
            return Key((*folds, fold)) if name == "random_fold_in" and aval.shape == () else None
        case [Key(folds)] if name == "random_bits" and params["bit_width"] == 32:
            return Values((BITS,), folds, tuple(params["shape"]))
    if not operands or not all(isinstance(operand, Values) for operand in operands):
        return None
    if name in _UNCHANGED or (name in _RESHAPES and _is_single(equation.invars[0])):
        return operands[0]
    atoms: Any = equation.invars
    is_elementwise = all(_is_single(atom) or atom.aval.shape == aval.shape for atom in atoms)
    bits = {(values.folds, values.shape) for values in operands if values.folds is not None}
    if name not in _ELEMENTWISE or not is_elementwise or len(bits) > 1:
        return None  # A formula can only read the bits of one draw.
    formulas = [values.formula for values in operands]
    formula = _fold_constants(name, formulas, aval.dtype)
    if formula is None:
        # Other parameters, such as whether a type is weak, don't change values.
        dtype = params.get("new_dtype")
        formula = (name, None if dtype is None else np.dtype(dtype).name, *formulas)
    drawn = next((values for values in operands if values.folds is not None), operands[0])
    return replace(drawn, formula=formula)


def _is_single(atom: Any) -> bool:
    return bool(atom.aval.size == 1)


def _fold_constants(name: str, formulas: Sequence[Formula], dtype: Any) -> Formula | None:
    """Return the result of an operation on constants; None if numpy's may differ from XLA's."""
    if any(part[0] != CONSTANT for part in formulas):
        return None
    values = [read_constant(part) for part in formulas]
    if name == "convert_element_type":
        return _make_constant(np.asarray(values[0]).astype(dtype))
    if name in _EXACT and dtype == np.float32:
        return _make_constant(np.asarray(_EXACT[name](*values), dtype))
    return None


def _make_constant(array: np.ndarray) -> Formula:
    return (CONSTANT, array.dtype.name, array.tobytes())


def read_constant(formula: Formula) -> Any:
    return np.frombuffer(formula[2], formula[1])[0]


def apply_formula(formula: Formula, bits: Any) -> Any:
    """Compute a formula for bits, uint32 of any shape."""
    if formula[0] == BITS:
        return bits
    if formula[0] == CONSTANT:
        return jnp.asarray(read_constant(formula))
    name, dtype, *formulas = formula
    operands = [apply_formula(part, bits) for part in formulas]
    shape = np.broadcast_shapes(*(operand.shape for operand in operands))
    operands = [jnp.broadcast_to(operand, shape) for operand in operands]
    if dtype is not None:
        return _ELEMENTWISE[name](operands[0], dtype)
    return _ELEMENTWISE[name](*operands)
