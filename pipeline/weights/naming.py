"""From the names in a weight file to those of a network, by the rules of `rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.weights.file_layers import Layers
from pipeline.weights.files.named_arrays import Arrays
from pipeline.weights.network import NetworkArrays
from pipeline.weights.rules.frameworks import CONVENTIONS, MINDSPORE, TORCH, WRAPPERS, Framework
from pipeline.weights.rules.syntax import Place

_PARTS = re.compile(r"\{([^}]*,[^}]*)\}")


@dataclass(frozen=True)
class NamedEntry:
    """An entry of a file, or a part of one, under the name that the network should know it by."""

    source: str
    """The entry's name in the file."""
    target: str | None
    """None where a rule leaves the entry out."""
    array: np.ndarray
    """Its first axis counts what the layer gives, where the framework's others do so."""
    added: bool = False
    """Is its first row added to every row of the array that another entry is?"""


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
    file: str,
    arrays: Mapping[str, tuple[str | None, np.ndarray]],
    network: NetworkArrays,
    framework: Framework | None,
) -> Iterator[NamedEntry]:
    """Every entry under the network's name for it, or under its own where no rule knows it.

    `arrays` has the entries by their names in the file, each with the name that the user's rules
    gave it (None to leave it out). `file` tells by its suffix whether their order means anything.
    Raises DataError where it does not and layers that could be exchanged go by their order.
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
    """What wrappers have put before all names."""
    prefix = ""
    while True:
        found = [w for w in WRAPPERS if names and all(n.startswith(prefix + w) for n in names)]
        if not found:
            return prefix
        prefix += found[0]


def _spread(
    source: str, place: Place | None, array: np.ndarray, network: NetworkArrays
) -> Iterator[NamedEntry]:
    """The entry, or the equal parts of it that several arrays of the network are."""
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
