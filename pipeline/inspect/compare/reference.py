"""Tensors that another framework dumped into a folder of .npy files, paired with a step's layers.

Files are named as in CANN's and MindSpore's documents, or as in this project's dumps. `/` of an
operator's name is `_` in these names, and `:` is a dot:

    {op}.{output}.{microseconds}.npy
    {type}.{op}.{task}.{stream}.{microseconds}.{input or output}.{index}.{format}.npy
    {layer}.{role}.{index}.{microseconds}.npy

The operators are in the order of a file `*execution_order*`, whose lines begin with the full name
of an operator and a comma, else in the order of the times in the names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.core.errors import DataError, printable
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.npy import read_npy
from pipeline.core.files.value_text import join_first
from pipeline.inspect.compare.tensor_rows import Mapped, TensorSide, compute_cosine
from pipeline.inspect.dumps.dump_files import DATA, LOSS, ROLES, TensorName

ORDER = "*execution_order*"
MAX_FILES = 100_000
_NAMES = (
    re.compile(
        r"(?P<type>\w+)\.(?P<op>.+)\.\d+\.\d+\.(?P<time>\d+)"
        r"\.(?P<role>input|output)\.(?P<index>\d+)\.[A-Za-z_]\w*"
    ),
    re.compile(rf"(?P<op>.+)\.(?P<role>{'|'.join(ROLES)})\.(?P<index>\w+)\.(?P<time>\d+)"),
    re.compile(r"(?P<op>.+)\.(?P<index>\d+)\.(?P<time>\d+)"),
)


def read_reference(folder: Path) -> TensorSide:
    """List a folder's tensors, except links and pipes. Raises DataError for a wrong name."""
    candidates = sorted(folder.rglob("*.npy"))
    paths = [path for path in candidates if path.is_file() and not path.is_symlink()]
    if not paths or len(paths) > MAX_FILES:
        problem = f"must hold 1 to {MAX_FILES:,} .npy files of one step, it has {len(paths):,}"
        raise DataError(printable(f"{folder}: {problem}"))
    files: dict[TensorName, Path] = {}
    times: dict[str, int] = {}
    for path in paths:
        match = next(filter(None, (form.fullmatch(path.stem) for form in _NAMES)), None)
        if match is None:
            rule = "must be named OP.OUTPUT.MICROSECONDS.npy, or as MindSpore names its dumps"
            raise DataError(printable(f"{path}: {rule}"))
        fields = match.groupdict()
        # Narrows the type from str to Role.
        role = ROLES[ROLES.index(fields.get("role") or "output")]
        tensor = TensorName(fields["op"], role, fields["index"])
        if tensor in files:
            problem = f"{tensor} is in {files[tensor].name} and {path.name}; must be of one step"
            raise DataError(printable(f"{folder}: {problem}"))
        files[tensor] = path
        times.setdefault(tensor.layer, int(fields["time"]))
    positions = _read_order(folder)
    ops = sorted(times, key=lambda op: (positions.get(op, len(positions)), times[op]))
    ranks = {op: rank for rank, op in enumerate(ops)}
    names = sorted(files, key=lambda name: (ranks[name.layer], ROLES.index(name.role), name.index))

    def read(name: TensorName) -> np.ndarray:
        try:
            array = read_npy(files[name])
            if array.dtype.kind not in "biuf":
                raise ValueError(f"has type {array.dtype}; must have numbers")
        except (OSError, ValueError) as error:
            raise DataError(printable(f"{files[name]}: can't be read: {error}")) from error
        return array

    about = f"{len(files)} tensors of {len(ops)} operators"
    return TensorSide(str(folder), about, dict.fromkeys(ops, ""), names, read)


def _read_order(folder: Path) -> dict[str, int]:
    """Return the position of each operator in the execution order; {} without such a file.

    Keys are the operator's full name and the last part of this name.
    """
    files = sorted(path for path in folder.glob(ORDER) if not path.is_symlink())
    if len(files) > 1:
        names = join_first([file.name for file in files], 4)
        raise DataError(printable(f"{folder}: must have one execution order, it has {names}"))
    positions: dict[str, int] = {}
    for file in files:
        try:
            lines = read_text(file).splitlines()
        except (OSError, ValueError) as error:
            raise DataError(printable(f"{file}: can't be read: {error}")) from error
        for position, line in enumerate(lines):
            op = line.partition(",")[0].strip()
            for name in (op, op.rpartition("/")[2]):
                positions.setdefault(flatten_name(name), position)
    return positions


def flatten_name(name: str) -> str:
    """Return an operator's name as file names have it."""
    return name.replace("/", "_").replace(":", ".")


