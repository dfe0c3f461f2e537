"""Computation of a graph: its nodes in order, each by the function of its operator.

A value may have a function's result as its gradient, instead of JAX's derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.core.errors import first_line
from pipeline.models.layers.precision import find_type_rule
from pipeline.models.lowerings.problem import Layout, make_window
from pipeline.models.modules.layer_capture import is_observing, observe_layer
from pipeline.models.torch_graph.graph import (
    CUSTOM_GRADIENT,
    INPUT,
    KERNEL_AXES,
    ArrayOf,
    BackwardPass,
    Form,
    GraphNode,
    TensorSpec,
    TorchGraph,
    ValueOf,
    find_backward_passes,
    fits_sizes,
    refer_to_inputs,
)
from pipeline.models.torch_graph.operator_table import (
    ARGUMENT_ERRORS,
    IMAGE_ORDERS,
    NHWC,
    AtenOperator,
    OperatorContext,
    TorchTensor,
    is_float,
    to_tensor,
)
from pipeline.models.torch_graph.operators.convolution_ops import Convolution, as_pair, make_pads
from pipeline.models.torch_graph.operators.known_operators import draws, find_operator
from pipeline.models.torch_graph.operators.norm_ops import NormResult

DENSE = "aten.linear.default"
OBSERVED = frozenset((DENSE, "aten.conv2d.default", "aten.conv2d.padding"))
"""Operators of dense and convolutional layers, whose inputs some optimizers read."""
Gradients = Sequence[Array]


def apply_form(
    graph: TorchGraph,
    form: Form,
    inputs: Sequence[TorchTensor],
    weights: Mapping[str, Array],
    context: OperatorContext,
) -> tuple[Array, dict[str, Array]]:
    """Compute a form of the graph; return its output and the new values of buffers by name.

    `inputs` are in the order of the graph's. The output has PyTorch's order of axes. `weights` are
    parameters and buffers by PyTorch's names, in the order of axes of their specs. Raises
    ValueError with module and line for a node that can't be computed.
    """
    arrays = _make_tensors(graph, weights)
    passes = find_backward_passes(form)
    values = {INPUT: inputs[0] if len(inputs) == 1 else tuple(inputs)}
    computation = _Computation(graph, form, passes, context, values, arrays=arrays, changed={})
    deferred = {number for backward in passes.values() for number in backward.numbers}
    for number, node in enumerate(form.nodes):
        if number not in deferred:
            computation.compute(number, node)
    for name, reference in form.updates:
        computation.changed[name] = computation.find_value(reference).plain().astype(jnp.float32)
    output = computation.find_value(form.output)
    if not isinstance(output, TorchTensor):
        raise ValueError("the network must return a tensor")
    return output.plain(), computation.changed


def make_input(spec: TensorSpec, samples: Array, layout: Layout) -> TorchTensor:
    """Return samples, such as images (batch, height, width, channels), as a graph's input.

    Images have the order of the layout; for an input of other axes the samples are reshaped. Raises
    ValueError if the samples don't fit `spec`.
    """
    batch, *sizes = samples.shape
    is_float = jnp.issubdtype(samples.dtype, jnp.floating)
    dtype: Any = jnp.dtype("int32")
    reads_floats = spec.dtype.startswith(("float", "bfloat"))
    if reads_floats:
        dtype = samples.dtype if is_float else jnp.dtype("float32")
    fixed_batch = spec.shape[0]
    if fixed_batch is not None and fixed_batch != batch:
        raise ValueError(f"a batch has {batch} samples; must have {fixed_batch} for this network")
    if len(spec.shape) == 4 and len(sizes) == 3:
        height, width, channels = sizes
        if (channels, height, width) != spec.shape[1:]:
            expected = "x".join(map(str, (*spec.shape[2:], spec.shape[1])))
            size = "x".join(map(str, sizes))
            raise ValueError(
                f"images are {size} (height, width, channels); must be {expected}: resize them, or "
                "export the network for them"
            )
        if is_float and not reads_floats:
            raise ValueError(
                f"images are {samples.dtype}, and the network reads whole numbers, {spec.dtype}; "
                "leave out the map ops that convert images, or export the network for float32"
            )
        order = IMAGE_ORDERS[layout]
        nhwc = TorchTensor(samples.astype(dtype), NHWC)
        return TorchTensor(nhwc.transpose(order), order)
    # Only the batch may be None. For any other None, the 0 raises the error below.
    shape = tuple(size or 0 for size in spec.shape[1:])
    if math.prod(sizes) != math.prod(shape):
        raise ValueError(f"samples have shape {tuple(sizes)}; must have {shape}")
    return to_tensor(samples.reshape((batch, *shape)).astype(dtype))


def _make_tensors(graph: TorchGraph, weights: Mapping[str, Array]) -> dict[str, TorchTensor]:
    """Return constants and weights as tensors by name; 64-bit constants become 32-bit."""
    tensors = {}
    for spec in graph.arrays:
        arrays = graph.values if spec.role == "constant" else weights
        array = jnp.asarray(arrays[spec.name])
        order = KERNEL_AXES.get(spec.order, tuple(range(array.ndim)))
        tensors[spec.name] = TorchTensor(array, order)
    return tensors


@dataclass
class _Computation:
    """The values of a graph during its computation."""

    graph: TorchGraph
    form: Form
    passes: Mapping[str, BackwardPass]
    """Custom backward passes of the form, by their node."""
    context: OperatorContext
    values: dict[str, Any]
    """The inputs and the results of nodes, by name; several by index for a node with several."""
    arrays: dict[str, TorchTensor]
    """Weights and constants by name; batch norms replace their running statistics."""
    changed: dict[str, Array]
    """New values of buffers by name."""
    is_backward: bool = False
    """Whether the nodes are of a custom backward pass, which has no layers."""

    def compute(self, number: int, node: GraphNode) -> None:
        """Store the results of a node, which is `form.nodes[number]`.

        Raises ValueError with the node's module and line if it can't be computed.
        """
        operator = find_operator(node)
        scope = node.module.replace(".", "/")
        try:
            with jax.named_scope(scope) if scope else nullcontext():
                if node.op == CUSTOM_GRADIENT:
                    result = self._replace_gradient(node)
                else:
                    result = self._apply(number, node, operator)
            _require_shapes(node, result)
        except ARGUMENT_ERRORS as error:
            raise ValueError(
                f"{node.op} of {node.describe_place()}: {first_line(error)}"
            ) from error
        self.values[node.name] = result

    def find_value(self, reference: ValueOf) -> Any:
        """Return the value that a reference names."""
        value = self.values[reference.node]
        return value if reference.item is None else value[reference.item]

    def _replace_gradient(self, node: GraphNode) -> tuple[TorchTensor, ...]:
        """Return the outputs of a custom function, differentiated by its backward pass."""
        backward = self.passes[node.name]
        inputs, outputs = (self._find_tensors(references) for references in node.args[:2])
        reads = {reference: self._find_operand(reference) for reference in backward.reads}
        saved = [value for value in reads.values() if isinstance(value, TorchTensor)]
        nodes = [(number, self.form.nodes[number]) for number in backward.numbers]
        # Arrays reach a backward pass only as arguments, so the key of its draws is one too.
        key = self.context.key
        keys = [key()] if key is not None and any(draws(node) for _, node in nodes) else []

        def compute_gradients(arrays: Sequence[Array], cotangents: Sequence[Array]) -> list[Array]:
            operands = iter(arrays)
            computation = self._begin_backward(
                {
                    reference: value.with_array(next(operands))
                    if isinstance(value, TorchTensor)
                    else value
                    for reference, value in reads.items()
                },
                next(operands, None),
            )
            named = zip(node.args[2], outputs, cotangents, strict=True)
            computation.values |= {
                ref.node: output.with_array(array) for ref, output, array in named
            }
            for number, inner in nodes:
                if inner.name not in computation.values:
                    computation.compute(number, inner)
            pairs = zip(node.args[3], inputs, strict=True)
            return [_place_gradient(computation._find_operand(ref), x) for ref, x in pairs]

        arrays = [*(value.array for value in saved), *keys]
        output_arrays = [output.array for output in outputs]
        # An error of the backward pass is raised here, with the line of its node.
        jax.eval_shape(compute_gradients, arrays, output_arrays)
        results = replace_gradient(
            [x.array for x in inputs], output_arrays, arrays, compute_gradients
        )
        pairs = zip(outputs, results, strict=True)
        return tuple(output.with_array(array) for output, array in pairs)

    def _begin_backward(self, operands: Mapping[ValueOf | ArrayOf, Any], key: Any) -> _Computation:
        """Return the run of a backward pass with the operands that it reads, and its key."""
        values: dict[str, Any] = {}
        arrays: dict[str, TorchTensor] = {}
        for reference, value in operands.items():
            if isinstance(reference, ArrayOf):
                arrays[reference.name] = value
            elif reference.item is None:
                values[reference.node] = value
            else:
                values.setdefault(reference.node, {})[reference.item] = value
        context = replace(self.context, key=None if key is None else lambda: key)
        return _Computation(
            self.graph, self.form, {}, context, values, arrays, changed={}, is_backward=True
        )

    def _find_operand(self, reference: Any) -> Any:
        """Return the array or value that a reference names, and None for None."""
        if isinstance(reference, ArrayOf):
            return self.arrays[reference.name]
        return self.find_value(reference) if isinstance(reference, ValueOf) else reference

    def _find_tensors(self, references: Sequence[Any]) -> list[TorchTensor]:
        """Return the tensors of references, weights in the dtype of activations."""
        found = ((r, self._find_operand(r)) for r in references)
        return [_cast(x, self.context.dtype) if isinstance(r, ArrayOf) else x for r, x in found]

    def _apply(self, number: int, node: GraphNode, operator: AtenOperator) -> Any:
        rules = self.context.rules
        rule = find_type_rule(rules, operator.kind, tuple(node.module.split(".")))
        dtype = self.context.dtype if rule is None else rule.dtype
        key = self.context.key
        node_key = (lambda: jax.random.fold_in(key(), number)) if key is not None else None
        context = replace(self.context, dtype=dtype, key=node_key)

        def read_argument(argument: Any) -> Any:
            if isinstance(argument, ArrayOf):
                array = self.arrays[argument.name]
                return array if operator.full_weights else _cast(array, dtype)
            if isinstance(argument, ValueOf):
                value = self.find_value(argument)
                # Without rules all nodes have the same dtype, and a cast isn't necessary.
                return _cast(value, dtype) if rules and isinstance(value, TorchTensor) else value
            return argument

        args, kwargs = jax.tree.map(read_argument, (node.args, dict(node.kwargs)))
        result = operator(context, *args, **kwargs)
        if not self.is_backward and is_observing() and node.op in OBSERVED:
            x = args[0]
            # A layer is observed only if its first axis (in PyTorch's order) is the batch.
            first = self.find_value(refer_to_inputs(len(self.graph.inputs))[0])
            if x.ndim > 1 and x.shape[0] == first.shape[0]:
                result = _observe_node(self.graph, node, x, result, context.layout)
        if isinstance(result, NormResult):
            # Arguments 3 and 4 of a batch norm are the running mean and variance.
            for argument, array in zip(node.args[3:5], (result.mean, result.var), strict=True):
                if isinstance(argument, ArrayOf):
                    self.arrays[argument.name] = to_tensor(array)
                    self.changed[argument.name] = array
            result = result.y
        if rule is not None and rule.casts_back:
            result = _cast(result, self.context.dtype)
        return result


def _observe_node(
    graph: TorchGraph, node: GraphNode, x: TorchTensor, result: TorchTensor, layout: Layout
) -> TorchTensor:
    """Return the result of a node, through `observe_layer` if it is an ungrouped layer.

    A layer's kernel is a parameter. `x` is the node's input. Raises ValueError if another node uses
    the same kernel.
    """
    weight = node.args[1]
    if not isinstance(weight, ArrayOf) or graph.spec(weight.name).role != "parameter":
        return result
    layer, _, name = graph.spec(weight.name).path.rpartition("/")
    if name != "kernel":
        return result
    if node.op == DENSE:
        outputs = observe_layer(layer, x.plain(), result.plain(), None)
        return to_tensor(outputs)
    settings = Convolution(*node.args[3:], **dict(node.kwargs))
    if settings.groups != 1:
        return result
    order = IMAGE_ORDERS[layout]
    images = x.transpose(order)
    height, width, *_ = graph.spec(weight.name).shape
    dilation = as_pair(settings.dilation)
    window = make_window(
        (images.shape[1], images.shape[2]),
        (height, width),
        as_pair(settings.stride),
        make_pads(settings.padding, (height, width), dilation),
        dilation,
        groups=1,
    )
    outputs = observe_layer(layer, images, result.transpose(order), window, layout)
    return TorchTensor(outputs, order)


def _place_gradient(gradient: TorchTensor | None, x: TorchTensor) -> Array:
    """Return the gradient of x as an array with the order and the dtype of x; zeros for None.

    Raises ValueError for another shape.
    """
    if gradient is None:
        return jnp.zeros_like(x.array)
    if gradient.shape != x.shape:
        raise ValueError(f"a gradient has shape {gradient.shape}; must be {x.shape}")
    return gradient.transpose(x.order).astype(x.dtype)


def _cast(value: Any, dtype: str) -> Any:
    """Cast floating-point tensors, alone or in a tuple; return any other value as it is."""
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    if isinstance(value, TorchTensor) and is_float(value):
        return replace(value, array=value.array.astype(dtype))
    return value


def _require_shapes(node: GraphNode, result: Any) -> None:
    """Raise ValueError if the results don't have the graph's shapes."""
    results = result if isinstance(result, tuple) else (result,)
    for spec, x in zip(node.results, results, strict=False):
        if isinstance(x, TorchTensor) and not fits_sizes(x.shape, spec.shape):
            described = tuple("batch" if size is None else size for size in spec.shape)
            raise ValueError(f"returns shape {x.shape}; must be {described}")


def replace_gradient(
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    saved: Sequence[Array],
    backward: Callable[[Sequence[Array], Gradients], Gradients],
) -> list[Array]:
    """Return the outputs, with `backward` as their derivative with respect to the inputs.

    `backward` computes the gradients of the inputs from `saved` and from the gradients of the
    outputs. How the outputs were computed from the inputs has no effect on gradients.
    """

    @jax.custom_vjp
    def connect(inputs: Any, outputs: Any, saved: Any) -> Any:
        return outputs

    def compute_forward(inputs: Any, outputs: Any, saved: Any) -> Any:
        return outputs, saved

    def compute_backward(saved: Any, cotangents: Any) -> Any:
        return list(backward(saved, cotangents)), None, None

    connect.defvjp(compute_forward, compute_backward)
    return list(connect(list(inputs), list(outputs), list(saved)))
