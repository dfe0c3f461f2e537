"""Result of an autopsy: the first tensor that is not finite, and the values that led to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipeline.backends.graph.replay import Range
from pipeline.core.files.value_text import join_first

Phase = Literal["data", "update", "forward", "loss", "backward", "gradient norm"]

_PHASE_TEXTS: Mapping[Phase, str] = {
    "data": "in the data",
    "update": "in the state before this step",
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in the backward pass",
    "gradient norm": "in the norm of all gradients",
}
MAX_LINES = 8
"""At most this many tensors of each group are printed; autopsy.json has all."""
MAX_SAMPLES = 16


@dataclass(frozen=True)
class Tensor:
    """Kind (activation, gradient, parameter, loss, input column), name and range of a tensor."""

    kind: str
    name: str
    range: Range

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.range}".replace(" :", ":")  # if the name is ""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, **asdict(self.range)}


@dataclass(frozen=True)
class NonFiniteSamples:
    """Ids and batch positions of the samples whose part of a tensor is not finite."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    of: int
    """Number of valid samples in the batch, without padding."""

    def __str__(self) -> str:
        if len(self.ids) == self.of:
            return f"all {self.of} samples of the batch"
        named = join_first(list(map(str, self.ids)), MAX_SAMPLES)
        return f"{len(self.ids)} of {self.of} samples: {named}"


@dataclass(frozen=True)
class Finding:
    """The origin of a non-finite value; `layer` is the path of a layer, or "" outside of all."""

    phase: Phase
    layer: str
    operation: str
    """Name of the JAX primitive; "" if an input of the step isn't finite."""
    tensor: Tensor
    operands: tuple[Tensor, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    parameters: tuple[Tensor, ...] = ()
    samples: NonFiniteSamples | None = None
    """Samples whose part isn't finite; None if the tensor isn't divided by samples."""

    @property
    def headline(self) -> str:
        layer = f", {self.layer}" if self.layer else ""
        operation = f" ({self.operation})" if self.operation else ""
        return f"{_PHASE_TEXTS[self.phase]}{layer}{operation}: {self.tensor}"

    def __str__(self) -> str:
        lines = [self.headline]
        if self.samples is not None and self.samples.ids:
            lines.append(f"  samples: {self.samples}")
        for title, tensors in (
            ("it read", self.operands),
            ("the layer read", self.inputs),
            ("the layer has", self.parameters),
        ):
            lines += [f"  {title} {tensor}" for tensor in tensors[:MAX_LINES]]
            if len(tensors) > MAX_LINES:
                lines.append(f"  {title} {len(tensors) - MAX_LINES} more")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        samples = self.samples
        return {
            "phase": self.phase,
            "layer": self.layer or None,
            "operation": self.operation or None,
            "tensor": self.tensor.to_dict(),
            "operands": [tensor.to_dict() for tensor in self.operands],
            "inputs": [tensor.to_dict() for tensor in self.inputs],
            "parameters": [tensor.to_dict() for tensor in self.parameters],
            "samples": None if samples is None else asdict(samples),
        }


@dataclass(frozen=True)
class Autopsy:
    """Result of the autopsy of one non-finite step: a finding, or the reason without one."""

    step: int
    loss: float
    grad_norm: float
    """Gradient norm of the replay; NaN if the loss is not finite, since the replay ends there."""
    finding: Finding | None
    reason: str = ""
    is_fault_of_machine: bool = False
    """Whether the compiled step returned another result the second time."""

    def __str__(self) -> str:
        if self.finding is None:
            return f"step {self.step}: not reproduced: {self.reason}"
        return f"step {self.step}: {self.finding}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "reproduced": self.finding is not None,
            "reason": self.reason or None,
            "loss": str(self.loss),
            "grad_norm": str(self.grad_norm),
            "finding": None if self.finding is None else self.finding.to_dict(),
            "text": str(self),
        }
