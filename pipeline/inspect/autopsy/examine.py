"""Replay of one step outside the compiled loop, and the finding from its values.

A finding is the first tensor that is not finite, and the values that led to it.

The step is traced from the same functions as the compiled step, with the same precision, lowerings
and random keys, and then computed equation by equation. Last digits may differ from the compiled
step, since XLA fuses operations that are computed separately here. In the replay, map ops, the loss
and the norm of the gradient have named scopes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from pipeline.backends.graph.replay import (
    COLUMN,
    Cause,
    Interpreter,
    NamedTensor,
    Origin,
    Range,
    ReplayValue,
    find_cause,
    find_non_finite,
    find_range,
)
from pipeline.core.files.value_text import join_first
from pipeline.core.host.jax_private import keep_from_cache
from pipeline.core.host.tree_paths import flatten_by_path, list_leaf_paths
from pipeline.data.batch import Batch
from pipeline.data.dataset_spec import WrappedOp
from pipeline.engine.step_checks import make_input
from pipeline.models.modules.name_stack import find_layer
from pipeline.training.bucketing import apply_in_bucket
from pipeline.training.features.accumulation import count_microbatches
from pipeline.training.parallel.microbatches import compute_microbatch_size, list_batch_positions
from pipeline.training.state import TrainState
from pipeline.training.step import compute_norm, compute_step_gradients, get_loss_scale
from pipeline.training.step_config import StepConfig

DATA = "dataset.train.ops"
LOSS = "loss"
GRADIENT_NORM = "gradient_norm"
KINDS: dict[Phase, str] = {
    "data": COLUMN,
    "forward": "activation",
    "loss": "loss",
    "backward": "gradient",
    "gradient norm": "gradient",
}
"""Kind of the tensors that operations return, by phase of the step."""
_INPUTS = {
    "columns": COLUMN,
    "params": "parameter",
    "collections": "batch statistics",
    "features": "state of the feature",
}
"""Kind of a step's input, by field of the state or the batch."""
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


def examine(
    step_config: StepConfig, state: TrainState, batch: Batch, device: jax.Device | None = None
) -> Autopsy:
    """Compute the step after `state` again, and find its first non-finite value."""
    step = int(state.step) + 1
    state = step_config.select_gradient_state(state)
    with jax.default_device(device):
        state, batch = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), (state, batch))
        replay = _Replay(step_config, state, batch)
        loss, norm = replay.compute()
    grad_norm = math.nan if norm is None else float(norm.array)
    origin = loss.origin if norm is None else norm.origin
    if origin is None:
        extreme = replay.interpreter.extreme
        reason = (
            "one operation at a time, loss and gradient are finite. The compiled step fuses "
            "operations, which changes the rounding; nearest to the limit of its type is "
            f"{extreme.source}, {extreme.value:.4g} in {extreme.dtype}, {extreme.share:.2%} of the "
            "largest number"
        )
        return Autopsy(step, float(loss.array), grad_norm, None, reason)
    finding = replay.make_finding(find_cause(origin), affects_loss=norm is None)
    return Autopsy(step, float(loss.array), grad_norm, finding)


