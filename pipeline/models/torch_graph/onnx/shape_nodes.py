"""ONNX's operators that move, cut, join or make tensors, or compute shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.onnx.graph_builder import (
    BATCH,
    Length,
    OnnxNodeReader,
    OnnxValue,
    Results,
    onnx_operator,
    require_axis,
)

_END = 2**31 - 1
"""Numbers of at least this size stand for the end of an axis."""
MAX_SIDE = 2**13
"""Largest height or width to which images are resized."""


@onnx_operator("Reshape")
def read_reshape(reader: OnnxNodeReader) -> Results:
    """Read a reshape. A size of 0 stands for the old size, -1 for the number of values left."""
    old = reader.shape()
    new = list(reader.sizes(1))
    if not reader.attribute("allowzero", 0):
        for axis, size in enumerate(new[: len(old)]):
            new[axis] = old[axis] if size == 0 else size
    return _add_view(reader, new)


def _add_view(reader: OnnxNodeReader, shape: Sequence[Length]) -> OnnxValue:
    """Reshape the first input; a shape (batch, features) becomes a call of `flatten`."""
    graph = reader.graph
    x = reader.value()
    shape = graph.keep_batch_open(x, shape)
    old = graph.shape(x)
    sizes = [size for size in old[1:] if isinstance(size, int)]
    if len(shape) == 2 and old[:1] == (shape[0],) and len(sizes) == len(old) - 1:
        features = math.prod(sizes)
        if shape[1] in (-1, features) and x.ndim > 2:
            return graph.call("flatten.using_ints", x, 1, -1)
    return graph.call("view.default", x, tuple(shape))


@onnx_operator("Flatten")
def read_flatten(reader: OnnxNodeReader) -> Results:
    """Read a reshape to a matrix: the axes before `axis` become rows, the others columns."""
    graph = reader.graph
    x = reader.value()
    axis = reader.attribute("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    if axis == 1 and x.ndim > 1:
        return graph.call("flatten.using_ints", x, 1, -1)
    if not 0 <= axis <= x.ndim:
        raise ValueError(f"axis {axis} of a tensor with {x.ndim} axes")
    first, second = (math.prod(array.shape[:axis]) for array in x.arrays)
    return graph.call("view.default", x, (graph.size(first, second), -1))


@onnx_operator("Transpose")
def read_transpose(reader: OnnxNodeReader) -> Results:
    """Read a permutation of axes; by default they are reversed."""
    order = tuple(reversed(range(reader.value().ndim)))
    return reader.graph.call("permute.default", reader.value(), reader.attribute("perm", order))


@onnx_operator("Squeeze")
def read_squeeze(reader: OnnxNodeReader) -> Results:
    """Read the removal of axes of size 1."""
    axes = reader.integers("axes", 1)
    if axes is None:
        axes = tuple(axis for axis, size in enumerate(reader.shape()) if size == 1)
    return reader.graph.call("squeeze.dims", reader.value(), axes)


@onnx_operator("Unsqueeze")
def read_unsqueeze(reader: OnnxNodeReader) -> Results:
    """Read the insertion of axes of size 1."""
    x = reader.value()
    axes = reader.integers("axes", 1) or ()
    for axis in sorted(require_axis(axis, x.ndim + len(axes)) for axis in axes):
        x = reader.graph.call("unsqueeze.default", x, axis)
    return x


@onnx_operator("Concat")
def read_concat(reader: OnnxNodeReader) -> Results:
    """Read tensors joined along an axis."""
    graph = reader.graph
    values = reader.values()
    axis = reader.axis(0)
    if axis and any(graph.shape(value)[0] == BATCH for value in values):
        values = tuple(map(graph.repeat_for_batch, values))
    return graph.call("cat.default", values, axis)


@onnx_operator("Split")
def read_split(reader: OnnxNodeReader) -> Results:
    """Read pieces of an axis."""
    x = reader.value()
    axis = reader.axis(0)
    sizes = reader.integers("split", 1)
    if sizes is None:
        count = len(reader.node.outputs)
        size = -(-reader.fixed_sizes(first_axis=axis)[0] // max(count, 1))
        return reader.graph.call_all("split.Tensor", x, size, axis)
    return reader.graph.call_all("split_with_sizes.default", x, sizes, axis)


@onnx_operator("Slice")
def read_slice(reader: OnnxNodeReader) -> Results:
    """Read ranges of axes."""
    x = reader.value()
    starts = reader.integers("starts", 1) or ()
    ends = reader.integers("ends", 2) or ()
    axes = reader.integers("axes", 3) or tuple(range(len(starts)))
    steps = reader.integers("steps", 4) or (1,) * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = require_axis(axis, x.ndim)
        size = min(array.shape[axis] for array in x.arrays)
        # A backward range to a number before the first index ends with the first index.
        reaches_end = end >= _END if step > 0 else end < -size
        stop = None if reaches_end else end
        x = reader.graph.call("slice.Tensor", x, axis, max(start, -_END), stop, step)
    return x


@onnx_operator("Gather")
def read_gather(reader: OnnxNodeReader) -> Results:
    """Read values at indices of an axis. Computed indices of a table's rows are an embedding."""
    graph = reader.graph
    x = reader.value(0)
    indices = reader.value(1)
    axis = reader.axis(0)
    if not indices.is_constant:
        if axis == 0 and x.ndim == 2:
            return graph.call("embedding.default", x, indices)
        # Unlike `index_select`, `index` reads negative indices from the end.
        return graph.call("index.Tensor", x, (*(None,) * axis, indices))
    if indices.ndim == 0 and not x.is_constant:
        return graph.call("select.int", x, axis, graph.fixed_integers(indices)[0])
    sizes = [array.shape[axis] for array in x.arrays]
    pairs = list(zip(indices.arrays, sizes, strict=True))
    reads_all = all(np.array_equal(array.ravel(), np.arange(size)) for array, size in pairs)
    if reads_all and not indices.is_fixed():
        # PyTorch exports an `as_strided` that squeezes axes like this.
        shape = graph.shape(x)
        shape = (*shape[:axis], *graph.shape(indices), *shape[axis + 1 :])
        return graph.call("view.default", x, shape)
    arrays = tuple(np.where(array < 0, array + size, array) for array, size in pairs)
    for array, size in zip(arrays, sizes, strict=True):
        if ((array < 0) | (array >= size)).any():
            raise ValueError(f"indices outside of an axis of size {size}")
    return graph.call("index_select.default", x, axis, OnnxValue(None, arrays))


