"""Weights of Keras: `.keras`, `.weights.h5` and the `.h5` of Keras 2, read by h5py.

Only groups and plain arrays are read, so an untrusted file can't include other files. A `.keras` is
a zip file. Of its layers only the names of classes are read; no class is imported or run.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import MAX_ENTRIES, count_array_bytes
from pipeline.core.host.memory import require_room
from pipeline.models.weights.files.named_arrays import Arrays, add_array, make_natural_key

_WEIGHTS = "model.weights.h5"
_MAX_BYTES = 2**35
_MAX_CONFIG_BYTES = 2**26
_STATE_GROUPS = ("optimizer", "optimizer_weights", "_compile_metrics")
"""Groups without weights of the model."""
_NORM = ("gamma", "beta", "moving_mean", "moving_variance")
_NAMES: Mapping[tuple[int, ...], Sequence[str]] = {(1, 1, 1, 1): _NORM, (1, 1): _NORM[:2]}
"""Names of the variables of a layer without a kernel, by the number of axes of each variable."""


def read_keras(path: Path) -> Arrays:
    """Return the arrays of a file by name, without the state of the optimizer.

    A name is `2.dense.kernel` for layer 2 of the model. In a `.weights.h5`, which only numbers the
    layers of a class, it is `dense.0.kernel`. Raises OSError, and ValueError if the file is damaged
    or h5py is missing.
    """
    try:
        import h5py
    except ImportError:
        raise ValueError("needs h5py; pip install 'recipe-pipeline[h5]'") from None
    source: Any = path
    order: list[str] = []
    if path.suffix.lower() == ".keras":
        with zipfile.ZipFile(path) as archive:
            source = io.BytesIO(_read_part(archive, _WEIGHTS, _MAX_BYTES))
            order = _list_layer_groups(_read_part(archive, "config.json", _MAX_CONFIG_BYTES))
    arrays: Arrays = {}
    try:
        with h5py.File(source, "r") as file:
            has_model = isinstance(file.get("model_weights", getlink=True), h5py.HardLink)
            root = file["model_weights"] if has_model else file
            names = root.attrs.get("layer_names", ())
            order = order or [n.decode() if isinstance(n, bytes) else str(n) for n in names]
            variables = sorted(
                _walk(root, h5py), key=lambda pair: make_natural_key(".".join(pair[0]))
            )
    except (LookupError, TypeError) as error:
        # h5py raises these too for data that HDF5 can't read. Names that are bytes can't be joined.
        raise ValueError(f"it is damaged: {error}") from error
    numbers = {name: number for number, name in enumerate(order)}
    for layer, parts, array in _name_variables(variables):
        name = f"{numbers[layer]}.{layer}" if layer in numbers else _number_class(layer)
        add_array(arrays, ".".join((name, *parts)).removesuffix(":0"), array)
    return arrays


def _number_class(layer: str) -> str:
    """Return `dense.0` for the first layer of a class, and `dense.1` for `dense_1`."""
    match = re.fullmatch(r"(.+)_(\d+)", layer)
    return f"{match[1]}.{match[2]}" if match else f"{layer}.0"


def _read_part(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    if name not in archive.namelist() or archive.getinfo(name).file_size > max_bytes:
        raise ValueError(f"its part {name} is missing or too large")
    require_room(archive.getinfo(name).file_size, "reading it")
    with archive.open(name) as part:
        return part.read(max_bytes)


def _list_layer_groups(content: bytes) -> list[str]:
    """Return the group of each layer of a `.keras`: `dense_1` for the second `Dense`."""
    try:
        classes = [str(layer["class_name"]) for layer in json.loads(content)["config"]["layers"]]
    except RecursionError:
        raise ValueError("its config.json is nested too deeply") from None
    except (KeyError, TypeError):
        return []  # A subclass of Model has no list of layers.
    names: list[str] = []
    counts: Counter[str] = Counter()
    for class_name in classes:
        # Keras converts names of classes to snake case.
        words = re.sub(r"(?<=.)([A-Z][a-z]+)", r"_\1", class_name)
        name = re.sub(r"(?<=[a-z])([A-Z])", r"_\1", words).lower()
        names.append(f"{name}_{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return names


def _walk(root: Any, h5py: Any) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Yield the paths and arrays of a group and of groups within it, but for the optimizer's.

    Raises ValueError for anything else, such as a link.
    """
    pending: list[tuple[tuple[str, ...], Any]] = [((), root)]
    groups = {root}
    while pending:
        path, group = pending.pop()
        for name in group:
            if not path and name in _STATE_GROUPS:
                continue
            inner = (*path, name)
            shown = show_name("/".join(inner))
            is_inside = isinstance(group.get(name, getlink=True), h5py.HardLink)
            item = group[name] if is_inside else None
            if isinstance(item, h5py.Group) and item not in groups and len(groups) < MAX_ENTRIES:
                groups.add(item)
                pending.append((inner, item))
            elif isinstance(item, h5py.Dataset) and not (item.external or item.is_virtual):
                if item.dtype.kind not in "fiub":
                    raise ValueError(f"{shown} is {item.dtype}, which isn't read")
                require_room(count_array_bytes(name, item.dtype, item.shape or ()), "reading it")
                yield inner, np.asarray(item)
            else:
                raise ValueError(f"{shown} isn't an array or a new group of this file")


def _name_variables(
    variables: Sequence[tuple[tuple[str, ...], np.ndarray]],
) -> Iterator[tuple[str, tuple[str, ...], np.ndarray]]:
    """Yield the layer, the other parts of the name, and the array of each variable.

    Keras 3 only numbers the variables of a layer. They are named by their numbers of axes.
    """
    by_layer: dict[tuple[str, ...], list[np.ndarray]] = {}
    for path, array in variables:
        if path[-2:-1] == ("vars",):
            by_layer.setdefault(path[:-2], []).append(array)
        elif len(path) > 1:
            # Keras 2 repeats the layer's name in the path.
            yield path[0], path[2:] if path[0] == path[1] else path[1:], array
    for path, arrays in by_layer.items():
        axes = tuple(array.ndim for array in arrays)
        names = _NAMES.get(axes) or _name_by_axes(axes)
        inner = path[1:] if path[:1] == ("layers",) else path
        for name, array in zip(names, arrays, strict=True):
            yield inner[0] if inner else "model", (*inner[1:], name), array


def _name_by_axes(axes: Sequence[int]) -> list[str]:
    """Return the names of the variables of a layer with a kernel, which is the first.

    The bias is the first with fewer axes. Others are numbered, such as an LSTM's recurrent kernel.
    """
    names = ["kernel", *map(str, range(1, len(axes)))]
    bias = next((number for number, count in enumerate(axes) if count < axes[0]), None)
    if bias is not None:
        names[bias] = "bias"
    return names
