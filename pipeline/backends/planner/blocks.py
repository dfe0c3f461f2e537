"""The blocks that a plan decides about: regions of activations, operators between them, weights.

A group is a set of dimensions that are sharded together (dimension_groups.py). A region is a set of
activations that are linked by common groups, such as a residual stream. An operator is a product
with a parameter, or a look-up of the parameter's rows. It reads one region and writes another.
Blocks have no names, so that repeated blocks are equal and are priced once. `StepBlocks` has the
names.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

Role = Literal["batch", "contracted", "output", "both"]
"""Role of a dimension of an operator, by the arrays that have it and are divided if it is sharded.

* batch: operand and result; then the weight's gradient is a partial sum;
* contracted: operand and weight (of a look-up, the rows of the table); the result is a partial sum;
* output: weight and result; the operand's gradient is a partial sum;
* both: operand, weight and result, such as a batch of weights, one for each expert.
"""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes and floating-point operations of values whose dimensions are in these groups."""

    groups: tuple[int, ...]
    nbytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class PartialSum:
    """Reductions inside a region, whose results are partial sums if a summed group is sharded."""

    groups: tuple[int, ...]
    """Groups of the results."""
    summed: tuple[int, ...]
    """Groups that are summed over."""
    nbytes: int
    """Size of all results together."""
    count: int = 1
    """Number of results."""


@dataclass(frozen=True, slots=True)
class Region:
    """Activations that are linked by common groups. A group is an index of `sizes`."""

    sizes: tuple[int, ...]
    """Size of each group, of which the number of its pieces must be a divisor."""
    samples: int | None = None
    """The group of the batch dimension; None if none exists."""
    work: tuple[Extent, ...] = ()
    """Traffic and operations of a step, forward and backward."""
    saved: tuple[Extent, ...] = ()
    """Activations that the backward pass reads."""
    sums: tuple[PartialSum, ...] = ()
    parameters: tuple[Extent, ...] = ()
    """Biases, scales and other element-wise parameters, which are sharded like the region."""


@dataclass(frozen=True, slots=True)
class Array:
    """An operand or a result of an operator."""

    nbytes: int
    groups: tuple[int | None, ...]
    """Group of each dimension in the array's region; None if the dimension can't be sharded."""


@dataclass(frozen=True, slots=True)
class OperatorDim:
    """A dimension of an operator, and its positions in operand, weight and result, if any."""

    size: int
    role: Role
    operand: int | None = None
    weight: int | None = None
    result: int | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """A product with a parameter, or a look-up of the parameter's rows."""

    kind: Literal["product", "look_up"]
    operand: Array
    result: Array
    dims: tuple[OperatorDim, ...]
    weight_bytes: int
    flops: int
    """Floating-point operations of the forward pass."""
    samples: int | None = None
    """Index in `dims` of the batch dimension; None if it isn't there."""
    operand_gradient: bool = True
    """Whether the backward pass computes the operand's gradient."""


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """An operator, with the indices of the regions that it reads and writes, and of its weight."""

    operator: Operator
    source: int
    target: int
    weight: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of one or more operators."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    uses: int = 1


@dataclass(frozen=True, slots=True)
class RegionParameter:
    """A parameter that belongs to a region, and each dimension's group in the region."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    region: int
    groups: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """The output of a layer that has parameters, and each dimension's group in its region."""

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
        return sum(parameter.nbytes for parameter in self._all_parameters)

    @property
    def largest(self) -> Weight | RegionParameter:
        """The largest parameter, of equal ones the last by path; an empty one if none exists."""
        empty = Weight("", (), 0)
        return max(self._all_parameters, key=attrgetter("nbytes", "path"), default=empty)

    @property
    def _all_parameters(self) -> tuple[Weight | RegionParameter, ...]:
        return (*self.weights, *self.parameters)
