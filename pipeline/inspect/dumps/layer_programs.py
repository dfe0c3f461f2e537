"""Programs that compute one training step and return the tensors of every layer.

They are compiled apart from the training program, since more outputs would change how XLA fuses it.
So their loss may differ from the run's loss in the last digits.

A replay in float64 has the same equations with wider floating-point types. Its results show how
much of a difference is rounding. Types that layers request are widened too. Random draws keep their
bits, since they are integers until they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax import Array
from jax.extend import core
from jax.tree_util import register_dataclass

from pipeline.core.host.jaxpr import (
    FLOW,
    bind_equation,
    compute_flow,
    find_called_jaxpr,
    interpret_jaxpr,
)
from pipeline.core.host.platforms import CPU, get_platform
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.inspect.dumps.layer_observer import LayerForm, LayerObserver
from pipeline.inspect.dumps.portions import Portion
from pipeline.models.lowerings.problem import DEFAULTS
from pipeline.models.modules.apply_layers import intercept_layers, record_layers, to_nhwc
from pipeline.models.modules.layer_capture import tap
from pipeline.models.modules.network import Network
from pipeline.stages.build import Built
from pipeline.training.features.loss_scales import get_loss_scale_state
from pipeline.training.forward_pass import apply_network, compute_loss
from pipeline.training.losses import BatchLoss
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig
from pipeline.training.update import init_with_output

NumpyArrays = dict[str, np.ndarray]
_Program = tuple[Callable[..., Any], Mapping[str, LayerForm]]
"""A compiled function, and the form of every layer by path."""
QUICK = {"xla_backend_optimization_level": "0"}
"""Compiler options of a CPU program that runs once: optimization takes longer than it saves."""
_WIDE = jnp.dtype("float64")
_BIT_PRIMITIVES = ("bitcast_convert_type", "nextafter")
"""Primitives that aren't widened, since their results depend on the bits of a number."""


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one pass through a network, by layer, in numpy.

    Images are (batch, height, width, channels). Floats of 16 bits are widened to float32.
    Gradients are of the unscaled loss.
    """

    inputs: NumpyArrays
    outputs: NumpyArrays
    input_gradients: NumpyArrays
    """Gradients at the layers' inputs, except integer inputs."""
    output_gradients: NumpyArrays
    parameters: NumpyArrays
    """Gradients of parameters by path, such as `conv_0/kernel`."""
    statistics: NumpyArrays
    """Batch statistics after the step by path, such as `batch_norm_0/mean`."""
    logits: np.ndarray
    logits_gradient: np.ndarray
    loss: float
    forms: Mapping[str, LayerForm] = field(default_factory=dict)


@register_dataclass
@dataclass(frozen=True)
class Weights:
    """The part of a state that the forward and the backward pass read."""

    params: Any
    collections: Any
    loss_scale: Any

    @staticmethod
    def of(state: TrainState) -> Weights:
        """Return copies of the weights of a state in numpy, since training consumes the state."""
        leaves = state.params, state.collections, get_loss_scale_state(state).scale
        return Weights(*jax.tree.map(np.array, leaves))

    def replace_statistics(self, statistics: Mapping[str, Any]) -> Weights:
        """Return the weights with other collections: arrays by path, as in `LayerTensors`."""
        structure = jax.tree.structure(self.collections)
        paths = [path.partition("/")[2] for path in flatten_by_path(self.collections)]
        arrays = [statistics[path] for path in paths]
        return replace(self, collections=jax.tree.unflatten(structure, arrays))


