"""Components that make a run slow, for the tests of verdicts; importing them registers them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.api import (
    Callback,
    CallbackSpec,
    DatasetSpec,
    Facts,
    LayerSpec,
    RawData,
    RunControl,
    Split,
    Targets,
    component,
)

SAMPLES, HELD_OUT = 2048, 64


@dataclass(frozen=True)
class SlowColumn:
    """Images that take some time to read, one by one."""

    images: np.ndarray
    read_s: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.images.dtype

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.images[rows]

    def sample(self, index: int) -> np.ndarray:
        time.sleep(self.read_s)
        return self.images[index]

    def sample_name(self, index: int) -> str:
        return f"number {index}"


@component("dataset")
class SlowReader(DatasetSpec):
    """Images 16x16 whose samples are slow to read."""

    name: Literal["slow_reader"] = "slow_reader"
    read_ms: float = 1.0

    def facts(self) -> Facts:
        return Facts((16, 16, 1), classes=4, train_size=SAMPLES, eval_size=HELD_OUT)

    def read(self, cache: Path) -> RawData:
        draw = np.random.default_rng(0)

        def split(count: int, read_s: float) -> Split:
            images = draw.integers(0, 255, (count, 16, 16, 1), np.uint8)
            labels = draw.integers(0, 4, count).astype(np.int32)
            return Split({"image": SlowColumn(images, read_s), "label": labels})

        targets = Targets(("a", "b", "c", "d"))
        return RawData(split(SAMPLES, self.read_ms / 1000), split(HELD_OUT, 0.0), targets)


@component("layer")
class AskPython(LayerSpec):
    """Add a number that Python computes on the host for each batch, or zero without it."""

    name: Literal["ask_python"] = "ask_python"
    asks: bool = True
    seconds: float = 0.004

    def compute(self, x: Any, context: Any) -> Any:
        import jax

        if not self.asks:
            return x

        def look(values: Any) -> Any:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                pass
            return np.float32(0.0)

        shape = jax.ShapeDtypeStruct((), np.float32)
        return x + jax.pure_callback(look, shape, jax.lax.stop_gradient(x.mean()))


@component("layer")
class GeluStack(LayerSpec):
    """The same elementwise function many times."""

    name: Literal["gelu_stack"] = "gelu_stack"
    times: int = 12

    def compute(self, x: Any, context: Any) -> Any:
        import jax

        for _ in range(self.times):
            x = jax.nn.gelu(1.01 * x, approximate=False)
        return x


@component("callback")
class NewShapes(CallbackSpec):
    """A compiled function called with another shape at the end of every sink."""

    name: Literal["new_shapes"] = "new_shapes"
    changes: bool = True

    def build(self) -> Callback:
        return _Shapes(self.changes)


class _Shapes(Callback):
    def __init__(self, changes: bool) -> None:
        self._changes, self._calls = changes, 0

    def on_sink(self, run: RunControl, report: Any) -> None:
        import jax
        import jax.numpy as jnp

        self._calls += 1
        size = self._calls if self._changes else 1

        @jax.jit
        def moments(x: Any) -> Any:
            return jnp.sin(x).mean(), jnp.linalg.norm(jnp.cos(x) @ x)

        # One function for all calls: its programs are kept by shape.
        function = _KEPT.setdefault("moments", moments)
        jax.block_until_ready(function(np.ones((size, size), np.float32)))


_KEPT: dict[str, Any] = {}


def forget_programs() -> None:
    """Let the next run compile each shape again, as a process of its own does."""
    _KEPT.clear()
