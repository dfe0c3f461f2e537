"""The blocks that a plan decides about: regions of activations, operators between them, weights.

A region is all activations that share groups of dimensions (dimension_groups.py): a residual stream
is one region of any length, so a residual edge costs nothing by itself. An operator is a
product with a parameter, or the look-up of its rows; it leads from a region to a region. Blocks
carry no names, so that equal ones are equal and are priced once; names are in `StepBlocks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["batch", "contracted", "output", "both"]
"""Effect of sharding of an operator's dimension:

* batch: of the activations alone; gradients of the weight are partial sums;
* contracted: of the operand and the weight; the result is a partial sum (rows of a table: each
  device looks up what it has);
* output: of the weight and the result; the operand's gradient is a partial sum;
* both: of operand, weight and result alike, as a batch of weights, one for each expert.
"""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes and floating-point operations of values that some groups of a region shard."""

    groups: tuple[int, ...]
    nbytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class PartialSum:
    """Reductions inside a region: their results, and the groups that they sum over."""

    groups: tuple[int, ...]
    summed: tuple[int, ...]
    nbytes: int
    """Of all `count` results."""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Region:
    """Activations that share groups of dimensions.

    A group is its index in `sizes`; no sharding makes more pieces of it than its size has.
    """

    sizes: tuple[int, ...]
    samples: int | None = None
    """The group that numbers samples."""
    work: tuple[Extent, ...] = ()
    """Per step, forward and backward."""
    saved: tuple[Extent, ...] = ()
    """Kept from the forward pass to the backward pass."""
    sums: tuple[PartialSum, ...] = ()
    parameters: tuple[Extent, ...] = ()
    """Biases, scales and others that are applied element by element; sharded as the region is."""


@dataclass(frozen=True, slots=True)
class Array:
    """An operand or a result: its bytes, and the group in its region of each dimension."""

    nbytes: int
    groups: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class OperatorDim:
    """A dimension of an operator, and its positions in operand, weight and result."""

    size: int
    role: Role
    operand: int | None = None
    weight: int | None = None
    result: int | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """A product with a parameter, or a look-up of its rows. Work is of the forward pass."""

    kind: Literal["product", "look_up"]
    operand: Array
    result: Array
    dims: tuple[OperatorDim, ...]
    weight_bytes: int
    flops: int
    samples: int | None = None
    """The one of `dims` that numbers samples."""
    operand_gradient: bool = True
    """Whether anything before it is trained."""


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """An operator at its place: indices of its regions and its weight."""

    operator: Operator
    source: int
    target: int
    weight: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of operators."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    uses: int = 1


@dataclass(frozen=True, slots=True)
class RegionParameter:
    """A parameter that belongs to a region, with its group there of each dimension."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    region: int
    groups: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """The output of a layer that has parameters, with its group in a region of each dimension."""

    layer: str
    region: int
    groups: tuple[int | None, ...]


@dataclass(frozen=True)
class StepBlocks:
    """The blocks of a step, and the names of its arrays."""

    regions: tuple[Region, ...]
    operators: tuple[OperatorUse, ...]
    weights: tuple[Weight, ...]
    parameters: tuple[RegionParameter, ...] = ()
    outputs: tuple[LayerOutput, ...] = ()

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self._all_parameters)

    @property
    def largest(self) -> Weight | RegionParameter:
        """The largest parameter; the last path of equals."""
        empty = Weight("", (), 0)
        return max(self._all_parameters, key=lambda p: (p.nbytes, p.path), default=empty)

    @property
    def _all_parameters(self) -> tuple[Weight | RegionParameter, ...]:
        return (*self.weights, *self.parameters)
