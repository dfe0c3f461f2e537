"""This project's input pipeline, run as training runs it but for the training.

One program loops over the batches of a window: gather from uint8, crop, flip, rescale, normalise.
The images of a batch are written to a buffer that the loop carries, so that all of them exist.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.loading import MEAN, PAD, STD, Loaded, Work
from pipeline.backends.loading.loader import Loader, make_loader
from pipeline.backends.loading.window import Inputs, LoaderSource, read_batch
from pipeline.data.columns import Split
from pipeline.data.ops.geometry import RandomCrop, RandomHorizontalFlip
from pipeline.data.ops.values import Normalize, Rescale
from pipeline.data.order import SampleOrder
from pipeline.data.transform import apply_ops
from pipeline.training.parallel.state_sharing import DevicePlacement

OPS = (
    RandomCrop(size=(32, 32), padding=(PAD,) * 4),
    RandomHorizontalFlip(),
    Rescale(factor=1 / 255, shift=0.0),
    Normalize(mean=MEAN, std=STD),
)

Images = jax.Array


class Windows:
    """Batches out of the windows of a loader."""

    def __init__(self, loader: Loader, batch_size: int) -> None:
        self._loader = loader
        self._step = 0
        self._images = jnp.zeros((batch_size, 32, 32, 3), jnp.float32)
        self._labels = jnp.zeros(batch_size, jnp.int32)
        self._loop = jax.jit(_loop, donate_argnums=(0, 1))

    def load(self, batches: int) -> Loaded:
        """Load so many batches more."""
        stop = self._step + batches
        while self._step < stop:
            window = self._loader.get_window(self._step)
            end = min(stop, window.stop)
            span = np.int32(self._step - window.start), np.int32(end - window.start)
            carried = self._loop(self._images, self._labels, window.inputs, *span)
            self._images, self._labels = jax.block_until_ready(carried)
            self._step = end
        pixels = np.asarray(self._images)
        return Loaded(batches, float(pixels.mean()), float(pixels.std()))


def _loop(
    images: Images, labels: jax.Array, inputs: Inputs, first: jax.Array, last: jax.Array
) -> tuple[Images, jax.Array]:
    def body(position: jax.Array, _: tuple[Images, jax.Array]) -> tuple[Any, Any]:
        batch = read_batch(inputs, position)
        columns = apply_ops(jnp, OPS, batch.columns, batch.seed, batch.epoch, batch.sample)
        return columns["image"], columns["label"]

    return jax.lax.fori_loop(first, last, body, (images, labels))


def open_loader(work: Work) -> Windows:
    """The pipeline with a loader of the kind `work.way`, resident or stream."""
    with np.load(work.arrays) as arrays:
        split = Split({"image": arrays["images"], "label": arrays["labels"]})
    order = SampleOrder(
        seed=0,
        samples=len(split),
        batch_size=work.batch_size,
        shuffle=True,
        buffer_size=None,
        drop_remainder=True,
        repeat=1,
    )
    kind: Literal["resident", "stream"] = "stream" if work.way == "stream" else "resident"
    source = LoaderSource(split, order, DevicePlacement((jax.devices("cpu")[0],)))
    return Windows(make_loader(source, kind), work.batch_size)
