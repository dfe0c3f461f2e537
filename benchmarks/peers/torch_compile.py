"""PyTorch with torch.compile in its default mode, with network and loss as one graph.

All else is as in `torch_eager`. Compiling happens in the steps before the first round.
"""

from __future__ import annotations

from benchmarks.peers.torch_eager import TorchTraining
from benchmarks.tasks import Task


def enter(task: Task) -> TorchTraining:
    """Make the training with compiled PyTorch."""
    return TorchTraining(task, compiled=True)
