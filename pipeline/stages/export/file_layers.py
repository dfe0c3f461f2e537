"""The layers that a weight file's names describe, and their counterparts in the network."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.error_text import shown
from pipeline.models.weights.files.named_arrays import Arrays, natural_key
from pipeline.models.weights.files.weight_files import keeps_order
from pipeline.models.weights.rules import layer_rules
from pipeline.models.weights.rules.syntax import CONVENTIONS, SKIPPED, Framework, Place, place_by
from pipeline.stages.export.alignment import align
from pipeline.stages.export.axis_order import to_own_layout
from pipeline.stages.export.network import NetworkArrays

Shapes = dict[str, tuple[int, ...]]
"""Shapes of a layer's arrays, by their names in the file."""

_PACKED = re.compile(r"in_proj_(weight|bias)$")
"""torch.nn.MultiheadAttention has no layer of its own for its packed projection."""


class Layers:
    """The layers that a file's names describe, each with its path in the network."""

    def __init__(
        self, file: str, arrays: Arrays, network: NetworkArrays, framework: Framework
    ) -> None:
        self._file, self._network = file, network
        # Only shapes are needed, and reordering flattened images does not change them.
        self._unflattened = replace(network, flattened={})
        names = (name.partition("/")[2] for name in network.shapes)
        self._network_layers = {name.rpartition("/")[0] for name in names}
        self._leaves = CONVENTIONS[framework].leaves
        self._rules = layer_rules(network.model, framework, blocks=network.has_blocks)
        self._shapes: dict[str, Shapes] = {}
        for name, array in arrays.items():
            layer, leaf = _split(name, self._leaves)
            if leaf:
                self._shapes.setdefault(layer, {})[leaf] = array.shape
        self._places = self._place()

    def place(self, name: str) -> Place | None:
        """The place of an array, by the network's name; None where a rule skips the array.

        Without a matching rule, the place is the array's own name, with slashes.
        """
        layer, leaf = _split(name, self._leaves)
        if leaf:
            place = self._places[layer]
            own = self._own_leaf(leaf, place.path, _kind(self._shapes[layer]))
            found = replace(
                place,
                path=f"{place.path}/{own}" if place.path != SKIPPED else SKIPPED,
                transposed=place.transposed and self._leaves[leaf] == "kernel",
            )
        else:
            known = place_by(self._rules, layer, "")
            found = Place(layer) if known is None or "#" in known.path else known
        return None if found.path == SKIPPED else found

    def _own_leaf(self, leaf: str, path: str, kind: str) -> str:
        ours = self._leaves[leaf]
        if ours != "kernel":
            return ours
        if self._network.resolve(f"{path}/table") is not None:
            return "table"
        return "scale" if kind in ("batch_norm", "layer_norm") else ours

    def _place(self) -> dict[str, Place]:
        """The place of every layer. Layers whose paths differ only in a number are counted."""
        places: dict[str, Place] = {}
        counted: dict[str, list[str]] = {}
        for layer, shapes in self._shapes.items():
            place = place_by(self._rules, layer, _kind(shapes))
            if place is None:
                places[layer] = Place(layer.replace(".", "/"))
            elif "#" in place.path:
                counted.setdefault(place.path, []).append(layer)
            else:
                places[layer] = place
        for path, layers in counted.items():
            paths = self._count(path, layers)
            places.update({layer: Place(own) for layer, own in paths.items()})
        return places

    def _count(self, path: str, layers: list[str]) -> dict[str, str]:
        ordered = keeps_order(self._file)
        if not ordered:
            layers = sorted(layers, key=natural_key)
        numbers = self._numbers(path)
        fits = self._fits([path.replace("#", str(number)) for number in numbers], layers)
        if not ordered:
            self._require_order(layers, fits)
        numbers += range(max(numbers, default=-1) + 1, len(numbers) + len(layers) + 1)
        return {
            layer: path.replace("#", str(numbers[place]))
            for layer, place in zip(layers, align(fits), strict=True)
        }

    def _numbers(self, path: str) -> list[int]:
        """The numbers in place of `#` in the paths of the network's layers, ascending."""
        before, _, after = map(re.escape, path.partition("#"))
        found = (re.fullmatch(rf"{before}(\d+){after}", own) for own in self._network_layers)
        return sorted(int(match[1]) for match in found if match)

    def _fits(self, ours: Sequence[str], layers: Sequence[str]) -> np.ndarray:
        """int (file's layers, network's layers): number of arrays with fitting shapes."""
        known: dict[str, list[int]] = {}
        for layer in layers:
            if (alike := self._shapes_as_text(layer)) not in known:
                known[alike] = [self._count_fitting(self._shapes[layer], own) for own in ours]
        rows = [known[self._shapes_as_text(layer)] for layer in layers]
        return np.array(rows, np.int64).reshape(len(layers), len(ours))

    def _shapes_as_text(self, layer: str) -> str:
        return str(sorted(self._shapes[layer].items()))

    def _count_fitting(self, shapes: Shapes, path: str) -> int:
        kind = _kind(shapes)
        names = {leaf: f"{path}/{self._own_leaf(leaf, path, kind)}" for leaf in shapes}
        targets = {leaf: self._network.resolve(name) for leaf, name in names.items()}
        return sum(self._is_of(shapes[leaf], own) for leaf, own in targets.items() if own)

    def _is_of(self, shape: tuple[int, ...], target: str) -> bool:
        own = to_own_layout(np.broadcast_to(np.False_, shape), target, self._unflattened)
        return own.shape == self._network.shapes[target]

    def _require_order(self, layers: Sequence[str], fits: np.ndarray) -> None:
        """Raise DataError where names give no order to two layers with equal shapes."""
        alike: dict[str, list[str]] = {}
        for layer, row in zip(layers, fits, strict=True):
            if row.any():
                alike.setdefault(self._shapes_as_text(layer), []).append(layer)
        for exchangeable in alike.values():
            for first, second in pairwise(exchangeable):
                if not _numbers_tell(first, second):
                    raise DataError(
                        f"{self._file}: keeps its entries in no order of layers, and nothing tells "
                        f"which comes first of {shown(first)} and {shown(second)}, which have the "
                        f"same shapes; number them with checkpoint.renames, as in "
                        rf"{{match: '{re.escape(first)}\.(.*)', to: '0.\1'}}"
                    )


def _numbers_tell(first: str, second: str) -> bool:
    """Return whether the first difference between two names is a number."""
    parts = zip(natural_key(first), natural_key(second), strict=False)
    differing = next(((one, other) for one, other in parts if one != other), ("", ""))
    return isinstance(differing[0], int)


def _split(name: str, leaves: Collection[str]) -> tuple[str, str]:
    """A name's layer and array; "" for the array where the name does not end in a known one."""
    layer, _, leaf = _PACKED.sub(r"in_proj.\1", name).rpartition(".")
    return (layer, leaf) if layer and leaf in leaves else (name, "")


def _kind(shapes: Shapes) -> str:
    """The kind of layer that has these arrays."""
    if {"running_mean", "moving_mean"} & set(shapes):
        return "batch_norm"
    axes = len(shapes.get("weight", (1,)))
    return {4: "conv", 2: "dense"}.get(axes, "layer_norm")
