"""Operators of another framework's reference, paired with the layers of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pipeline.core.errors import DataError
from pipeline.inspect.compare.accuracy_columns import cosine_similarity
from pipeline.inspect.compare.reference_folder import flatten_name
from pipeline.inspect.compare.tensor_rows import Mapped, Read
from pipeline.inspect.compare.tensor_side import TensorSide
from pipeline.inspect.dumps.tensor_names import DATA, LOSS, TensorName

_IMAGE_ROLES = ("input", "output", "output_gradient", "input_gradient")


@dataclass(frozen=True)
class PairedReference:
    """A side and its reference, with the operators that belong to each layer."""

    left: TensorSide
    right: TensorSide
    mapped: Mapped
    notes: tuple[str, ...]


def pair_reference(left: TensorSide, reference: TensorSide, mapped: Mapped) -> PairedReference:
    """Find the operators of a reference that belong to the layers of the left side.

    An operator has the name of its layer. If less than half of the layers have one by name, the
    outputs of both sides are aligned in their orders, by shape and by similarity of values.
    `mapped` takes precedence. Images of a reference with channels first are transposed.

    Raises DataError if less than half of the layers, or of the operators if they are fewer, have a
    counterpart of the same shape: the reference is of another network or batch.
    """
    heads = {name: _read_head(left, name) for name in left.names if _is_result(name)}
    others = {name: _read_head(reference, name) for name in reference.names if _is_result(name)}
    is_channels_first = _is_channels_first(heads.values(), others.values())
    if is_channels_first:
        others = {name: head.to_channels_last() for name, head in others.items()}
    layers_by_op = {flatten_name(path): path for path in (*left.layers, DATA, LOSS)}
    pairs = {layers_by_op[op]: (op,) for op in reference.layers if op in layers_by_op}
    num_required = min(len(left.layers), len(reference.layers)) / 2
    notes = []
    if len(pairs | dict(mapped)) < num_required:
        mapped_ops = {op for ops in mapped.values() for op in ops}
        free_heads = {name: head for name, head in heads.items() if name.layer not in mapped}
        free_others = {name: head for name, head in others.items() if name.layer not in mapped_ops}
        pairs = {one.layer: (other.layer,) for one, other in _align(free_heads, free_others)}
        notes.append("operators are paired with layers by order and shape; --map names others")
    pairs |= mapped
    misshapen = []
    num_shared = 0
    for name, head in heads.items():
        found = [TensorName(op, "output", name.index) for op in pairs.get(name.layer, ())]
        shapes = [others[tensor].shape for tensor in found if tensor in others]
        num_shared += head.shape in shapes and name.layer in left.layers
        if shapes and head.shape not in shapes:
            op = found[0].layer
            misshapen.append(f"; {name.layer} has shape {head.shape}, {op} has {shapes[0]}")
    if num_shared < num_required:
        raise DataError(
            f"{left.name} and {reference.name}: of different networks or batches, {num_shared} of "
            f"{len(left.layers)} layers have a counterpart of the same shape; --map LEFT:RIGHT "
            f"names others{''.join(misshapen[:1])}"
        )
    if is_channels_first:
        notes.append("images of the reference have channels first; they are transposed")
        left = _flatten_channels_first(left)
        reference = replace(reference, read=_read_channels_last(reference))
    return PairedReference(left, reference, pairs, tuple(notes))


def _is_result(name: TensorName) -> bool:
    return name.role == "output" and name.index == "0"


def _flatten_channels_first(side: TensorSide) -> TensorSide:
    """Return the side with the outputs of its layers `flatten` in the order of channels first."""

    def read(name: TensorName) -> np.ndarray | None:
        if side.layers.get(name.layer) == "flatten" and name.role == "output":
            images = side.read(TensorName(name.layer, "input"))
            if images is not None and images.ndim == 4:
                return np.moveaxis(images, -1, 1).reshape(len(images), -1)
        return side.read(name)

    return replace(side, read=read)


def _read_channels_last(side: TensorSide) -> Read:
    """Return the function that reads a tensor with the channels of images moved to the end."""

    def read(name: TensorName) -> np.ndarray | None:
        array = side.read(name)
        is_image = array is not None and array.ndim == 4 and name.role in _IMAGE_ROLES
        return np.moveaxis(array, 1, -1) if array is not None and is_image else array

    return read


@dataclass(frozen=True, eq=False)
class _Head:
    """Shape of a tensor, and its first sample in float64."""

    shape: tuple[int, ...]
    sample: np.ndarray

    def to_channels_last(self) -> _Head:
        """Return the head of images with the channels moved to the end."""
        if len(self.shape) != 4:
            return self
        shape = (self.shape[0], *self.shape[2:], self.shape[1])
        return _Head(shape, np.moveaxis(self.sample, 0, -1))


def _read_head(side: TensorSide, name: TensorName) -> _Head:
    array = side.read(name)
    if array is None:
        return _Head((-1,), np.zeros(0))
    return _Head(array.shape, np.asarray(array[0] if array.ndim else array, np.float64))


def _is_channels_first(left: Iterable[_Head], right: Iterable[_Head]) -> bool:
    """Return whether more images of the right side fit the left side after a transposition."""
    shapes = {head.shape for head in left if len(head.shape) == 4}
    images = [head for head in right if len(head.shape) == 4]
    num_moved = sum(head.to_channels_last().shape in shapes for head in images)
    return num_moved > sum(head.shape in shapes for head in images)


def _align(
    left: Mapping[TensorName, _Head], right: Mapping[TensorName, _Head]
) -> list[tuple[TensorName, TensorName]]:
    """Pair tensors of the same shape, in the orders of both sides, with the largest total score.

    A pair scores 1, plus its cosine similarity if it is positive. So an operator that makes an
    error is paired by its place, and one of several operators of the same shape by its values.
    """
    left_names = list(left)
    right_names = list(right)
    totals = np.zeros((len(left) + 1, len(right) + 1))
    for i, head in enumerate(left.values()):
        for j, other in enumerate(right.values()):
            with_pair = 0.0
            if head.shape == other.shape:
                cosine = cosine_similarity(head.sample.ravel(), other.sample.ravel())
                with_pair = totals[i, j] + 1 + max(0.0, cosine)
            totals[i + 1, j + 1] = max(totals[i, j + 1], totals[i + 1, j], with_pair)
    pairs = []
    i = len(left)
    j = len(right)
    while i and j:
        if totals[i, j] == totals[i - 1, j]:
            i -= 1
        elif totals[i, j] == totals[i, j - 1]:
            j -= 1
        else:
            i -= 1
            j -= 1
            pairs.append((left_names[i], right_names[j]))
    return pairs[::-1]
