"""Replay of a jaxpr, equation by equation, with the origins of non-finite values.

The interpreter inspects every result: the ranges of tensors, and the samples with non-finite
values. Origins are a graph from a result back to the first cause.

Calls, iterations of loops and the branches that values choose are run equation by equation too.
Each equation has the scope that it was traced in, so that its layer is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pipeline.core.host.jaxpr import (
    bind_equation,
    find_called_jaxpr,
    find_source_line,
    interpret_jaxpr,
    join_scope,
    read_scan,
    read_while,
)
from pipeline.models.modules.name_stack import find_layer

COLUMN = "input column"
"""Kind of the tensors that are columns of the dataset."""
MOVES = frozenset(
    {"broadcast_in_dim", "concatenate", "copy", "dynamic_update_slice", "gather", "max", "pad",
     "reduce_max", "reduce_window_max", "reshape", "scatter", "select_n"}
)  # fmt: skip
"""Primitives that pass on intended minus infinities, such as the padding of a maximum or the mask
of a softmax."""
BITCAST = "bitcast_convert_type"


@dataclass(frozen=True)
class Range:
    """Statistics of a tensor's finite values (None without any), and numbers of NaN and Inf.
    Complex values count by their magnitude."""

    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    mean: float | None
    nan: int
    inf: int

    def __str__(self) -> str:
        counts = [
            f"{count:,} {name}" for name, count in (("NaN", self.nan), ("Inf", self.inf)) if count
        ]
        text = f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"
        if counts:
            text += f" with {' and '.join(counts)}"
        if self.min is None:
            return text
        lead = ", else" if counts else ","
        if self.shape == ():
            return f"{text}{lead} {self.min:.4g}"
        return f"{text}{lead} {self.min:.4g} to {self.max:.4g}, mean {self.mean:.4g}"


def find_range(array: Any) -> Range:
    values = np.asarray(array)
    dtype = str(values.dtype)
    shape = tuple(values.shape)
    wide = _to_magnitude(values).astype(np.float64)
    finite = wide[np.isfinite(wide)]
    nan = int(np.isnan(wide).sum())
    inf = wide.size - nan - finite.size
    if not finite.size:
        return Range(dtype, shape, None, None, None, nan, inf)
    low = float(finite.min())
    high = float(finite.max())
    return Range(dtype, shape, low, high, float(finite.mean()), nan, inf)


def _to_magnitude(values: np.ndarray) -> np.ndarray:
    """Return the magnitudes of complex values, and other values as they are."""
    return np.abs(values) if np.iscomplexobj(values) else values


def is_float(array: Any) -> bool:
    """Return whether a tensor can hold NaN or infinity, unlike random keys and integers."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


def find_largest_magnitude(array: Any) -> float:
    """Return the greatest magnitude in an array; NaN if the array has a NaN, 0 if it is empty."""
    values = _to_magnitude(np.asarray(array))
    if not values.size:
        return 0.0
    # `min` and `max` make no copy of the array, unlike `abs` or `isfinite`.
    with np.errstate(all="ignore"):
        return float(np.maximum(abs(float(values.min())), abs(float(values.max()))))


def find_non_finite(array: Any, batch_size: int, *, last: bool = False) -> tuple[int, ...] | None:
    """Return the samples of a batch that have a non-finite value in an array.

    The first axis is the batch, or the batch times another size; with `last`, the last axis is
    another size times the batch. Returns None if the axis isn't a multiple of the batch size.
    """
    values = np.asarray(array)
    if not values.ndim or not values.size or values.shape[-1 if last else 0] % batch_size:
        return None
    shape = (-1, batch_size) if last else (batch_size, -1)
    rows = ~np.isfinite(values).reshape(shape).all(axis=0 if last else 1)
    return tuple(np.flatnonzero(rows).tolist())


@dataclass(frozen=True)
class NamedTensor:
    """The kind of a tensor, such as "parameter", and its name."""

    kind: str
    name: str


