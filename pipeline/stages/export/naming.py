"""Translation of the names in a weight file to a network's names, by rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.models.weights.files.named_arrays import Arrays, make_natural_key
from pipeline.models.weights.files.weight_files import TENSORFLOW_SUFFIXES, keeps_order
from pipeline.models.weights.rules import find_layer_rules
from pipeline.models.weights.rules.syntax import (
    CONVENTIONS,
    KERNELS,
    MINDSPORE,
    SKIPPED,
    TORCH,
    WRAPPERS,
    Framework,
    Place,
    place_layer,
)
from pipeline.stages.export.network import NetworkArrays, convert_layout

_PARTS = re.compile(r"\{([^}]*,[^}]*)\}")
"""Braces with the names of the parts of a packed array, such as {query,key,value}."""


@dataclass(frozen=True)
class NamedEntry:
    """An entry of a file, or a part of one, with the network's name for it."""

    source: str
    """The entry's name in the file."""
    target: str | None
    """The network's name; None if a rule skips the entry."""
    array: np.ndarray
    """The array. If a framework's rules named the entry, its output features are first."""
    added: bool = False
    """Whether the first row is added to every row of another entry's array."""


def guess_framework(file: str, names: Sequence[str], network: NetworkArrays) -> Framework | None:
    """Return the framework whose names a file has; None if at least half are the network's.

    Without norm layers, PyTorch and MindSpore have the same names, so the file's suffix decides.
    """
    if 2 * sum(network.resolve(name) is not None for name in names) >= len(names):
        return None
    if Path(file).suffix.lower() in TENSORFLOW_SUFFIXES:
        return "tensorflow"
    leaves = {name.rpartition(".")[2] for name in names} - {"weight", "bias"}
    if leaves & set(MINDSPORE.leaves):
        return "mindspore"
    return "mindspore" if file.endswith(".ckpt") and not leaves & set(TORCH.leaves) else "torch"


def name_entries(
    file: str,
    arrays: Mapping[str, tuple[str | None, np.ndarray]],
    network: NetworkArrays,
    framework: Framework | None,
) -> Iterator[NamedEntry]:
    """Yield every entry with the network's name, or the file's name if no rule matches.

    `arrays` has, by the name in the file, (name after the user's renames, array). The name is None
    to skip the entry. The suffix of `file` decides whether its entries are in the order of layers.
    Raises DataError if neither the entries nor the names order layers of equal shapes.
    """
    if framework is None:
        for source, (name, array) in arrays.items():
            target = None if name is None else network.resolve(name) or name
            yield NamedEntry(source, target, array)
        return
    convention = CONVENTIONS[framework]
    prefix = _find_wrappers([name for name, _ in arrays.values() if name is not None])
    resolved: dict[str, str | None] = {}
    unresolved: dict[str, str] = {}
    for source, (name, _) in arrays.items():
        short = (name or "").removeprefix(prefix)
        if name is None or convention.not_weights.fullmatch(short):
            resolved[source] = None
        elif (target := network.resolve(name)) is not None:
            resolved[source] = target
        else:
            unresolved[source] = short
    layers = FileLayers(
        file, {name: arrays[source][1] for source, name in unresolved.items()}, network, framework
    )
    for source, (_, array) in arrays.items():
        if source in resolved:
            yield NamedEntry(source, resolved[source], array)
        else:
            yield from _split_entry(source, layers.place(unresolved[source]), array, network)


def _find_wrappers(names: Sequence[str]) -> str:
    """Return the prefix that wrappers of a network add to all names; "" without wrappers."""
    prefix = ""
    while names:
        longer = (prefix + wrapper for wrapper in WRAPPERS)
        common = [text for text in longer if all(name.startswith(text) for name in names)]
        if not common:
            break
        prefix = common[0]
    return prefix


def _split_entry(
    source: str, place: Place | None, array: np.ndarray, network: NetworkArrays
) -> Iterator[NamedEntry]:
    """Yield an entry, or its equal parts if it packs several arrays of the network."""
    if place is None:
        yield NamedEntry(source, None, array)
        return
    target = place.path
    array = array.T if place.transposed else array
    braces = _PARTS.search(target)
    if braces is None:
        yield NamedEntry(source, network.resolve(target) or target, array, place.added)
        return
    options = braces[1].split(",")
    if array.ndim == 0 or len(array) % len(options):
        yield NamedEntry(source, target, array)
        return
    for option, part in zip(options, np.split(array, len(options)), strict=True):
        name = target[: braces.start()] + option + target[braces.end() :]
        yield NamedEntry(source, network.resolve(name) or name, part)


