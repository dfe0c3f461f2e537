"""Translation of a weight file's names to those of a network, by the rules of `rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.models.weights.rules.syntax import (
    CONVENTIONS,
    MINDSPORE,
    TORCH,
    WRAPPERS,
    Framework,
    Place,
)
from pipeline.stages.export.file_layers import Layers
from pipeline.stages.export.network import NetworkArrays

_PARTS = re.compile(r"\{([^}]*,[^}]*)\}")


@dataclass(frozen=True)
class NamedEntry:
    """An entry of a file, or a part of one, with the network's name for it."""

    source: str
    """The entry's name in the file."""
    target: str | None
    """The network's name; None where a rule skips the entry."""
    array: np.ndarray
    """The array with output features first, as in the framework's other layers."""
    added: bool = False
    """Whether its first row is added to every row of another entry's array."""


def framework_of(file: str, arrays: Arrays, network: NetworkArrays) -> Framework | None:
    """The framework that the names look like; None for the network's own.

    Without norms the two frameworks have the same names; then the suffix of the file decides.
    """
    own = sum(network.resolve(name) is not None for name in arrays)
    if 2 * own >= len(arrays):
        return None
    leaves = {name.rpartition(".")[2] for name in arrays} - {"weight", "bias"}
    if leaves & set(MINDSPORE.leaves):
        return "mindspore"
    return "mindspore" if file.endswith(".ckpt") and not leaves & set(TORCH.leaves) else "torch"


def name_entries(
    file: str,
    arrays: Mapping[str, tuple[str | None, np.ndarray]],
    network: NetworkArrays,
    framework: Framework | None,
) -> Iterator[NamedEntry]:
    """Every entry with the network's name for it, or its own name where no rule matches.

    `arrays` has the entries by their names in the file, each with the name that the user's rules
    gave it (None to skip it). The suffix of `file` says whether the order of entries is meaningful.
    Raises DataError where it is not, and the order of exchangeable layers is unknown.
    """
    if framework is None:
        for source, (name, array) in arrays.items():
            yield NamedEntry(source, name and (network.resolve(name) or name), array)
        return
    convention = CONVENTIONS[framework]
    prefix = _wrapper([name for name, _ in arrays.values() if name is not None])
    resolved: dict[str, str | None] = {}
    unresolved: dict[str, str] = {}
    for source, (name, _) in arrays.items():
        short = (name or "").removeprefix(prefix)
        if name is None or convention.not_weights.fullmatch(short):
            resolved[source] = None
        elif (own := network.resolve(name)) is not None:
            resolved[source] = own
        else:
            unresolved[source] = short
    theirs = {name: arrays[source][1] for source, name in unresolved.items()}
    layers = Layers(file, theirs, network, framework)
    for source, (_, array) in arrays.items():
        if source in resolved:
            yield NamedEntry(source, resolved[source], array)
        else:
            yield from _spread(source, layers.place(unresolved[source]), array, network)


def _wrapper(names: Sequence[str]) -> str:
    """The common prefix that wrappers of the network have added to all names."""
    prefix = ""
    while True:
        found = [w for w in WRAPPERS if names and all(n.startswith(prefix + w) for n in names)]
        if not found:
            return prefix
        prefix += found[0]


def _spread(
    source: str, place: Place | None, array: np.ndarray, network: NetworkArrays
) -> Iterator[NamedEntry]:
    """The entry, or its equal parts where it holds several arrays of the network."""
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