@dataclass(frozen=True, eq=False)
class LayerPrograms:
    """The programs of one configuration of a step, on one device.

    `config` is for the phase of the step (`FreezePhase`). A program is compiled at its first call.
    Raises ValueError if the network isn't a list of layers.
    """

    config: StepConfig
    device: jax.Device
    _programs: dict[Any, _Program] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.config.network, Network):
            raise ValueError(
                "the network isn't a list of layers, so its layers' inputs and outputs can't be "
                "observed; must be a model that lists layers"
            )

    def with_types_of(self, other: Any) -> LayerPrograms:
        """Return programs of the same layers with another network's types and default lowerings."""
        network = self.config.network.clone(
            dtype=other.dtype, rules=other.rules, policy=DEFAULTS, layout="nhwc"
        )
        return replace(self, config=replace(self.config, network=network))

    def compute_free(self, weights: Weights, portion: Portion) -> LayerTensors:
        """Compute the step so that every layer reads the outputs of the layers before it."""
        compute, forms = self._get_program("free", _compute_free_pass, weights, portion)
        weights, portion = jax.device_put((weights, portion), self.device)
        return _to_numpy(compute(weights, portion), forms)

    def compute_forced(
        self, weights: Weights, portion: Portion, forced: LayerTensors, *, wide: bool = False
    ) -> LayerTensors:
        """Compute every layer, forward and backward, from other layers' tensors in `forced`.

        So errors don't add up: a layer's results have only the error of this layer. With `wide`
        layers are computed in float64 on the CPU.
        """
        name = "float64" if wide else "forced"
        device = jax.devices(CPU.name)[0] if wide else self.device
        compute, forms = self._get_program(name, _compute_forced_pass, weights, portion, forced)
        arrays = {
            "outputs": forced.outputs,
            "input_gradients": forced.input_gradients,
            "output_gradients": forced.output_gradients,
            "logits": forced.logits,
        }
        weights, portion, arrays = jax.device_put((weights, portion, arrays), device)
        return _to_numpy(compute(weights, portion, arrays), forms)

    def _get_program(
        self,
        name: str,
        function: Callable[..., Any],
        weights: Weights,
        portion: Portion,
        forced: LayerTensors | None = None,
    ) -> _Program:
        """Return the program `name` of `function` for a portion's shapes, compiled once."""
        key = name, str(jax.tree.map(jnp.shape, portion.inputs)), portion.labels.shape
        if key not in self._programs:
            shapes = _trace_shapes(self.config, weights, portion, forced)
            compute = partial(function, self.config, shapes)
            if name == "float64":
                call = compile_in_float64(compute)
            else:
                options = QUICK if get_platform(self.device.platform).optimizes_slowly else None
                call = jax.jit(compute, compiler_options=options)
            self._programs[key] = call, shapes.forms
        return self._programs[key]


@dataclass(frozen=True)
class _Shapes:
    """Shapes and types of the layers' inputs and outputs, and of the logits."""

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    logits: Any
    forms: Mapping[str, LayerForm]


def layer_kinds(built: Built) -> dict[str, str]:
    """Return the kinds of all layers of a network by path, without computing the network."""
    kinds: dict[str, str] = {}

    def note_kind(path: tuple[str, ...], kind: str, _: Any) -> None:
        kinds["/".join(path)] = kind

    with record_layers(note_kind):
        jax.eval_shape(partial(init_with_output, built.step_config), built.seed)
    return kinds


def _apply_network(
    config: StepConfig, params: Any, collections: Any, portion: Portion, observer: LayerObserver
) -> tuple[Array, Any]:
    with intercept_layers(observer):
        return apply_network(
            config, {"params": params, **collections}, portion.inputs, portion.dropout
        )


def _compute_loss(config: StepConfig, logits: Array, portion: Portion) -> BatchLoss:
    return compute_loss(config, logits, portion.labels, portion.mask, portion.divisor)


def _trace_shapes(
    config: StepConfig, weights: Weights, portion: Portion, forced: LayerTensors | None
) -> _Shapes:
    observer = LayerObserver()
    if forced is not None:
        observer.forced_outputs = forced.outputs
        observer.forced_gradients = forced.input_gradients

    def forward(params: Any, collections: Any, portion: Portion) -> Any:
        logits, _ = _apply_network(config, params, collections, portion, observer)
        return dict(observer.inputs), dict(observer.outputs), logits

    params = weights.params
    inputs, outputs, logits = jax.eval_shape(forward, params, weights.collections, portion)
    # jax sorts the keys of dicts; this restores the order in which layers begin.
    forms = {path: observer.forms[path] for path in observer.paths}
    return _Shapes(inputs, outputs, logits, forms)


