"""From the names in a weight file to those of a network, by the rules of `rules`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.weights.arrays import Arrays
from pipeline.weights.network import NetworkArrays
from pipeline.weights.rules import (
    BY_MODEL,
    CONVENTIONS,
    IN_ORDER,
    MINDSPORE,
    TORCH,
    WRAPPERS,
    Framework,
    LayerRules,
)

_PARTS = re.compile(r"\{([^}]*,[^}]*)\}")
_PACKED = re.compile(r"in_proj_(weight|bias)$")
"""torch.nn.MultiheadAttention has no layer where its packed projection should be one."""


@dataclass(frozen=True)
class Named:
    """An entry of a file, or a part of one, under the name that the network should know it by."""

    source: str
    """The entry's name in the file."""
    target: str | None
    """None where a rule leaves the entry out."""
    array: np.ndarray


def framework_of(file: str, arrays: Arrays, network: NetworkArrays) -> Framework | None:
    """Whose names these look like; None for the network's own.

    Without norms the two can't be told apart, nor need they be; then the suffix of the file does.
    """
    own = sum(network.resolve(name) is not None for name in arrays)
    if 2 * own >= len(arrays):
        return None
    leaves = {name.rpartition(".")[2] for name in arrays} - {"weight", "bias"}
    if leaves & set(MINDSPORE.leaves):
        return "mindspore"
    return "mindspore" if file.endswith(".ckpt") and not leaves & set(TORCH.leaves) else "torch"


def name_entries(
    arrays: Mapping[str, tuple[str | None, np.ndarray]],
    network: NetworkArrays,
    framework: Framework | None,
) -> Iterator[Named]:
    """Every entry under the network's name for it, or under its own where no rule knows it.

    `arrays` has the entries by their names in the file, each with the name that the user's rules
    gave it (None to leave it out).
    """
    if framework is None:
        for source, (name, array) in arrays.items():
            yield Named(source, name and (network.resolve(name) or name), array)
        return
    convention = CONVENTIONS[framework]
    prefix = _wrapper([name for name, _ in arrays.values() if name is not None])
    layers = _Layers(arrays, prefix, network, framework)
    for source, (name, array) in arrays.items():
        if name is None or convention.not_weights.fullmatch(name.removeprefix(prefix)):
            yield Named(source, None, array)
        elif (own := network.resolve(name)) is not None:
            yield Named(source, own, array)
        else:
            yield from _spread(source, layers.rename(name.removeprefix(prefix)), array, network)


def _wrapper(names: Sequence[str]) -> str:
    """What wrappers have put before all names."""
    prefix = ""
    while True:
        found = [w for w in WRAPPERS if names and all(n.startswith(prefix + w) for n in names)]
        if not found:
            return prefix
        prefix += found[0]


def _spread(source: str, target: str, array: np.ndarray, network: NetworkArrays) -> Iterator[Named]:
    """The entry, or the equal parts of it that several arrays of the network are."""
    braces = _PARTS.search(target)
    if braces is None:
        yield Named(source, network.resolve(target) or target, array)
        return
    options = braces[1].split(",")
    if array.ndim == 0 or len(array) % len(options):
        yield Named(source, target, array)
        return
    for option, part in zip(options, np.split(array, len(options)), strict=True):
        name = target[: braces.start()] + option + target[braces.end() :]
        yield Named(source, network.resolve(name) or name, part)


class _Layers:
    """The layers that a file's names tell of, each with its kind, in order."""

    def __init__(
        self,
        arrays: Mapping[str, tuple[str | None, np.ndarray]],
        prefix: str,
        network: NetworkArrays,
        framework: Framework,
    ) -> None:
        self._leaves = CONVENTIONS[framework].leaves
        self._rules = layer_rules(network)
        self._ranks: dict[str, dict[str, int]] = {}
        for name, array in arrays.values():
            layer, leaf = _split((name or "").removeprefix(prefix), self._leaves)
            if leaf:
                self._ranks.setdefault(layer, {})[leaf] = array.ndim
        self._counted: dict[str, list[str]] = {}

    def rename(self, name: str) -> str:
        """The network's name for an array; its own, with slashes, where no rule knows it."""
        layer, leaf = _split(name, self._leaves)
        if not leaf:
            return self._by_rules(layer, "") or layer
        kind = _kind(self._ranks[layer])
        path = self._by_rules(layer, kind) or layer.replace(".", "/")
        ours = self._leaves[leaf]
        scale = ours == "kernel" and kind in ("batch_norm", "layer_norm")
        return f"{path}/{'scale' if scale else ours}"

    def _by_rules(self, layer: str, kind: str) -> str | None:
        for pattern, replacement in self._rules:
            match = re.fullmatch(pattern, layer)
            if match is not None and (kind or "{kind}" not in replacement):
                path = match.expand(replacement).replace("{kind}", kind)
                counted = self._counted.setdefault(path, [])
                if layer not in counted:
                    counted.append(layer)
                return path.replace("#", str(counted.index(layer)))
        return None


def layer_rules(network: NetworkArrays) -> LayerRules:
    """The rules for a model: its own, or those of networks without blocks, or none."""
    if network.model in BY_MODEL:
        return BY_MODEL[network.model]
    return () if network.has_blocks else IN_ORDER


def _split(name: str, leaves: Collection[str]) -> tuple[str, str]:
    """A name's layer and array; no array where the name ends in none that layers have."""
    layer, _, leaf = _PACKED.sub(r"in_proj.\1", name).rpartition(".")
    return (layer, leaf) if layer and leaf in leaves else (name, "")


def _kind(ranks: Mapping[str, int]) -> str:
    """What layer has these arrays."""
    if {"running_mean", "moving_mean"} & set(ranks):
        return "batch_norm"
    rank = ranks.get("weight", 1)
    return {4: "conv", 2: "dense"}.get(rank, "layer_norm")