@onnx_operator("GatherND")
def read_gather_nd(reader: OnnxNodeReader) -> Results:
    """Read parts of a tensor at tuples of indices; the first `batch_dims` axes are paired."""
    graph = reader.graph
    x = reader.value(0)
    indices = reader.value(1)
    paired = reader.attribute("batch_dims", 0)
    (count,) = graph.fixed_shape(indices, indices.ndim - 1)
    if not 0 <= paired < min(x.ndim, indices.ndim) or not 0 < count <= x.ndim - paired:
        raise ValueError(f"tuples of {count} indices, {paired} axes of {x.ndim} are paired")
    columns = [
        graph.call("select.int", indices, indices.ndim - 1, number) for number in range(count)
    ]
    ones = graph.call("add.Scalar", graph.call("mul.Scalar", columns[0], 0), 1)
    sums = [graph.call("cumsum.default", ones, axis) for axis in range(paired)]
    positions = [graph.call("sub.Scalar", value, 1) for value in sums]
    return graph.call("index.Tensor", x, (*positions, *columns))


@onnx_operator("GatherElements")
def read_gather_elements(reader: OnnxNodeReader) -> Results:
    """Read values at an axis's indices, one index for each value."""
    x = reader.value(0)
    axis = reader.axis(0)
    (size, *_) = reader.fixed_sizes(axis)
    indices = reader.graph.call("remainder.Scalar", reader.value(1), size)
    return reader.graph.call("gather.default", x, axis, indices)


@onnx_operator("TopK")
def read_top(reader: OnnxNodeReader) -> Results:
    """Read the largest or smallest values of an axis, and their indices."""
    (count,) = reader.graph.fixed_integers(reader.value(1))
    is_largest = bool(reader.attribute("largest", 1))
    axis = reader.axis(-1)
    return reader.graph.call_all("topk.default", reader.value(), count, axis, is_largest, True)


