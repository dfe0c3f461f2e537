"""ONNX nodes of the map ops of evaluation, for graphs whose inputs are samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.data.dataset_spec import MapOp
from pipeline.data.ops.geometry import CenterCrop
from pipeline.data.ops.image import Axis
from pipeline.data.ops.interpolation import Taps, find_nearest_pixels, make_opencv_taps
from pipeline.data.ops.resize import Resize, compute_target_size
from pipeline.data.ops.series import LogMel
from pipeline.data.ops.together import CopyColumn
from pipeline.data.ops.values import Hwc2Chw, Normalize, Rescale, TypeCast
from pipeline.data.series.series_columns import ScaleSeries
from pipeline.stages.export.onnx.graph_builder import GraphBuilder, NodeOutput

TRANSLATED = (
    "rescale, normalize, hwc2chw, type_cast, center_crop, log_mel, copy_column, and resize by "
    "linear or nearest"
)


def add_ops(
    ops: Sequence[MapOp], columns: Mapping[str, NodeOutput], graph: GraphBuilder
) -> dict[str, NodeOutput]:
    """Add the nodes of those ops that change columns. Return the columns after the ops.

    Images are NHWC up to an op `hwc2chw`, which follows resizes; then NCHW. Raises RecipeError for
    an op without a translation.
    """
    mapped = dict(columns)
    for position, op in enumerate(ops):
        op = op.narrow(mapped.keys())
        if mapped.keys().isdisjoint(op.columns):
            continue
        if isinstance(op, CopyColumn):
            mapped[op.to] = mapped[op.column]
            continue
        column = op.columns[0]
        result = _add_op(op, mapped[column], graph) if column in mapped else None
        if result is None:
            raise RecipeError(
                f"dataset.eval.ops.{position} ({op.name}): has no translation to ONNX; must be one "
                f"of {TRANSLATED}. Or export without --to onnx: StableHLO has all"
            )
        mapped[column] = result
    return mapped


def _add_op(op: MapOp, column: NodeOutput, graph: GraphBuilder) -> NodeOutput | None:
    """Add the nodes of an op; return its result, None if it has no translation."""
    match op:
        case Rescale():
            return _add_arithmetic(column, [("Mul", op.factor), ("Add", op.shift)], graph)
        case Normalize():
            return add_scale(op, column, graph)
        case Hwc2Chw():
            return graph.to_order(column, "nchw")
        case TypeCast():
            return graph.cast(column, op.dtype)
        case CenterCrop():
            height, width, channels = column.shape
            top = (height - op.size[0]) // 2
            left = (width - op.size[1]) // 2
            ends = (top + op.size[0], left + op.size[1])
            name = graph.add_slice(column.name, ((top, left), ends, (1, 2)))
            return NodeOutput(name, (*op.size, channels), dtype=column.dtype)
        case Resize(interpolation="linear" | "nearest"):
            return _add_resize(op, column, graph)
        case LogMel():
            return _add_log_mel(op, column, graph)
    return None


def add_scale(op: Normalize | ScaleSeries, values: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    """Add (value - mean) / std of each channel, in float32."""
    mean = np.array(op.mean, np.float32)
    std = np.array(op.std, np.float32)
    return _add_arithmetic(values, [("Sub", mean), ("Mul", 1 / std)], graph)


def _add_arithmetic(
    images: NodeOutput, terms: Sequence[tuple[str, Any]], graph: GraphBuilder
) -> NodeOutput:
    """Add float32 operations (kind, operand); an operand is a number or an array (channels,)."""
    images = graph.cast(images, "float32")
    name = images.name
    for kind, operand in terms:
        array = np.asarray(operand, np.float32)
        if array.ndim and images.order == "nchw":
            array = array[:, None, None]
        name = graph.add_node(kind, [name, graph.add_constant("operand", array)])
    return replace(images, name=name)


def _add_resize(op: Resize, images: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    """Add a resize with the pixels and weights of the map op, in fixed point for uint8 images."""
    height, width, channels = images.shape
    rows, columns = compute_target_size(op.size, height, width)
    shape = rows, columns, channels
    if op.interpolation == "nearest":
        name = _add_gather(images.name, find_nearest_pixels(height, rows), 1, graph)
        name = _add_gather(name, find_nearest_pixels(width, columns), 2, graph)
        return NodeOutput(name, shape, dtype=images.dtype)
    is_fixed_point = images.dtype == "uint8"
    horizontal = make_opencv_taps("linear", width, columns, 2, fixed=is_fixed_point)
    vertical = make_opencv_taps("linear", height, rows, 1, fixed=is_fixed_point)
    cast = graph.cast(images, "int32" if is_fixed_point else "float32")
    mixed = graph.add_node("Add", _weigh_taps(cast.name, horizontal, 2, graph))
    if not is_fixed_point:
        result = graph.add_node("Add", _weigh_taps(mixed, vertical, 1, graph))
        return graph.cast(NodeOutput(result, shape), images.dtype)

    def divide(name: str, number: int) -> str:
        return graph.add_node(
            "Div", [name, graph.add_constant("whole", np.array(number, np.int32))]
        )

    # As in `interpolate`: products are in quarters of a pixel's value. Adding 2 rounds their sum.
    products = _weigh_taps(divide(mixed, 16), vertical, 1, graph)
    quarters = [divide(product, 1 << 16) for product in products]
    total = graph.add_node("Add", quarters)
    two = graph.add_constant("whole", np.array(2, np.int32))
    result = divide(graph.add_node("Add", [total, two]), 4)
    return graph.cast(NodeOutput(result, shape, dtype="int32"), "uint8")


def _weigh_taps(name: str, taps: Taps, axis: Axis, graph: GraphBuilder) -> list[str]:
    """Add the products of the source pixels of each tap and its weights; return their names."""
    products = []
    for tap in range(taps.pixels.shape[-1]):
        # From (1, length) to (1, length, 1, 1) along rows, or (1, 1, length, 1) along columns.
        weights = np.expand_dims(taps.weights[..., tap], (3 - axis, 3))
        pixels = _add_gather(name, taps.pixels[0, :, tap], axis, graph)
        products.append(graph.add_node("Mul", [pixels, graph.add_constant("weights", weights)]))
    return products


def _add_gather(name: str, pixels: np.ndarray, axis: Axis, graph: GraphBuilder) -> str:
    indices = graph.add_constant("pixels", np.asarray(pixels, np.int64))
    return graph.add_node("Gather", [name, indices], axis=axis)


def _add_log_mel(op: LogMel, sound: NodeOutput, graph: GraphBuilder) -> NodeOutput:
    """Add the log-mel spectrogram of sound, (samples,) to (frames, mels, 1)."""
    (samples,) = sound.shape
    name = graph.cast(sound, "float32").name
    if op.padding:
        pads = graph.add_constant("pads", np.array([0, op.padding, 0, op.padding], np.int64))
        name = graph.add_node("Pad", [name, pads])
    name = _add_gather(name, op.list_indices(samples), 1, graph)
    name = graph.add_node("Mul", [name, graph.add_constant("window", op.make_window())])
    last = graph.add_constant("axes", np.array([3], np.int64))
    name = graph.add_node("Unsqueeze", [name, last])
    # Real and imaginary parts are the last axis.
    name = graph.add_node("DFT", [name], axis=2, onesided=1)
    name = graph.add_node("Mul", [name, name])
    name = graph.add_node("ReduceSum", [name, last], keepdims=0)
    if op.power == 1:
        name = graph.add_node("Sqrt", [name])
    # Einsum in place of MatMul, which an int8 export quantizes; that would lose quiet frequencies.
    filters = graph.add_constant("filters", op.make_filters())
    name = graph.add_node("Einsum", [name, filters], equation="bfn,nm->bfm")
    name = graph.add_node("Max", [name, graph.add_scalar(op.floor)])
    name = graph.add_node("Mul", [graph.add_node("Log", [name]), graph.add_scalar(op.log_factor)])
    name = graph.add_node("Unsqueeze", [name, last])
    return NodeOutput(name, (op.count_frames(samples), op.mels, 1))