Shapes = dict[str, tuple[int, ...]]
"""Shapes of a layer's arrays, by their names in the file."""

_PACKED = re.compile(r"in_proj_(weight|bias)$")
"""Names of a packed projection in torch.nn.MultiheadAttention: arrays without a layer."""


class FileLayers:
    """The layers of a file by its names, each with its path in the network."""

    def __init__(
        self, file: str, arrays: Arrays, network: NetworkArrays, framework: Framework
    ) -> None:
        self._file = file
        self._network = network
        self._framework = framework
        # Only shapes are compared, and the order of flattened values doesn't change shapes.
        self._unflattened = replace(network, flattened={})
        names = (name.partition("/")[2] for name in network.shapes)
        self._network_layers = {name.rpartition("/")[0] for name in names}
        self._leaves = CONVENTIONS[framework].leaves
        self._rules = find_layer_rules(network.model, framework, has_blocks=network.has_blocks)
        self._shapes: dict[str, Shapes] = {}
        for name, array in arrays.items():
            layer, leaf = self._split_name(name)
            if leaf:
                self._shapes.setdefault(layer, {})[leaf] = array.shape
        self._places = self._place_layers()

    def place(self, name: str) -> Place | None:
        """Return the place in the network of an array; None if a rule skips the array.

        If no rule matches, the place is the array's name with slashes.
        """
        layer, leaf = self._split_name(name)
        if leaf:
            place = self._places[layer]
            if place.path != SKIPPED:
                target = self._find_leaf(leaf, place.path, _guess_kind(self._shapes[layer]))
                transposed = place.transposed and self._leaves[leaf] == "kernel"
                place = replace(place, path=f"{place.path}/{target}", transposed=transposed)
        else:
            by_rule = place_layer(self._rules, layer, "")
            place = Place(layer) if by_rule is None or "#" in by_rule.path else by_rule
        return None if place.path == SKIPPED else place

    def _split_name(self, name: str) -> tuple[str, str]:
        """Split a name into layer and array; the array is "" if the name doesn't end in one."""
        layer, _, leaf = _PACKED.sub(r"in_proj.\1", name).rpartition(".")
        return (layer, leaf) if layer and leaf in self._leaves else (name, "")

    def _find_leaf(self, leaf: str, path: str, kind: str) -> str:
        """Return the network's name for an array of a layer at `path`."""
        target = self._leaves[leaf]
        if target != "kernel":
            return target
        if self._network.resolve(f"{path}/table") is not None:
            return "table"
        return "scale" if kind in ("batch_norm", "layer_norm") else target

    def _place_layers(self) -> dict[str, Place]:
        """Return the place of every layer; `#` in a rule becomes the number of a fitting layer."""
        places: dict[str, Place] = {}
        layers_by_path: dict[str, list[str]] = {}
        for layer, shapes in self._shapes.items():
            place = place_layer(self._rules, layer, _guess_kind(shapes))
            if place is None:
                places[layer] = Place(layer.replace(".", "/"))
            elif "#" in place.path:
                layers_by_path.setdefault(place.path, []).append(layer)
            else:
                places[layer] = place
        for path, layers in layers_by_path.items():
            paths = self._number_layers(path, layers)
            places.update({layer: Place(numbered) for layer, numbered in paths.items()})
        return places

    def _number_layers(self, path: str, layers: list[str]) -> dict[str, str]:
        """Return the path of each layer: `path` with a number of the network's layers for `#`."""
        ordered = keeps_order(self._file)
        if not ordered:
            layers = sorted(layers, key=make_natural_key)
        prefix, _, suffix = map(re.escape, path.partition("#"))
        matches = (re.fullmatch(rf"{prefix}(\d+){suffix}", name) for name in self._network_layers)
        numbers = sorted(int(match[1]) for match in matches if match)
        fits = self._tabulate_fits([path.replace("#", str(number)) for number in numbers], layers)
        if not ordered:
            self._require_order(layers, fits)
        # Layers that the network lacks get further numbers.
        next_number = max(numbers, default=-1) + 1
        numbers += range(next_number, next_number + len(layers))
        return {
            layer: path.replace("#", str(numbers[place]))
            for layer, place in zip(layers, align_layers(fits), strict=True)
        }

    def _tabulate_fits(self, paths: Sequence[str], layers: Sequence[str]) -> np.ndarray:
        """Return how many arrays of each layer fit at each path, int (layers, paths)."""
        counts: dict[str, list[int]] = {}
        for layer in layers:
            if (text := self._format_shapes(layer)) not in counts:
                counts[text] = [
                    self._count_fitting_arrays(self._shapes[layer], path) for path in paths
                ]
        rows = [counts[self._format_shapes(layer)] for layer in layers]
        return np.array(rows, np.int64).reshape(len(layers), len(paths))

    def _format_shapes(self, layer: str) -> str:
        return str(sorted(self._shapes[layer].items()))

    def _count_fitting_arrays(self, shapes: Shapes, path: str) -> int:
        """Return how many arrays of a layer have the shapes of the network's layer at `path`."""
        kind = _guess_kind(shapes)
        num_fitting = 0
        for leaf, shape in shapes.items():
            target = self._network.resolve(f"{path}/{self._find_leaf(leaf, path, kind)}")
            if target:
                blank = np.broadcast_to(np.False_, shape)
                converted = convert_layout(blank, target, self._unflattened, self._framework)
                num_fitting += converted.shape == self._network.shapes[target]
        return num_fitting

    def _require_order(self, layers: Sequence[str], fits: np.ndarray) -> None:
        """Raise DataError if names don't order two layers of equal shapes."""
        groups: dict[str, list[str]] = {}
        for layer, row in zip(layers, fits, strict=True):
            if row.any():
                groups.setdefault(self._format_shapes(layer), []).append(layer)
        for group in groups.values():
            for first, second in pairwise(group):
                parts = zip(make_natural_key(first), make_natural_key(second), strict=False)
                differing = next((pair for pair in parts if pair[0] != pair[1]), ("", ""))
                # Names are ordered only if their first difference is a number.
                if not isinstance(differing[0], int):
                    raise DataError(
                        f"{self._file}: its entries aren't in the order of layers, and the order "
                        f"of {show_name(first)} and {show_name(second)}, which have the same "
                        f"shapes, is unknown; number them with checkpoint.renames, as in "
                        rf"{{match: '{re.escape(first)}\.(.*)', to: '0.\1'}}"
                    )