def _make_slots(shapes: Mapping[str, Any]) -> dict[str, Array]:
    """Return a slot for each array: its gradient is the gradient at the array (`tap`)."""
    return {
        path: jnp.zeros(x.shape, x.dtype)
        for path, x in shapes.items()
        if jnp.issubdtype(x.dtype, jnp.inexact)
    }


def _compute_free_pass(
    config: StepConfig, shapes: _Shapes, weights: Weights, portion: Portion
) -> dict[str, Any]:
    """Compute the arrays of `LayerTensors`; every layer reads the layers before it."""
    scale = weights.loss_scale
    logits_slot = jnp.zeros(shapes.logits.shape, shapes.logits.dtype)
    slots = _make_slots(shapes.inputs), _make_slots(shapes.outputs), logits_slot

    def compute(params: Any, slots: Any) -> tuple[Array, Any]:
        observer = LayerObserver(slots[0], slots[1])
        logits, statistics = _apply_network(config, params, weights.collections, portion, observer)
        loss = _compute_loss(config, tap(logits, slots[2]), portion)
        recorded = observer.inputs, observer.outputs, logits, statistics, loss.reported
        return loss.minimised * scale, recorded

    grad = jax.grad(compute, argnums=(0, 1), has_aux=True)
    (by_params, by_slots), recorded = grad(weights.params, slots)
    return _collect_results(shapes.forms, recorded, (by_params, *by_slots), scale)


def _compute_forced_pass(
    config: StepConfig,
    shapes: _Shapes,
    weights: Weights,
    portion: Portion,
    forced: Mapping[str, Any],
) -> dict[str, Any]:
    """Compute the arrays of `LayerTensors`; every layer, and the loss, reads `forced` arrays."""
    scale = weights.loss_scale
    gradients = {path: g * scale for path, g in forced["input_gradients"].items()}
    slots = _make_slots(shapes.inputs), jnp.zeros_like(forced["logits"])

    def compute(params: Any, slots: Any) -> tuple[Any, Any]:
        observer = LayerObserver(
            slots[0], forced_outputs=forced["outputs"], forced_gradients=gradients
        )
        logits, statistics = _apply_network(config, params, weights.collections, portion, observer)
        loss = _compute_loss(config, tap(forced["logits"], slots[1]), portion)
        recorded = observer.inputs, observer.outputs, logits, statistics, loss.reported
        return (observer.outputs, loss.minimised * scale), recorded

    (outputs, loss), backward, recorded = jax.vjp(compute, weights.params, slots, has_aux=True)
    cotangents = {
        path: _make_cotangent(y, shapes.forms[path], forced["output_gradients"].get(path), scale)
        for path, y in outputs.items()
    }
    by_params, (by_inputs, by_logits) = backward((cotangents, jnp.ones_like(loss)))
    return _collect_results(shapes.forms, recorded, (by_params, by_inputs, {}, by_logits), scale)


def _collect_results(
    forms: Mapping[str, LayerForm],
    recorded: tuple[Any, ...],
    gradients: tuple[Any, ...],
    scale: Any,
) -> dict[str, Any]:
    """Return the arrays of a pass by the fields of `LayerTensors`.

    `gradients` are with respect to parameters, inputs, outputs and logits.
    """
    inputs, outputs, logits, statistics, loss = recorded
    by_params, by_inputs, by_outputs, by_logits = gradients
    return {
        "inputs": _to_logical(forms, inputs),
        "outputs": _to_logical(forms, outputs),
        "input_gradients": _unscale(_to_logical(forms, by_inputs), scale),
        "output_gradients": _unscale(_to_logical(forms, by_outputs), scale),
        "parameters": _unscale(by_params, scale),
        "statistics": statistics,
        "logits": logits,
        "logits_gradient": _unscale(by_logits, scale),
        "loss": loss,
    }