@dataclass
class _Replay:
    """A step that is computed again, equation by equation."""

    step_config: StepConfig
    state: TrainState
    batch: Batch

    def __post_init__(self) -> None:
        self.batch_size = int(self.batch.sample.shape[0])
        self.microbatch_size = compute_microbatch_size(
            self.batch_size, count_microbatches(self.step_config.features)
        )
        self.interpreter = Interpreter()

    def compute(self) -> tuple[ReplayValue, ReplayValue | None]:
        """Compute the step's loss, and the norm of its gradient if the loss is finite.

        If the loss isn't finite, the cause is in the equations of the loss. So the gradient's
        equations, which are most of a step, aren't computed, and the norm is None.
        """
        ops = tuple(
            _ScopedOp(name=op.name, op=op, position=position)
            for position, op in enumerate(self.step_config.train_ops)
        )
        objective = self.step_config.objective
        scoped_loss = jax.named_scope(LOSS)(objective.loss)
        scoped = replace(
            self.step_config, train_ops=ops, objective=replace(objective, loss=scoped_loss)
        )
        function = partial(compute_outcome, scoped)
        closed, shape = jax.make_jaxpr(function, return_shape=True)(self.state, self.batch)
        leaves = flatten_by_path((self.state, self.batch))
        inputs = [make_input(_name_input(path), leaf) for path, leaf in leaves.items()]
        outputs = list_leaf_paths(shape)
        is_loss = [path == "loss" for path in outputs]  # outputs that `dce_jaxpr` keeps
        loss_jaxpr = dce_jaxpr(closed.jaxpr, is_loss, instantiate=True)[0]
        names = {
            var: NamedTensor("gradient of", path.removeprefix("gradients/"))
            for var, path in zip(closed.jaxpr.outvars, outputs, strict=True)
            # A literal, which has `val`, can't be a key.
            if path.startswith("gradients/") and not hasattr(var, "val")
        }
        # Each operation compiles to a program that no later run uses.
        with keep_from_cache():
            (loss,) = self.interpreter.evaluate(core.ClosedJaxpr(loss_jaxpr, closed.consts), inputs)
            if loss.origin is not None:
                return loss, None
            self.interpreter = Interpreter(names=names)
            loss, norm, *_ = self.interpreter.evaluate(closed, inputs)
        return loss, norm

    def make_finding(self, cause: Cause, *, affects_loss: bool) -> Finding:
        """Return the finding for a cause: operation, layer, tensors and samples."""
        origin = cause.origin
        if origin.named is not None and origin.number < 0:
            return self._find_in_input(origin)
        phase = phase_of(origin.scope, affects_loss=affects_loss)
        gradient = None
        layer = find_layer(origin.scope)
        if phase == "gradient norm":
            gradient = _find_gradient(origin)
            layer = gradient.name.rpartition("/")[0] if gradient else ""
        inputs = self.interpreter.layer_inputs.get(layer, ()) if layer else ()
        return Finding(
            phase,
            layer,
            origin.primitive,
            self._describe_result(origin, phase, gradient),
            tuple(Tensor("", operand.source, operand.range) for operand in origin.operands),
            tuple(Tensor("", value.source, find_range(value.array)) for value in inputs),
            self._list_parameters(layer),
            self._find_samples(origin, phase),
        )

    def _find_in_input(self, origin: Origin) -> Finding:
        """Return the finding for an input of the step: a column of the batch, or a parameter."""
        assert origin.named is not None, "inputs have names"
        assert origin.result is not None, "a cause has been looked at"
        kind = origin.named.kind
        name = origin.named.name
        tensor = Tensor(kind, name, origin.result)
        if kind == COLUMN:
            rows = find_non_finite(origin.array, origin.array.shape[0])
            return Finding("data", "", "", tensor, samples=self._identify_samples(rows))
        layer = name.rpartition("/")[0]
        return Finding("update", layer, "", tensor, (), (), self._list_parameters(layer))

    def _describe_result(
        self, origin: Origin, phase: Phase, gradient: NamedTensor | None
    ) -> Tensor:
        """Return the kind, the name and the range of the operation's result."""
        assert origin.result is not None, "a cause has been looked at"
        layer = find_layer(origin.scope)
        operands = [operand.named for operand in origin.operands]
        kind = KINDS[phase]
        name = f"of {layer}" if layer else ""
        if gradient is not None:
            name = f"of {gradient.name}, squared"
        elif phase == "data":
            position = int(layer.removeprefix(f"{DATA}.").partition(".")[0])
            name = f"{' and '.join(self.step_config.train_ops[position].columns)} after that op"
        elif origin.primitive == "convert_element_type" and operands[0] is not None:
            kind = operands[0].kind
            name = f"{operands[0].name}, as the layer reads it"
        return Tensor(kind, name, origin.result)

    def _list_parameters(self, layer: str) -> tuple[Tensor, ...]:
        if not layer:
            return ()
        return tuple(
            Tensor("parameter", name, find_range(leaf))
            for name, leaf in flatten_by_path(self.state.params).items()
            if name.startswith(f"{layer}/")
        )

    def _find_samples(self, origin: Origin, phase: Phase) -> NonFiniteSamples | None:
        """Return the samples whose part isn't finite; None if the result has no axis of samples."""
        if origin.result is None or phase == "gradient norm":
            return None
        layer = find_layer(origin.scope)
        shape = origin.result.shape
        parameter_shapes = {tensor.range.shape for tensor in self._list_parameters(layer)}
        is_of_parameter = shape in parameter_shapes or shape[::-1] in parameter_shapes
        # The gradient of a parameter has no axis of samples.
        if phase == "backward" and is_of_parameter:
            return None
        size = self.microbatch_size
        input_shapes = [value.array.shape for value in self.interpreter.layer_inputs.get(layer, ())]
        # A layer may read images in CHWN.
        is_batch_last = any(
            shape and shape[0] != size and shape[-1] == size for shape in input_shapes
        )
        rows = find_non_finite(origin.array, size, last=is_batch_last)
        if rows is None:
            return None
        positions = list_batch_positions(
            rows, origin.iteration, self.batch_size, count_microbatches(self.step_config.features)
        )
        return self._identify_samples(positions)

    def _identify_samples(self, rows: tuple[int, ...] | None) -> NonFiniteSamples:
        """Return the samples at these rows of the batch, without padding; no samples for None."""
        num_valid = int(self.batch.count)
        positions = tuple(row for row in rows or () if row < num_valid)
        ids = np.asarray(self.batch.sample)[list(positions)]
        if self.batch.num_samples is not None:
            ids = ids % self.batch.num_samples
        return NonFiniteSamples(tuple(ids.tolist()), positions, num_valid)


