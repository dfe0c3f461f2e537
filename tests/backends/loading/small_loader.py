"""Shared by tests of loaders: a small split, its order, columns that record their reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.backends.loading import loader, window
from pipeline.backends.loading.loader import Loader, make_loader
from pipeline.backends.loading.window import LoaderSource
from pipeline.core.errors import DataError
from pipeline.data.columns import Split
from pipeline.data.order import SampleOrder
from pipeline.training.parallel.state_sharing import DevicePlacement

SAMPLES, BATCH = 11, 3
DEVICE = jax.devices("cpu")[0]


def make_order(**changed: Any) -> SampleOrder:
    settings = {
        "seed": 2**40 + 5,
        "samples": SAMPLES,
        "batch_size": BATCH,
        "shuffle": True,
        "buffer_size": None,
        "drop_remainder": False,
        "repeat": 1,
    }
    return SampleOrder(**{**settings, **changed})


def make_split(samples: int = SAMPLES) -> Split:
    """Images that identify their sample: 4 bytes and a 4-byte label each."""
    images = np.arange(4 * samples, dtype=np.uint8).reshape(samples, 2, 2, 1)
    return Split({"image": images, "label": np.arange(samples, dtype=np.int32)})


def make(
    kind: Any,
    split: Split | None = None,
    order: SampleOrder | None = None,
    notify: Any = None,
    **options: Any,
) -> Loader:
    placement = DevicePlacement((DEVICE,))
    source = LoaderSource(split or make_split(), order or make_order(), placement, **options)
    return make_loader(source, kind, notify)


def set_clock(monkeypatch: pytest.MonkeyPatch, read_s: Callable[[], float]) -> None:
    """Let loaders read the seconds from a function."""
    for module in (loader, window):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=read_s))


def wait_until(true: Callable[[], bool]) -> None:
    """Give other threads time until it is so; fail after a long while."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


class CountedColumn:
    """A column that is no array, read many samples at a time; keeps which."""

    def __init__(self, values: np.ndarray, bad: int | None = None) -> None:
        self.values, self._bad = values, bad
        self.shape, self.dtype = values.shape, values.dtype
        self.reads: list[int] = []

    def __getitem__(self, indices: Any) -> np.ndarray:
        read = np.arange(len(self.values))[indices].tolist()
        self.reads += read
        if self._bad is not None and self._bad in read:
            raise DataError(f"sample {self._bad} can't be decoded")
        return self.values[indices]


class LazyNumbers(CountedColumn):
    """A lazy column; `on_read` is called with each sample's index in the thread that reads it."""

    def __init__(
        self, values: np.ndarray, on_read: Callable[[int], object] = lambda _: None
    ) -> None:
        super().__init__(values)
        self._on_read = on_read
        self.threads: set[int] = set()

    def sample(self, index: int) -> np.ndarray:
        self.threads.add(threading.get_ident())
        self.reads.append(index)
        self._on_read(index)
        return self.values[index]

    def sample_name(self, index: int) -> str:
        return f"{index}.png"


class HandClock:
    """Seconds that pass when a test says so; `requested` is set when the main thread reads them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.requested = threading.Event()

    def __call__(self) -> float:
        now = self.now
        if threading.current_thread() is threading.main_thread():
            self.requested.set()
        return now

    def advance(self, seconds: float) -> None:
        self.now += seconds