def _make_cotangent(y: Array, form: LayerForm, gradient: Any, scale: Any) -> Array:
    """Return a result's cotangent; zeros if its gradient is missing or has another shape."""
    cotangent = None if gradient is None else form.from_logical(gradient)
    if cotangent is None or cotangent.shape != y.shape:
        return jnp.zeros_like(y)
    return (cotangent * scale).astype(y.dtype)


def _to_logical(forms: Mapping[str, LayerForm], arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {path: to_nhwc(array, forms[path].layout) for path, array in arrays.items()}


def _unscale(tree: Any, scale: Any) -> Any:
    return jax.tree.map(lambda g: g.astype(jnp.float32) * (1 / scale), tree)


def _to_numpy(results: Mapping[str, Any], forms: Mapping[str, LayerForm]) -> LayerTensors:
    arrays: dict[str, Any] = jax.tree.map(_widen_16_bits, dict(results))
    arrays["parameters"] = flatten_dict(dict(arrays["parameters"]), sep="/")
    statistics = flatten_by_path(arrays["statistics"])
    # Without the name of the collection.
    arrays["statistics"] = {path.partition("/")[2]: array for path, array in statistics.items()}
    # jax has sorted the keys of dicts; `forms` has the order of the layers.
    for kind in ("inputs", "outputs", "input_gradients", "output_gradients"):
        arrays[kind] = {path: arrays[kind][path] for path in forms if path in arrays[kind]}
    arrays["loss"] = float(arrays["loss"])
    return LayerTensors(**arrays, forms=forms)


def _widen_16_bits(array: Any) -> np.ndarray:
    """Return an array in numpy; a floating-point type of 16 bits becomes float32."""
    values = np.asarray(array)
    is_narrow = values.dtype.itemsize == 2 and jnp.issubdtype(values.dtype, jnp.floating)
    return values.astype(np.float32) if is_narrow else values


def compile_in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `function` in float64 on the CPU, compiled once for each
    structure, shapes and types of the arguments."""
    programs: dict[Any, Any] = {}

    def compute(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        key = structure, tuple(map(jax.typeof, leaves))
        if key not in programs:
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
            program = jax.jit(partial(_run_wide, closed), compiler_options=QUICK)
            programs[key] = program, jax.tree.structure(shapes)
        program, results_structure = programs[key]
        with jax.enable_x64(True), jax.default_device(jax.devices(CPU.name)[0]):
            return jax.tree.unflatten(results_structure, program(leaves))

    return compute


def _run_wide(jaxpr: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Compute the outputs of a jaxpr, with all floating-point numbers in float64."""

    def read(atom: Any, constant: Any) -> Any:
        is_literal = isinstance(atom, core.Literal)
        return _widen_value(np.asarray(constant, atom.aval.dtype) if is_literal else constant)

    def compute(eqn: Any, operands: list[Any]) -> list[Any]:
        return list(map(_widen_value, _compute_equation(eqn, operands)))

    return interpret_jaxpr(jaxpr, list(map(_widen_value, operands)), compute, read)


def _compute_equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    params = eqn.params
    called = find_called_jaxpr(eqn)
    if called is not None:
        return _run_wide(called, operands)
    if name in FLOW:
        return compute_flow(eqn, operands, _run_wide)
    if name == "convert_element_type":
        return [operands[0].astype(_widen_type(params["new_dtype"]))]
    if name == "reduce_precision":
        return operands
    if name in _BIT_PRIMITIVES:
        pairs = zip(operands, eqn.invars, strict=True)
        operands = [value.astype(atom.aval.dtype) for value, atom in pairs]
    else:
        preferred = params.get("preferred_element_type")
        if preferred is not None:
            params = {**params, "preferred_element_type": _widen_type(preferred)}
    return bind_equation(eqn.replace(params=params), operands)


def _widen_value(value: Any) -> Any:
    """Return a value, in float64 if it is a floating-point number."""
    return value.astype(_WIDE) if jnp.issubdtype(value.dtype, jnp.floating) else value


def _widen_type(dtype: Any) -> Any:
    return _WIDE if jnp.issubdtype(dtype, jnp.floating) else dtype