@onnx_operator("ScatterND")
def read_scatter(reader: OnnxNodeReader) -> Results:
    """Read a constant of which some values are replaced, as exporters make masks."""
    values = [reader.value(place) for place in range(3)]
    if not all(value.is_constant and value.is_fixed() for value in values):
        raise ValueError("its inputs must be constants that don't depend on the batch")
    array, indices, updates = (value.arrays[0] for value in values)
    result = array.copy()
    result[tuple(np.moveaxis(indices, -1, 0))] = updates
    return reader.graph.constant(result)


@onnx_operator("Pad")
def read_pad(reader: OnnxNodeReader) -> Results:
    """Read padding by a constant, or by values of the tensor."""
    x = reader.value()
    ends = reader.integers("pads", 1) or ()
    axes = reader.integers("axes", 3)
    axes = tuple(range(x.ndim)) if axes is None else axes
    if len(ends) != 2 * len(axes):
        raise ValueError(f"{len(ends)} pads for {len(axes)} axes")
    pads = [(0, 0)] * x.ndim
    for axis, before, after in zip(axes, ends[: len(axes)], ends[len(axes) :], strict=True):
        pads[require_axis(axis, x.ndim)] = (before, after)
    if any(size > 2**24 for pair in pads for size in pair):
        raise ValueError(f"pads of {max(map(max, pads)):,}")
    modes = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    mode = modes.get(reader.attribute("mode", "constant"))
    if mode is None:
        raise ValueError(f"mode {reader.attribute('mode')!r}")
    flat_pads = tuple(size for pair in reversed(pads) for size in pair)
    value = reader.number("value", 2, 0.0)
    filling = value if mode == "constant" else None
    return reader.graph.call("pad.default", x, flat_pads, mode, filling)


@onnx_operator("Expand")
def read_expand(reader: OnnxNodeReader) -> Results:
    """Read axes of size 1 repeated, and new leading axes. A new size of 1 keeps the old size."""
    graph = reader.graph
    x = reader.value()
    new = list(reader.sizes(1))
    old = graph.shape(x)
    num_axes = max(len(old), len(new))
    new = [*(1,) * (num_axes - len(new)), *new]
    padded_old = (1,) * (num_axes - len(old)) + old
    shape = [before if size == 1 else size for before, size in zip(padded_old, new, strict=True)]
    if x.is_number():
        number = x.arrays[0].item()
        return graph.call("full.default", tuple(shape), number, dtype=TypeOf(x.dtype))
    return graph.call("expand.default", x, tuple(shape))


@onnx_operator("Tile")
def read_tile(reader: OnnxNodeReader) -> Results:
    """Read a tensor repeated along its axes."""
    return reader.graph.call("repeat.default", reader.value(), reader.sizes(1))


@onnx_operator("Shape")
def read_shape(reader: OnnxNodeReader) -> Results:
    """Read the shape of a tensor, or a range of it."""
    start = reader.attribute("start", 0)
    end = reader.attribute("end", _END)
    shapes = (array.shape[start:end] for array in reader.value().arrays)
    return OnnxValue(None, tuple(np.array(shape, np.int64) for shape in shapes))


@onnx_operator("Size")
def read_size(reader: OnnxNodeReader) -> Results:
    """Read the number of values of a tensor."""
    arrays = reader.value().arrays
    return OnnxValue(None, tuple(np.array(math.prod(array.shape), np.int64) for array in arrays))


@onnx_operator("Constant")
def read_constant(reader: OnnxNodeReader) -> Results:
    """Read a constant tensor, number or list of numbers."""
    for name in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        if name in reader.node.attributes:
            dtype = {"value": None, "value_float": np.float32, "value_floats": np.float32}
            value = np.asarray(reader.node.attributes[name], dtype.get(name, np.int64))
            return reader.graph.constant(value)
    raise ValueError("it has no value that is read")


@onnx_operator("ConstantOfShape")
def read_constant_of_shape(reader: OnnxNodeReader) -> Results:
    """Read an array of one number, whose shape is the input."""
    value = np.asarray(reader.attribute("value", np.zeros(1, np.float32)))
    number = value.reshape(-1)[0].item()
    dtype = TypeOf("float32" if value.dtype.kind == "f" else value.dtype.name)
    return reader.graph.call("full.default", reader.sizes(0), number, dtype=dtype)