def pair_reference(
    left: TensorSide, reference: TensorSide, mapped: Mapped
) -> tuple[TensorSide, TensorSide, Mapped]:
    """Return both sides in one layout, and the operators of the reference by layer.

    Layers and operators of the same name are paired. If less than half of the layers find an
    operator, outputs are paired in order, by shape and by similarity of values. `mapped`, the pairs
    that `--map` names (operators by layer), takes precedence. Images of a reference with channels
    first are transposed.

    Raises DataError if less than half of the layers, or of the operators if they are fewer, have a
    counterpart of the same shape: the reference is of another network or batch.
    """
    left_heads = _read_heads(left)
    right_heads = _read_heads(reference)
    shapes = [head.shape for head in left_heads.values()]
    image_shapes = [head.shape for head in right_heads.values() if len(head.shape) == 4]
    num_channels_first = sum((n, h, w, channels) in shapes for n, channels, h, w in image_shapes)
    if num_channels_first > sum(shape in shapes for shape in image_shapes):
        left = _flatten_channels_first(left)
        reference = _move_channels_last(reference)
        left_heads = _read_heads(left)
        right_heads = _read_heads(reference)
    layers_by_op = {flatten_name(path): path for path in (*left.layers, DATA, LOSS)}
    pairs = {layers_by_op[op]: (op,) for op in reference.layers if op in layers_by_op}
    num_required = min(len(left.layers), len(reference.layers)) / 2
    if len({**pairs, **mapped}) < num_required:
        mapped_ops = {op for ops in mapped.values() for op in ops}
        free_left = {name: head for name, head in left_heads.items() if name.layer not in mapped}
        free_right = {
            name: head for name, head in right_heads.items() if name.layer not in mapped_ops
        }
        pairs = {name.layer: (op.layer,) for name, op in _align(free_left, free_right)}
        about = f"{reference.about}, paired with layers by order and shape (--map names others)"
        reference = replace(reference, about=about)
    mapped = {**pairs, **mapped}
    matches = [
        (name.layer, head.shape, op, right_heads[TensorName(op, "output")].shape)
        for name, head in left_heads.items()
        for op in mapped.get(name.layer, ())
        if TensorName(op, "output") in right_heads
    ]
    paired = {layer for layer, shape, _, other in matches if shape == other} - {DATA, LOSS}
    if len(paired) < num_required:
        misshapen = [
            f"; {layer} has shape {shape}, {op} has {other}"
            for layer, shape, op, other in matches
            if shape != other
        ]
        raise DataError(
            f"{left.name} and {reference.name}: of different networks or batches, {len(paired)} of "
            f"{len(left.layers)} layers have a counterpart of the same shape; --map LEFT:RIGHT "
            f"names others{''.join(misshapen[:1])}"
        )
    return left, reference, mapped


def _flatten_channels_first(side: TensorSide) -> TensorSide:
    """Return the side with outputs of `flatten` reordered, as if images had channels first."""

    def read(name: TensorName) -> np.ndarray | None:
        if side.layers.get(name.layer) == "flatten" and name.role == "output":
            images = side.read(TensorName(name.layer, "input"))
            if images is not None and images.ndim == 4:
                return np.moveaxis(images, -1, 1).reshape(len(images), -1)
        return side.read(name)

    return replace(side, read=read)


def _move_channels_last(side: TensorSide) -> TensorSide:
    """Return the side with the channels of its images moved to the end."""

    def read(name: TensorName) -> np.ndarray | None:
        array = side.read(name)
        # Gradients of kernels have 4 axes too.
        is_image = array is not None and array.ndim == 4 and name.role != "gradient"
        return np.moveaxis(array, 1, -1) if array is not None and is_image else array

    return replace(side, about=f"{side.about}, channels first", read=read)


class _Head(NamedTuple):
    """Shape of an output, and its first sample, if it has one, in float64."""

    shape: tuple[int, ...]
    sample: np.ndarray


def _read_heads(side: TensorSide) -> dict[TensorName, _Head]:
    """Read the first output of each layer. Layers that have only statistics are left out."""
    names = [name for name in side.names if (name.role, name.index) == ("output", "0")]
    arrays = ((name, side.read(name)) for name in names)
    return {
        name: _Head(array.shape, np.array(array[:1] if array.ndim else array, np.float64))
        for name, array in arrays
        if array is not None
    }


def _align(
    left: Mapping[TensorName, _Head], right: Mapping[TensorName, _Head]
) -> list[tuple[TensorName, TensorName]]:
    """Pair tensors of the same shape, in the orders of both sides, with the largest total score.

    This is a longest common subsequence in which a pair scores 1, plus its cosine similarity if it
    is positive. So shape and order decide if the values are wrong, and values decide between
    operators of one shape.
    """
    left_names = list(left)
    right_names = list(right)
    totals = np.zeros((len(left) + 1, len(right) + 1))
    for i, head in enumerate(left.values()):
        for j, other in enumerate(right.values()):
            paired_total = 0.0
            if head.shape == other.shape:
                cosine = compute_cosine(head.sample.ravel(), other.sample.ravel())
                paired_total = totals[i, j] + 1 + max(0.0, cosine)
            totals[i + 1, j + 1] = max(totals[i, j + 1], totals[i + 1, j], paired_total)
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