def _guess_kind(shapes: Shapes) -> str:
    """Return the kind of layer with these arrays, by its statistics or the rank of its kernel."""
    if {"running_mean", "moving_mean"} & set(shapes):
        return "batch_norm"
    axes = max((len(shape) for leaf, shape in shapes.items() if leaf in KERNELS), default=1)
    return {4: "conv", 2: "dense"}.get(axes, "layer_norm")


def align_layers(fits: np.ndarray) -> list[int]:
    """Return, for each of the n layers of a file, the index of its partner of m network layers.

    `fits`, int (n, m), is the number of arrays of a file's layer that fit a network's layer. Pairs
    keep the order of layers. The result maximises the number of fitting arrays, then the number of
    pairs, and then leaves the last layers unpaired. So an extra layer doesn't shift later pairs,
    and a layer of another shape is paired by its position. Unpaired layers of the file get m,
    m + 1, ... This is the algorithm of Needleman and Wunsch, 1970, with free gaps.
    """
    num_layers, num_network_layers = fits.shape
    # One more fitting array outweighs all pairs.
    scores = fits.astype(np.int64) * (min(fits.shape) + 1) + 1
    # best[i, j] is the score of the best pairing of the first i layers with the first j.
    best = np.zeros((num_layers + 1, num_network_layers + 1), np.int64)
    for index in range(num_layers):
        paired = best[index, :-1] + scores[index]
        best[index + 1, 1:] = np.maximum.accumulate(np.maximum(best[index, 1:], paired))
    partners: list[int | None] = [None] * num_layers
    row = num_layers
    column = num_network_layers
    while row and column:
        if best[row, column] == best[row - 1, column]:
            row -= 1
        elif best[row, column] == best[row, column - 1]:
            column -= 1
        else:
            row -= 1
            column -= 1
            partners[row] = column
    unpaired = count(num_network_layers)
    return [next(unpaired) if partner is None else partner for partner in partners]