@onnx_operator("Range")
def read_range(reader: OnnxNodeReader) -> Results:
    """Read numbers from a start to a limit by a step."""
    values = [reader.value(place) for place in range(3)]
    if not all(value.is_constant for value in values):
        raise ValueError("a range depends on the values of the network's input")
    arrays = []
    for batch_index in (0, 1):
        start, limit, step = (value.arrays[batch_index].item() for value in values)
        if step == 0 or abs((limit - start) / step) > 2**22:
            raise ValueError(f"a range from {start} to {limit} by {step}")
        arrays.append(np.arange(start, limit, step))
    return OnnxValue(None, (arrays[0], arrays[1]))


@onnx_operator("Trilu")
def read_triangle(reader: OnnxNodeReader) -> Results:
    """Read the upper or the lower triangle of matrices."""
    op = "triu.default" if reader.attribute("upper", 1) else "tril.default"
    diagonal = reader.optional(1)
    offset = 0 if diagonal is None else reader.graph.fixed_integers(diagonal)[0]
    return reader.graph.call(op, reader.value(), offset)


@onnx_operator("DepthToSpace")
def read_depth_to_space(reader: OnnxNodeReader) -> Results:
    """Read channels that become squares of `blocksize` x `blocksize` pixels."""
    graph = reader.graph
    block = reader.attribute("blocksize", 1)
    channels, height, width = reader.fixed_sizes(first_axis=1)
    if block < 1 or channels % block**2:
        raise ValueError(f"blocks of {block} from {channels} channels")
    if reader.attribute("mode", "DCR") == "CRD":
        return graph.call("pixel_shuffle.default", reader.value(), block)
    batch = reader.shape()[0]
    features = channels // block**2
    x = graph.call("view.default", reader.value(), (batch, block, block, features, height, width))
    x = graph.call("permute.default", x, (0, 3, 4, 1, 5, 2))
    return graph.call("view.default", x, (batch, features, height * block, width * block))


@onnx_operator("Resize")
def read_resize(reader: OnnxNodeReader) -> Results:
    """Read images resized as PyTorch does: by nearest pixels, bilinearly or bicubically."""
    x = reader.value()
    if x.ndim != 4:
        raise ValueError(f"{x.ndim} axes; must be images")
    factors = _read_resize_factors(reader)
    if factors is None:
        target = reader.sizes(3)[-2:]
    else:
        sizes = zip(reader.fixed_sizes(first_axis=2), factors, strict=True)
        target = tuple(int(size * factor) for size, factor in sizes)
    if not all(isinstance(side, int) and 1 <= side <= MAX_SIDE for side in target):
        raise ValueError(f"images resized to {target}; must be at most {MAX_SIDE:,} on a side")
    mode = reader.attribute("mode", "nearest")
    coordinates = reader.attribute("coordinate_transformation_mode", "half_pixel")
    rounding = reader.attribute("nearest_mode", "round_prefer_floor")
    if (mode, coordinates, rounding) == ("nearest", "asymmetric", "floor"):
        return reader.graph.call("upsample_nearest2d.vec", x, target, factors)
    is_pytorchs = coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners") and not (
        reader.attribute("antialias", 0)
        or reader.attribute("exclude_outside", 0)
        or reader.attribute("cubic_coeff_a", -0.75) != -0.75
    )
    op = {"linear": "upsample_bilinear2d.vec", "cubic": "upsample_bicubic2d.vec"}.get(mode)
    if op is None or not is_pytorchs:
        raise ValueError(f"mode {mode} with {coordinates} ({rounding})")
    return reader.graph.call(op, x, target, coordinates == "align_corners", factors)


def _read_resize_factors(reader: OnnxNodeReader) -> tuple[float, ...] | None:
    """Return the factors of height and width, or None if the node has sizes instead."""
    if reader.optional(3) is not None:
        return None
    scales = reader.value(2)
    if not scales.is_constant or scales.arrays[0].size != 4:
        raise ValueError("scales that aren't four constant numbers")
    return tuple(scales.arrays[0][2:].tolist())