@dataclass(frozen=True)
class Operand:
    """An operand of an equation."""

    source: str
    """Its name, or the primitive and the layer that computed it."""
    range: Range
    named: NamedTensor | None = None


@dataclass(frozen=True, eq=False)
class Origin:
    """The equation that produced a non-finite value, or an input that has one.

    `causes` are the origins of the operands. `result`, `array` and `operands` are recorded only if
    nothing is a cause, or the equation computes NaN from infinities.
    """

    number: int
    """Position in the order of execution; -1 for an input."""
    primitive: str
    scope: str
    has_nan: bool
    causes: tuple[Origin, ...] = ()
    result: Range | None = None
    operands: tuple[Operand, ...] = ()
    array: Any = None
    iteration: int = 0
    """Iteration of the outermost loop around the equation; 0 if none exists."""
    named: NamedTensor | None = None
    line: str = ""
    """The line of the user's code that made the equation, if its result is recorded."""
    intended: bool = False
    """Whether the equation passes on an infinite constant, such as a padding or a mask."""

    @property
    def makes_nan(self) -> bool:
        """Whether the equation produces NaN from values without NaN."""
        return self.has_nan and not any(cause.has_nan for cause in self.causes)


@dataclass(frozen=True)
class Cause:
    """The cause of a non-finite value."""

    origin: Origin
    reader: Origin | None = None
    """The first equation that reads `origin`, if that is an input."""

    @property
    def number(self) -> int:
        """Position in the order of execution of the equation that computed or read the value."""
        return self.origin.number if self.reader is None else self.reader.number


def find_cause(outcome: Origin) -> Cause:
    """Return the first cause of a non-finite value, among all values that it depends on.

    An equation that computes NaN from infinities is the cause only without an unintended cause,
    and an intended infinite constant (padding, mask) only if there is neither.
    """
    first_readers = {outcome: outcome}
    unvisited = [outcome]
    while unvisited:
        reader = unvisited.pop()
        for origin in reader.causes:
            if origin not in first_readers:
                unvisited.append(origin)
                first_readers[origin] = reader
            elif reader.number < first_readers[origin].number:
                first_readers[origin] = reader
    unintended: list[Cause] = []
    nan_makers: list[Cause] = []
    intended: list[Cause] = []
    for origin, reader in first_readers.items():
        cause = Cause(origin, reader if origin.number < 0 else None)
        if origin.causes and origin.makes_nan:
            nan_makers.append(cause)
        elif not origin.causes and origin.intended:
            intended.append(cause)
        elif not origin.causes:
            unintended.append(cause)
    return min(unintended or nan_makers or intended, key=lambda cause: cause.number)


Names = Mapping[Any, NamedTensor]


@dataclass(frozen=True)
class ReplayValue:
    """A tensor in the replay."""

    array: Any
    named: NamedTensor | None = None
    """Its name, if it is an input or has a name in `Interpreter.names`."""
    layer: str = ""
    """The layer that computed it."""
    primitive: str = ""
    """The primitive that computed it."""
    constant: bool = False
    """Whether the tensor is computed only from constants."""
    origin: Origin | None = None
    """Origin of a non-finite value; None for finite values and for constants of the program."""

    @property
    def source(self) -> str:
        """The tensor's name for the user."""
        if self.named is not None:
            return f"{self.named.kind} {self.named.name}".strip()
        if self.constant:
            return "constant"
        return f"{self.primitive} in {self.layer}" if self.layer else self.primitive


def is_finite(value: ReplayValue) -> bool:
    """Return whether a tensor has only finite values; True for types other than floats."""
    return not is_float(value.array) or bool(np.isfinite(find_largest_magnitude(value.array)))


def slice_iteration(value: ReplayValue, iteration: int) -> ReplayValue:
    """Return a scan's operand in an iteration, without the origin if the slice is finite."""
    part = replace(value, array=value.array[iteration])
    return replace(part, origin=None) if is_float(part.array) and is_finite(part) else part


