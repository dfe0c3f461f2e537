"""Peers: the same training as a competent user of another framework would write it.

Each module has `enter(task) -> Training`. A peer builds its network from the task's list of layers,
starts from the task's weights, and has the batches of an epoch in memory, normalised float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Peer:
    """A peer's module, the packages that it needs, and how it trains, in a few words."""

    module: str
    packages: tuple[str, ...]
    how: str

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages that are not installed."""
        return tuple(name for name in self.packages if find_spec(name) is None)


PEERS = {
    "torch": Peer(
        "benchmarks.peers.torch_eager",
        ("torch",),
        "PyTorch eager, fused optimizer",
    ),
    "torch_compile": Peer(
        "benchmarks.peers.torch_compile",
        ("torch",),
        "PyTorch, torch.compile of network and loss, fused optimizer",
    ),
    "keras": Peer(
        "benchmarks.peers.keras_jax",
        ("keras",),
        "Keras on JAX, model.fit, steps_per_execution = sink size",
    ),
    "mindspore": Peer(
        "benchmarks.peers.mindspore_graph",
        ("mindspore",),
        "MindSpore's CPU build, graph mode, TrainOneStepCell stepped from Python",
    ),
    "jax_loop": Peer(
        "benchmarks.peers.jax_loop",
        ("jax", "flax", "optax"),
        "flax and optax, one jitted step a dispatch",
    ),
}
