"""ONNX nodes of each layer. Layers of images use NCHW, which runtimes prefer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import Any

import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.models.layers import standard, tokens
from pipeline.models.layers.model_spec import LayerSpec, pair
from pipeline.models.lowerings.formulas.pools import index_windows, weigh_windows
from pipeline.models.lowerings.problem import compute_reach
from pipeline.models.modules.apply_layers import WindowPadding, compute_pads, name_scopes
from pipeline.stages.export.onnx.graph_builder import GraphBuilder, NodeOutput, Order

Translation = Callable[[Any, NodeOutput, GraphBuilder], NodeOutput]
_TRANSLATIONS: dict[type[LayerSpec], tuple[Translation, Order | None]] = {}
"""Translations with the order of axes of their input; None for any order."""
GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}
"""Gates in ONNX's order, each as its index among this package's gates. ONNX has input, output,
forget and cell for an LSTM, and update, reset and new for a GRU."""


def add_layers(layers: Sequence[LayerSpec], x: Any, graph: GraphBuilder) -> NodeOutput:
    """Add the nodes of a list of layers, whose parameters are below `graph.path`.

    `x` is a tensor, or for a first layer with several inputs their tensors by name. Returns the
    output of the last layer. Raises RecipeError for a layer without a translation.
    """
    for name, layer in zip(name_scopes(layers), layers, strict=True):
        layer_graph = graph.enter(name)
        if type(layer) not in _TRANSLATIONS:
            names = ", ".join(sorted(kind.model_fields["name"].default for kind in _TRANSLATIONS))
            raise RecipeError(
                f"model layer {'/'.join(layer_graph.path)} ({layer.name}): has no translation to "
                f"ONNX; must be one of {names}. Or export without --to onnx: StableHLO has all"
            )
        translation, order = _TRANSLATIONS[type(layer)]
        if isinstance(x, NodeOutput) and not layer.reads_whole_numbers:
            x = graph.cast(x, "float32")
        if order is not None:
            x = graph.to_order(x, order)
        x = translation(layer, x, layer_graph)
    result: NodeOutput = x
    return result


def register_translation(
    *kinds: type[LayerSpec], order: Order | None = None
) -> Callable[[Translation], Translation]:
    """Register a translation of layers. Its input has its axes in `order`, or in any if None."""

    def register(translation: Translation) -> Translation:
        _TRANSLATIONS.update(dict.fromkeys(kinds, (translation, order)))
        return translation

    return register


@register_translation(standard.Conv, standard.Conv3d, tokens.Conv1d, order="nchw")
def _add_conv(
    layer: standard.Conv | standard.Conv3d | tokens.Conv1d, x: NodeOutput, graph: GraphBuilder
) -> NodeOutput:
    if isinstance(layer, tokens.Conv1d):
        x = graph.clear_padding(x)
    kernel = graph.read_weight("kernel")
    axes = kernel.ndim - 2
    strides = (layer.stride,) * axes if isinstance(layer.stride, int) else layer.stride
    dilation = (layer.dilation,) * axes if isinstance(layer.dilation, int) else layer.dilation
    size = kernel.shape[:axes]
    pads, sizes = _compute_windows(x, compute_reach(size, dilation), strides, layer.padding)
    weight = graph.add_weight("kernel", kernel.transpose(axes + 1, axes, *range(axes)))
    name = graph.add_node(
        "Conv",
        [x.name, weight, *graph.add_bias()],
        kernel_shape=size,
        strides=strides,
        dilations=dilation,
        group=layer.groups,
        pads=pads,
    )
    return NodeOutput(name, (*sizes, kernel.shape[-1]), "nchw")


@register_translation(standard.ConvTranspose, order="nchw")
def _add_conv_transpose(
    layer: standard.ConvTranspose, x: NodeOutput, graph: GraphBuilder
) -> NodeOutput:
    """Add a transposed convolution.

    ONNX mirrors the kernel and crops the padding. Rows are added at the end if XLA's result has
    more rows than the windows cover.
    """
    kernel = graph.read_weight("kernel")
    size = pair(layer.kernel)
    strides = pair(layer.stride)
    begins = []
    ends = []
    output_padding = []
    sizes = []
    for length, window, stride in zip(x.shape[:2], size, strides, strict=True):
        # Rows around the dilated input, as in `jax.lax.conv_transpose`.
        total = window + stride - 2
        pad_before = window - 1 if stride > window - 1 else -(-total // 2)
        if layer.padding == "valid":
            total += max(window - stride, 0)
            pad_before = window - 1
        pad_after = total - pad_before
        begins.append(window - 1 - pad_before)
        ends.append(max(0, window - 1 - pad_after))
        output_padding.append(max(0, pad_after - window + 1))
        sizes.append((length - 1) * stride + 1 + total - window + 1)
    # (height, width, inputs of a group, groups, outputs of a group) -> ONNX's order
    grouped = kernel[::-1, ::-1].reshape((*kernel.shape[:3], layer.groups, -1))
    inputs = kernel.shape[2] * layer.groups
    mirrored = grouped.transpose(3, 2, 4, 0, 1).reshape((inputs, -1, *size))
    name = graph.add_node(
        "ConvTranspose",
        [x.name, graph.add_weight("kernel", mirrored), *graph.add_bias()],
        kernel_shape=size,
        strides=strides,
        group=layer.groups,
        pads=[*begins, *ends],
        output_padding=output_padding,
    )
    return NodeOutput(name, (sizes[0], sizes[1], kernel.shape[-1]), "nchw")


@register_translation(standard.Dense, order="nhwc")
def _add_dense(layer: standard.Dense, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    outputs = graph.read_weight("kernel").shape[1]
    inputs = [x.name, graph.add_weight("kernel")]
    bias = graph.add_bias()
    if len(x.shape) == 1:
        return NodeOutput(graph.add_node("Gemm", [*inputs, *bias]), (outputs,))
    name = graph.add_node("MatMul", inputs)
    name = graph.add_node("Add", [name, *bias]) if bias else name
    return NodeOutput(name, (*x.shape[:-1], outputs), x.order)


@register_translation(standard.BatchNorm, order="nchw")
def _add_batch_norm(layer: standard.BatchNorm, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    arrays = [graph.add_weight(name) for name in ("scale", "bias")]
    arrays += [
        graph.add_weight(name, graph.read_weight(name, "batch_stats")) for name in ("mean", "var")
    ]
    norm = graph.add_node("BatchNormalization", [x.name, *arrays], epsilon=layer.epsilon)
    return replace(x, name=norm)


@register_translation(standard.LayerNorm, order="nhwc")
def _add_layer_norm(layer: standard.LayerNorm, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    arrays = [graph.add_weight(name) for name in ("scale", "bias")]
    norm = graph.add_node("LayerNormalization", [x.name, *arrays], axis=-1, epsilon=layer.epsilon)
    return replace(x, name=norm)


@register_translation(standard.RmsNorm, order="nhwc")
def _add_rms_norm(layer: standard.RmsNorm, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    squares = graph.add_node("Mul", [x.name, x.name])
    mean = graph.add_node("ReduceMean", [squares], axes=[-1], keepdims=1)
    shifted = graph.add_node("Add", [mean, graph.add_scalar(layer.epsilon)])
    quotient = graph.add_node("Div", [x.name, graph.add_node("Sqrt", [shifted])])
    return replace(x, name=graph.add_node("Mul", [quotient, graph.add_weight("scale")]))


@register_translation(standard.GroupNorm, order="nchw")
def _add_group_norm(layer: standard.GroupNorm, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    """Add a group norm as the instance norm of (batch, groups, values of a group)."""
    channels = x.shape[-1]
    positions = x.shape[:-1] if x.has_positions else ()
    grouped = graph.reshape(x, [-1, layer.groups, prod(x.shape) // layer.groups], ())
    ones = graph.add_constant("ones", np.ones(layer.groups, np.float32))
    zeros = graph.add_constant("zeros", np.zeros(layer.groups, np.float32))
    norm = graph.add_node(
        "InstanceNormalization", [grouped.name, ones, zeros], epsilon=layer.epsilon
    )
    result = graph.reshape(NodeOutput(norm, x.shape, x.order), [-1, channels, *positions], x.shape)
    name = result.name
    for kind, weight in (("Mul", "scale"), ("Add", "bias")):
        array = graph.read_weight(weight).reshape(channels, *(1,) * len(positions))
        name = graph.add_node(kind, [name, graph.add_weight(weight, array)])
    return replace(result, name=name)


@register_translation(standard.Dropout)
def _skip_dropout(layer: standard.Dropout, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    return x


@register_translation(
    *(standard.Relu, standard.Tanh, standard.Sigmoid, standard.Relu6, standard.HardSigmoid),
    *(standard.HardSwish, standard.Swish, standard.Gelu, standard.LeakyRelu, standard.SquaredRelu),
)
def _add_activation(layer: standard.Activation, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    match layer.name:
        case "relu" | "tanh" | "sigmoid":
            return replace(x, name=graph.add_node(layer.name.title(), [x.name]))
        case "squared_relu":
            positive = graph.add_node("Relu", [x.name])
            return replace(x, name=graph.add_node("Mul", [positive, positive]))
        case "leaky_relu":
            assert isinstance(layer, standard.LeakyRelu)
            slope = layer.slope
            return replace(x, name=graph.add_node("LeakyRelu", [x.name], alpha=slope))
        case "relu6":
            bounds = graph.add_scalar(0.0), graph.add_scalar(6.0)
            return replace(x, name=graph.add_node("Clip", [x.name, *bounds]))
        case "hard_sigmoid":
            return replace(x, name=graph.add_node("HardSigmoid", [x.name], alpha=1 / 6, beta=0.5))
        case "hard_swish":
            gate = graph.add_node("HardSigmoid", [x.name], alpha=1 / 6, beta=0.5)
        case "swish":
            gate = graph.add_node("Sigmoid", [x.name])
        case "gelu":
            # 0.5 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as in `jax.nn.gelu`.
            cube = graph.add_node("Mul", [graph.add_node("Mul", [x.name, x.name]), x.name])
            scaled = graph.add_node("Mul", [cube, graph.add_scalar(0.044715)])
            argument = graph.add_node("Add", [x.name, scaled])
            factor = graph.add_scalar(sqrt(2 / np.pi))
            curve = graph.add_node("Tanh", [graph.add_node("Mul", [argument, factor])])
            shifted = graph.add_node("Add", [curve, graph.add_scalar(1.0)])
            gate = graph.add_node("Mul", [shifted, graph.add_scalar(0.5)])
        case _:
            raise AssertionError(f"{layer.name} has no translation")
    return replace(x, name=graph.add_node("Mul", [x.name, gate]))


@register_translation(standard.MaxPool, standard.AvgPool, order="nchw")
@register_translation(tokens.MaxPool1d, tokens.AvgPool1d, order="nchw")
def _add_pool(
    layer: standard.Pool | tokens.Pool1d, x: NodeOutput, graph: GraphBuilder
) -> NodeOutput:
    window: tuple[int, ...]
    strides: tuple[int, ...]
    if isinstance(layer, tokens.Pool1d):
        window, strides = (layer.kernel,), (layer.stride or layer.kernel,)
    else:
        window, strides = pair(layer.kernel), pair(layer.stride or layer.kernel)
    pads, sizes = _compute_windows(x, window, strides, layer.padding)
    is_max = isinstance(layer, standard.MaxPool | tokens.MaxPool1d)
    kind = "MaxPool" if is_max else "AveragePool"
    name = graph.add_node(kind, [x.name], kernel_shape=window, strides=strides, pads=pads)
    return NodeOutput(name, (*sizes, x.shape[-1]), "nchw")


@register_translation(standard.GlobalAvgPool, order="nchw")
def _add_global_avg_pool(
    layer: standard.GlobalAvgPool, x: NodeOutput, graph: GraphBuilder
) -> NodeOutput:
    mean = graph.add_node("ReduceMean", [x.name], axes=[2, 3], keepdims=0)
    return NodeOutput(mean, x.shape[-1:])


@register_translation(tokens.MeanToken, order="nhwc")
def _add_mean_token(layer: tokens.MeanToken, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    if graph.token_mask is None:
        mean = graph.add_node("ReduceMean", [x.name], axes=[1], keepdims=0)
        return NodeOutput(mean, x.shape[-1:])
    axis = graph.add_axis(1)
    total = graph.add_node("ReduceSum", [graph.clear_padding(x).name, axis], keepdims=0)
    is_token = graph.cast(NodeOutput(graph.token_mask, x.shape[:1], dtype="bool"), "float32")
    count = graph.add_node("ReduceSum", [is_token.name, axis], keepdims=1)
    count = graph.add_node("Max", [count, graph.add_scalar(1.0)])
    return NodeOutput(graph.add_node("Div", [total, count]), x.shape[-1:])


@register_translation(tokens.Embedding)
def _add_embedding(layer: tokens.Embedding, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    numbers = graph.reshape(graph.cast(x, "int32"), [-1, prod(x.shape)], (prod(x.shape),))
    rows = graph.add_node("Gather", [graph.add_weight("table"), numbers.name], axis=0)
    return NodeOutput(rows, (*numbers.shape, layer.features))


@register_translation(standard.AdaptiveAvgPool, standard.AdaptiveMaxPool, order="nchw")
def _add_adaptive_pool(
    layer: standard.AdaptivePool, x: NodeOutput, graph: GraphBuilder
) -> NodeOutput:
    """Add products with matrices of means along height and width, or maxima of windows."""
    size = pair(layer.size)
    name = x.name
    if isinstance(layer, standard.AdaptiveMaxPool):
        for axis, length, count in zip((2, 3), x.shape[:2], size, strict=True):
            indices = graph.add_constant("windows", index_windows(length, count))
            windows = graph.add_node("Gather", [name, indices], axis=axis)
            name = graph.add_node("ReduceMax", [windows], axes=[axis + 1], keepdims=0)
    else:
        rows = graph.add_constant("means", weigh_windows(x.shape[0], size[0]))
        columns = graph.add_constant("means", weigh_windows(x.shape[1], size[1]).T)
        name = graph.add_node("MatMul", [graph.add_node("MatMul", [rows, name]), columns])
    return NodeOutput(name, (*size, x.shape[-1]), "nchw")


@register_translation(standard.Upsample, order="nchw")
def _add_upsample(layer: standard.Upsample, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    scales = graph.add_constant("scales", np.array([1, 1, layer.factor, layer.factor], np.float32))
    name = graph.add_node(
        "Resize",
        [x.name, "", scales],
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    height, width, channels = x.shape
    return NodeOutput(name, (height * layer.factor, width * layer.factor, channels), "nchw")


@register_translation(standard.ChannelShuffle, order="nchw")
def _add_channel_shuffle(
    layer: standard.ChannelShuffle, x: NodeOutput, graph: GraphBuilder
) -> NodeOutput:
    *positions, channels = x.shape
    sizes = [-1, layer.groups, channels // layer.groups, *positions]
    parts = graph.reshape(x, sizes, x.shape)
    swapped = graph.add_node("Transpose", [parts.name], perm=(0, 2, 1, *range(3, len(sizes))))
    swapped_x = NodeOutput(swapped, x.shape, "nchw")
    return graph.reshape(swapped_x, [-1, channels, *positions], x.shape)


@register_translation(standard.Flatten, order="nhwc")
def _add_flatten(layer: standard.Flatten, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    return graph.reshape(x, [-1, prod(x.shape)], (prod(x.shape),))


@register_translation(standard.Reshape, order="nhwc")
def _add_reshape(layer: standard.Reshape, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    return graph.reshape(x, [-1, *layer.shape], tuple(layer.shape))


@register_translation(tokens.Tokens, order="nhwc")
def _add_tokens(layer: tokens.Tokens, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    height, width, channels = x.shape
    shape = (height * width, channels)
    return graph.reshape(x, [-1, *shape], shape)


@register_translation(tokens.Lstm, tokens.Gru, order="nhwc")
def _add_recurrent(layer: tokens.Recurrent, x: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    prefixes = ("", "reverse_") if layer.bidirectional else ("",)
    gates = GATES[layer.name]

    def read_weights(name: str) -> np.ndarray:
        """Return the weights of both directions, (directions, gates * features, inputs); biases
        have no last axis."""
        arrays = [graph.read_weight(prefix + name) for prefix in prefixes]
        parts = [np.split(array, len(gates), -1) for array in arrays]
        ordered = [np.concatenate([part[gate] for gate in gates], -1) for part in parts]
        return np.stack([array.T for array in ordered])

    weights = [read_weights(name) for name in ("kernel", "recurrent_kernel")]
    if layer.bias:
        weights.append(np.hstack([read_weights(name) for name in ("bias", "recurrent_bias")]))
    names = ("kernel", "recurrent_kernel", "bias")
    # A layer without a bias has two arrays.
    inputs = [graph.add_weight(name, array) for name, array in zip(names, weights, strict=False)]
    features = weights[1].shape[-1]
    attributes = {"linear_before_reset": 1} if layer.name == "gru" else {}
    steps = graph.add_node("Transpose", [x.name], perm=(1, 0, 2))
    if graph.token_mask is not None:
        inputs = [*inputs, *[""] * (3 - len(inputs)), _count_tokens(graph, x)]
    name = graph.add_node(
        layer.name.upper(),
        [steps, *inputs],
        outputs=2,
        hidden_size=features,
        direction="bidirectional" if layer.bidirectional else "forward",
        **attributes,
    )
    width = features * len(prefixes)
    last_state = f"{name}_2"  # The second output, Y_h: (directions, batch, features).
    if layer.output == "last":
        last = graph.add_node("Transpose", [last_state], perm=(1, 0, 2))
        return graph.reshape(NodeOutput(last, ()), [-1, width], (width,))
    # (tokens, directions, batch, features) -> (batch, tokens, directions, features)
    moved = graph.add_node("Transpose", [name], perm=(2, 0, 1, 3))
    shape = (x.shape[0], width)
    results = graph.reshape(NodeOutput(moved, ()), [-1, *shape], shape)
    if graph.token_mask is None:
        return results
    # Padding after the tokens has the last state of the forward direction, and 0 of the reverse
    # one, which reads it first.
    state = graph.add_node("Transpose", [last_state], perm=(1, 0, 2))
    is_forward = np.array([[1.0], [0.0]], np.float32)[: len(prefixes)]
    state = graph.add_node("Mul", [state, graph.add_constant("is_forward", is_forward)])
    padding = graph.reshape(NodeOutput(state, ()), [-1, 1, width], (1, width))
    return graph.clear_padding(results, padding.name)


def _count_tokens(graph: GraphBuilder, x: NodeOutput) -> str:
    """Add the number of tokens of each sample that aren't padding, which follows them, int32
    (batch,); return its name."""
    assert graph.token_mask is not None, "without a mask nothing is padding"
    is_token = graph.cast(NodeOutput(graph.token_mask, x.shape[:1], dtype="bool"), "int32")
    return graph.add_node("ReduceSum", [is_token.name, graph.add_axis(1)], keepdims=0)


def _compute_windows(
    x: NodeOutput, window: tuple[int, ...], strides: tuple[int, ...], padding: WindowPadding
) -> tuple[list[int], list[int]]:
    """Return the pads, those before each axis and then those after, and the sizes of the result."""
    positions = x.shape[:-1]
    pads = compute_pads(positions, window, strides, padding)
    sizes = [
        (size + before + after - span) // stride + 1
        for size, (before, after), span, stride in zip(
            positions, pads, window, strides, strict=True
        )
    ]
    return [before for before, _ in pads] + [after for _, after in pads], sizes