def stack_iterations(parts: list[ReplayValue], var: Any) -> ReplayValue:
    """Stack the results of a scan's iterations along a new first axis."""
    if not parts:
        return ReplayValue(jnp.zeros((0, *var.aval.shape), var.aval.dtype))
    origins = [part.origin for part in parts if part.origin is not None]
    first = min(origins, key=lambda origin: origin.number) if origins else None
    array = jnp.stack([part.array for part in parts])
    constant = all(part.constant for part in parts)
    return replace(parts[0], array=array, origin=first, constant=constant)


@dataclass(frozen=True)
class Extreme:
    """The finite value that is nearest to overflow."""

    share: float = 0.0
    """Its magnitude divided by the largest number of its type."""
    value: float = 0.0
    dtype: str = ""
    source: str = ""


@dataclass
class Interpreter:
    """Runs jaxprs, and records the inputs of layers and the value nearest to overflow."""

    layer_inputs: dict[str, list[ReplayValue]] = field(default_factory=dict)
    """Outputs of other layers that a layer reads in the forward pass, by layer."""
    extreme: Extreme = field(default_factory=Extreme)
    names: Names = field(default_factory=dict)
    """Names of tensors by variable of a jaxpr."""
    _equations: int = 0
    """Number of equations that were computed."""
    _iterations: list[int] = field(default_factory=list)
    """Current iteration of each loop around the equation, the outermost first."""

    def evaluate(
        self, jaxpr: core.ClosedJaxpr, inputs: Sequence[ReplayValue], scope: str = ""
    ) -> list[ReplayValue]:
        """Return the results of a jaxpr that was called in a scope."""

        def compute(eqn: Any, operands: list[ReplayValue]) -> list[ReplayValue]:
            outputs = self._run_equation(eqn, operands, join_scope(eqn, scope))
            for position, var in enumerate(eqn.outvars):
                if var in self.names:
                    outputs[position] = replace(outputs[position], named=self.names[var])
            return outputs

        def read_constant(_: Any, value: Any) -> ReplayValue:
            array = value if hasattr(value, "dtype") else np.asarray(value)
            return ReplayValue(array, constant=True)

        return interpret_jaxpr(jaxpr, inputs, compute, read_constant)

    def _run_equation(self, eqn: Any, operands: list[ReplayValue], scope: str) -> list[ReplayValue]:
        match eqn.primitive.name:
            case "scan":
                return self._run_scan(eqn, operands, scope)
            case "while":
                return self._run_while(eqn, operands, scope)
            case "cond":
                branches = eqn.params["branches"]
                index = min(max(int(operands[0].array), 0), len(branches) - 1)
                return self.evaluate(branches[index], operands[1:], scope)
        called = find_called_jaxpr(eqn)
        if called is not None:
            return self.evaluate(called, operands, scope)
        return self._compute(eqn, operands, scope)

    def _run_scan(self, eqn: Any, operands: list[ReplayValue], scope: str) -> list[ReplayValue]:
        scan = read_scan(eqn)
        consts, carry, scanned = scan.split_operands(operands)
        iterations = range(scan.length)
        results: dict[int, list[ReplayValue]] = {}
        for iteration in reversed(iterations) if scan.reverse else iterations:
            sliced = [slice_iteration(value, iteration) for value in scanned]
            self._iterations.append(iteration)
            outputs = self.evaluate(scan.body, [*consts, *carry, *sliced], scope)
            self._iterations.pop()
            carry = outputs[: scan.num_carry]
            results[iteration] = outputs[scan.num_carry :]
        stacked = [
            stack_iterations([results[iteration][position] for iteration in iterations], var)
            for position, var in enumerate(scan.body.jaxpr.outvars[scan.num_carry :])
        ]
        return [*carry, *stacked]

    def _run_while(self, eqn: Any, operands: list[ReplayValue], scope: str) -> list[ReplayValue]:
        loop = read_while(eqn)
        condition_consts, body_consts, carry = loop.split_operands(operands)
        self._iterations.append(0)
        while True:
            (should_continue,) = self.evaluate(loop.condition, [*condition_consts, *carry], scope)
            if not bool(should_continue.array):
                self._iterations.pop()
                return carry
            carry = self.evaluate(loop.body, [*body_consts, *carry], scope)
            self._iterations[-1] += 1

    def _compute(self, eqn: Any, operands: list[ReplayValue], scope: str) -> list[ReplayValue]:
        with eqn.ctx.manager:
            arrays = bind_equation(eqn, [operand.array for operand in operands])
        self._equations += 1
        layer = find_layer(scope)
        name = eqn.primitive.name
        if "jvp(" in scope and "transpose(" not in scope:
            self._record_inputs(layer, operands)
        constant = all(operand.constant for operand in operands)
        results = []
        for array in arrays:
            origin = self._find_origin(eqn, scope, operands, array)
            results.append(ReplayValue(array, None, layer, name, constant, origin))
        return results

    def _record_inputs(self, layer: str, operands: list[ReplayValue]) -> None:
        """Add the operands that other layers computed, and columns, to the inputs of a layer."""
        inputs = self.layer_inputs.setdefault(layer, [])
        for operand in operands:
            is_inner = operand.constant or operand.layer == layer
            is_parameter = operand.named is not None and operand.named.kind != COLUMN
            is_new = all(operand.array is not value.array for value in inputs)
            if is_new and not (is_inner or is_parameter) and is_float(operand.array):
                inputs.append(operand)

    def _find_origin(
        self, eqn: Any, scope: str, operands: list[ReplayValue], array: Any
    ) -> Origin | None:
        """Return the origin of a result that isn't finite; None for a finite result."""
        primitive = eqn.primitive.name
        if not is_float(array):
            return self._find_origin_of_bits(primitive, scope, operands, array)
        magnitude = find_largest_magnitude(array)
        if np.isfinite(magnitude):
            self._record_extreme(magnitude, array, primitive, scope, operands)
            return None
        infinite = [value for value in operands if value.constant and not is_finite(value)]
        # Paddings and masks with minus infinity are intended.
        may_pad = bool(infinite) and primitive in MOVES
        # Neither sign nor intent of an infinite complex number is known.
        values = _to_magnitude(np.asarray(array))
        intended = may_pad and not (np.isnan(values) | np.isposinf(values)).any()
        causes = [value.origin for value in operands if value.origin and not value.constant]
        if not intended:
            constant_origins = [value.origin for value in infinite if value.origin]
            causes += [replace(origin, intended=False) for origin in constant_origins]
        origin = Origin(
            number=self._equations,
            primitive=primitive,
            scope=scope,
            has_nan=bool(np.isnan(magnitude)),
            causes=tuple(dict.fromkeys(causes)),
            iteration=self._iterations[0] if self._iterations else 0,
            intended=intended,
        )
        if origin.causes and not origin.makes_nan:
            return origin
        return replace(
            origin,
            result=find_range(array),
            operands=tuple(
                Operand(value.source, find_range(value.array), value.named)
                for value in operands
                if is_float(value.array)
            ),
            array=array,
            line=find_source_line(eqn),
        )

    def _find_origin_of_bits(
        self, primitive: str, scope: str, operands: list[ReplayValue], array: Any
    ) -> Origin | None:
        """Return the origin of integers that are the bits of a value that isn't finite."""
        if not jnp.issubdtype(array.dtype, jnp.integer):
            return None
        causes = tuple(
            value.origin
            for value in operands
            if value.origin and (primitive == BITCAST or not is_float(value.array))
        )
        has_nan = any(cause.has_nan for cause in causes)
        return Origin(self._equations, primitive, scope, has_nan, causes) if causes else None

    def _record_extreme(
        self, magnitude: float, array: Any, primitive: str, scope: str, operands: list[ReplayValue]
    ) -> None:
        share = magnitude / float(jnp.finfo(array.dtype).max)
        if share > self.extreme.share and not all(operand.constant for operand in operands):
            source = ReplayValue(array, None, find_layer(scope), primitive).source
            self.extreme = Extreme(share, magnitude, str(array.dtype), source)
