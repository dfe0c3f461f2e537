"""Collection of weights and gradients during training, as histograms for TensorBoard.

Training doesn't change: the weights are read from the state, and another program computes the
gradients from that state and the next batch. Their last digits may differ from the gradients of the
next step, since XLA may add in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from pipeline.backends.loading.loader import Loader
from pipeline.backends.loading.window import read_batch
from pipeline.data.batch import Batch
from pipeline.data.padding.buckets import NO_PADDING
from pipeline.engine.monitors.tensorboard import Histogram, make_histogram
from pipeline.training.bucketing import apply_in_bucket
from pipeline.training.features.freezing import select_phase
from pipeline.training.state import TrainState
from pipeline.training.step import compute_step_gradients, get_loss_scale
from pipeline.training.step_config import StepConfig

WEIGHTS = "weights"
GRADIENTS = "gradients"
Show = Callable[[int, Mapping[str, Histogram]], None]
"""(step, histograms by name) -> None."""


@dataclass
class Collector:
    """Shows the weights after a step, and the gradients of the next step.

    An error ends the collection with a warning; the run goes on.
    """

    step_config: StepConfig
    loader: Loader
    total: int
    """Steps of the run. No batch follows the last step."""
    device: jax.Device
    show: Show
    warn: Callable[[str], None]
    compiles: bool = True
    """Whether a compiled program computes the gradients; False in eager mode."""
    collects_gradients: bool = True
    """Whether to collect gradients; False for several processes, which share a batch."""
    _has_failed: bool = False
    _programs: dict[tuple[str, ...], Callable[..., Any]] = field(default_factory=dict)
    """Functions that compute gradients, by the patterns of frozen parameters."""

    def __call__(self, state: TrainState, step: int) -> None:
        """Show histograms of the state after `step` steps, without changing the state."""
        if self._has_failed:
            return
        try:
            histograms = make_histograms(WEIGHTS, state.params)
            if self.collects_gradients and step < self.total:
                histograms |= make_histograms(GRADIENTS, self._compute_next_gradients(state, step))
            self.show(step, histograms)
        except Exception as error:  # training goes on without histograms
            self._has_failed = True
            self.warn(
                f"monitor.collect_every: {type(error).__name__}: {error}; weights and gradients "
                "aren't collected any more; training continues"
            )

    def _compute_next_gradients(self, state: TrainState, step: int) -> Any:
        """Return the gradients of step `step + 1`, a tree of the trained parameters."""
        step_config = select_phase(self.step_config, step)
        program = self._programs.get(step_config.frozen)
        if program is None:
            program = partial(_compute_gradients, step_config)
            if self.compiles:
                program = jax.jit(program)
            self._programs[step_config.frozen] = program
        window = self.loader.get_window(step)
        batch = read_batch(window.inputs, jnp.int32(step - window.start))
        slim_state = step_config.select_gradient_state(state)
        # Copied through the host to one device, since state and batch may be on several.
        host_arrays: tuple[TrainState, Batch] = jax.tree.map(np.asarray, (slim_state, batch))
        with jax.default_device(self.device):
            return program(*jax.tree.map(jnp.asarray, host_arrays))


def _compute_gradients(step_config: StepConfig, state: TrainState, batch: Batch) -> Any:
    """Return the gradients of a batch without the loss scale."""

    def compute(cropped: Batch) -> Any:
        return compute_step_gradients(step_config, state, cropped).values

    # With shards, each shard is cropped to its bucket in `compute_step_gradients`.
    padding = NO_PADDING if step_config.shards is not None else step_config.padding
    values = apply_in_bucket(padding, batch, compute)
    loss_scale = get_loss_scale(step_config, state)
    return jax.tree.map(lambda value: value / loss_scale, values)


def make_histograms(kind: str, tree: Any) -> dict[str, Histogram]:
    """Return the histogram of each array that has finite values, by the name `kind/path`."""
    histograms = {
        f"{kind}/{path}": make_histogram(np.asarray(leaf))
        for path, leaf in flatten_dict(dict(tree), sep="/").items()
    }
    return {name: histogram for name, histogram in histograms.items() if histogram is not None}