def _name_input(path: str) -> NamedTensor:
    """Return the name of an input of the step; `path` is like `0/params/conv_0/kernel`."""
    _, _, inner_path = path.partition("/")
    field, _, name = inner_path.partition("/")
    if field == "collections":
        name = name.partition("/")[2]
    return NamedTensor(_INPUTS.get(field, field), name)


def _find_gradient(origin: Origin) -> NamedTensor | None:
    """Return the gradient that an equation of the norm reads; the largest if it reads several."""
    operands = [operand for operand in origin.operands if operand.named is not None]
    if not operands:
        return None
    return max(operands, key=lambda operand: operand.range.max or 0.0).named


class Outcome(NamedTuple):
    """The values that decide whether a step is finite, and the gradients by name."""

    loss: Any
    grad_norm: Any
    gradients: Any


class _ScopedOp(WrappedOp):
    """A map op in a scope named for its place in the recipe, `dataset.train.ops.1.rescale`."""

    position: int

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        with jax.named_scope(f"{DATA}.{self.position}.{self.op.name}"):
            return self.op.map(xp, values, uniforms)


def compute_outcome(step_config: StepConfig, state: TrainState, batch: Batch) -> Outcome:
    """Return the loss, the gradient norm and the gradients of a step, without its update."""

    def compute(padded: Batch) -> tuple[Any, Any]:
        result = compute_step_gradients(step_config, state, padded)
        return result.loss, result.values

    loss, values = apply_in_bucket(step_config.padding, batch, compute)
    with jax.named_scope(GRADIENT_NORM):
        norm = compute_norm(values, 1 / get_loss_scale(step_config, state))
    return Outcome(loss, norm, values)


def phase_of(scope: str, *, affects_loss: bool) -> Phase:
    """Return the phase of a scope; `affects_loss` is whether the loss depends on its operation."""
    if GRADIENT_NORM in scope:
        return "gradient norm"
    if DATA in scope:
        return "data"
    if "transpose(" in scope:
        return "backward"
    layer = find_layer(scope)
    if not layer or layer.startswith(LOSS):
        return "loss" if affects_loss else "backward"
    return "forward"


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
