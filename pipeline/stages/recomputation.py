"""Recomputation: activations that the backward pass computes again instead of keeping them.

What enters a block is kept, and what is computed inside of it is not (Chen et al. 2016, "Training
Deep Nets with Sublinear Memory Cost"): memory for one forward pass more through the blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from flax import linen as nn

from pipeline.backends.base import Executable
from pipeline.core.host.memory import available_bytes
from pipeline.models.layers import standard
from pipeline.models.modules.standard import Network
from pipeline.stages.build import Built

BLOCKS = (standard.Residual, standard.Branches, standard.DualPath)
"""Layers whose insides are computed again, the outermost where one is inside of another."""


def recomputing(built: Built) -> Built:
    """Return the step whose backward pass computes the insides of blocks again.

    Losses are the same bits on the CPU where the compiler forms the same operations of both.
    Raises ValueError for a network without blocks.
    """
    network = built.parts.network
    if not blocks_of(network):
        raise ValueError(
            "the network has no residual blocks and no branches, whose insides could be computed "
            "again; must be none"
        )
    return replace(built, parts=replace(built.parts, network=network.clone(recomputes=True)))


def blocks_of(network: nn.Module) -> int:
    """The number of blocks of a network, those inside of others left out; 0 for one that is no
    list of layers."""
    return _count(network.layers) if isinstance(network, Network) else 0


def _count(value: Any) -> int:
    if isinstance(value, BLOCKS):
        return 1
    if isinstance(value, tuple):
        return sum(map(_count, value))
    if isinstance(value, standard.Sequence | standard.Gate):
        return getattr(value, "repeat", 1) * _count(value.body)
    return 0


def training_temporaries(executable: Executable) -> int:
    """Bytes of the temporaries of a training step, as the compiler plans them."""
    sizes = {program.name: program.temporary_bytes for program in executable.report.programs}
    return sizes.get("training step", 0)


def device_memory(device: jax.Device) -> int:
    """Bytes of memory that a step may take: of the device, or what is available on the host."""
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if not statistics or "bytes_limit" not in statistics:
        return available_bytes()
    return int(statistics["bytes_limit"]) - int(statistics.get("bytes_in_use", 0))
