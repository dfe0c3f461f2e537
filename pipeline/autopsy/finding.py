"""What an autopsy finds: the tensor that is not finite first, and all there is to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.autopsy.ranges import Range

Phase = Literal["data", "update", "forward", "loss", "backward", "gradient norm"]

_PLACES: Mapping[Phase, str] = {
    "data": "in the data",
    "update": "in the state before this step",
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in the backward pass",
    "gradient norm": "in the norm of all gradients",
}
MOST_LINES = 8
"""Of tensors that are shown; autopsy.json has all."""
MOST_SAMPLES = 16


@dataclass(frozen=True)
class Tensor:
    """A tensor: its kind (activation, gradient, parameter, loss, input column), name and range."""

    kind: str
    name: str
    range: Range

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.range}".replace(" :", ":")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "name": self.name, **self.range.to_dict()}


@dataclass(frozen=True)
class BadSamples:
    """The samples whose part of a tensor is not finite: their ids and places in the batch."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    of: int
    """How many real samples the batch has."""

    def __str__(self) -> str:
        if len(self.ids) == self.of:
            return f"all {self.of} samples of the batch"
        named = ", ".join(map(str, self.ids[:MOST_SAMPLES]))
        more = f" and {len(self.ids) - MOST_SAMPLES} more" if len(self.ids) > MOST_SAMPLES else ""
        return f"{len(self.ids)} of {self.of} samples: {named}{more}"


@dataclass(frozen=True)
class Finding:
    """Where in a step what is not finite came from.

    `layer` is the path of a layer, as in the names of parameters; "" outside of all.
    """

    phase: Phase
    layer: str
    operation: str
    """The JAX primitive; "" where an input of the step is not finite already."""
    tensor: Tensor
    operands: tuple[Tensor, ...] = ()
    """What the operation read."""
    inputs: tuple[Tensor, ...] = ()
    """What the layer read."""
    parameters: tuple[Tensor, ...] = ()
    """Those of the layer."""
    samples: BadSamples | None = None
    """None where the tensor has no part for each sample."""

    @property
    def headline(self) -> str:
        """The finding in one line."""
        where = f", {self.layer}" if self.layer else ""
        by = f" ({self.operation})" if self.operation else ""
        return f"{_PLACES[self.phase]}{where}{by}: {self.tensor}"

    def __str__(self) -> str:
        lines = [self.headline]
        if self.samples is not None and self.samples.ids:
            lines.append(f"  samples: {self.samples}")
        for title, tensors in (
            ("it read", self.operands),
            ("the layer read", self.inputs),
            ("the layer has", self.parameters),
        ):
            lines += [f"  {title} {tensor}" for tensor in tensors[:MOST_LINES]]
            if len(tensors) > MOST_LINES:
                lines.append(f"  {title} {len(tensors) - MOST_LINES} more")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        samples = self.samples
        return {
            "phase": self.phase,
            "layer": self.layer or None,
            "operation": self.operation or None,
            "tensor": self.tensor.to_dict(),
            "operands": _dicts(self.operands),
            "inputs": _dicts(self.inputs),
            "parameters": _dicts(self.parameters),
            "samples": None
            if samples is None
            else {"ids": list(samples.ids), "positions": list(samples.positions), "of": samples.of},
        }


def _dicts(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [tensor.to_dict() for tensor in tensors]


@dataclass(frozen=True)
class Autopsy:
    """One bad step looked at again: the finding, or why there is none."""

    step: int
    loss: float
    grad_norm: float
    """As the replay has them."""
    finding: Finding | None
    reason: str = ""
    """Why nothing was found."""

    def __str__(self) -> str:
        if self.finding is None:
            return f"step {self.step}: not reproduced: {self.reason}"
        return f"step {self.step}: {self.finding}"

    @property
    def headline(self) -> str:
        """In one line."""
        return str(self).splitlines()[0]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "step": self.step,
            "reproduced": self.finding is not None,
            "reason": self.reason or None,
            "loss": str(self.loss),
            "grad_norm": str(self.grad_norm),
            "finding": None if self.finding is None else self.finding.to_dict(),
            "text": str(self),
        }
