"""Batches of a custom loop: sliced from arrays, or read from an iterator."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from pipeline.backends.loading.loader import WINDOW_LIMIT_BYTES, Loader, make_loader
from pipeline.backends.loading.loader_stats import PrepareTime
from pipeline.backends.loading.window import LoaderSource, Window, put_inputs
from pipeline.core.errors import DataError
from pipeline.data.columns import Column, Split
from pipeline.data.order import Batches, SampleOrder
from pipeline.engine.step_checks import describe, narrow_dtype
from pipeline.training.parallel.state_sharing import DevicePlacement

ITERATOR_WINDOW_STEPS = 128
"""Largest number of an iterator's batches that are transferred together."""
HASHED_EXAMPLES = 64
"""Number of examples whose hash identifies the arrays, at equal distances."""


class TooFewBatchesError(DataError):
    """An iterator that ended before the last step."""


class BatchSource(ABC):
    """Source of a run's batches: one for each step."""

    spec: Any
    """A batch with `jax.ShapeDtypeStruct` as leaves. The loader's columns are the leaves, named by
    their number: "0", "1", ..."""
    steps_per_epoch: int | None = None
    """None if it isn't known."""

    @abstractmethod
    def open_loader(self, placement: DevicePlacement, start: int, stop: int) -> Loader:
        """Return the loader of steps `start + 1 .. stop`."""

    def describe(self) -> dict[str, Any]:
        """Return facts that identify the data, as JSON; empty for an iterator."""
        return {}

    def position(self, step: int) -> dict[str, Any]:
        """Return the position in the data after `step`, as JSON, for a resumed run."""
        return {}

    def list_rows(self, step: int) -> np.ndarray | None:
        """Return the rows of the data in the batch after `step` steps, int (batch,); None if they
        aren't known."""
        return None

    @abstractmethod
    def seek(self, step: int, position: Mapping[str, Any]) -> None:
        """Continue with the batch after `step`, from the saved result of `position(step)`. Raises
        DataError if the data isn't that of the saved run."""


def open_source(data: Any, batch_size: int | None, seed: int | None) -> BatchSource:
    """Return the batches of arrays, of a structured array, or of an iterable. Raises DataError for
    other data, ValueError for a batch size that is missing or not allowed."""
    arrays = _find_arrays(data)
    if arrays is None:
        if batch_size is not None:
            raise ValueError(
                f"batch_size = {batch_size}: must be None, since data is an iterable of batches"
            )
        return IteratorBatches(data)
    if batch_size is None:
        raise ValueError(
            "batch_size: is missing; must be the number of examples of a batch, since data is "
            "arrays of examples (pass iter(data) if the items of data are batches)"
        )
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size = {batch_size!r}: must be a whole number, at least 1")
    return ArrayBatches(arrays, batch_size, seed)


def _find_arrays(data: Any) -> Any:
    """Return a pytree of arrays of examples; None for an iterable. Raises DataError for others."""
    if isinstance(data, np.ndarray) and data.dtype.names is not None:
        return {name: data[name] for name in data.dtype.names}
    leaves = jax.tree.leaves(data, is_leaf=_is_iterable)
    if leaves and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves):
        return data
    if not hasattr(data, "__iter__") or isinstance(data, str | bytes | Mapping):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise DataError(
            f"data: is a {type(data).__name__} of {', '.join(kinds) or 'nothing'}; must be arrays "
            "of examples, a structured array, or an iterable of batches"
        )
    return None


def _is_iterable(node: Any) -> bool:
    """Return whether a node is iterable, but isn't a container that jax flattens."""
    return hasattr(node, "__iter__") and not isinstance(node, tuple | list | Mapping)


def _to_columns(names: Sequence[str], leaves: Sequence[Any]) -> list[np.ndarray]:
    """Return leaves as arrays of dtypes that jax supports. Raises DataError for other dtypes, and
    for a whole number that doesn't fit."""
    columns = []
    for name, leaf in zip(names, leaves, strict=True):
        array = np.asarray(leaf)
        if not any(jax.numpy.issubdtype(array.dtype, kind) for kind in (np.number, np.bool_)):
            raise DataError(f"{name}: has dtype {array.dtype}; must have numbers or booleans")
        try:
            columns.append(narrow_dtype(name, array))
        except ValueError as error:
            raise DataError(str(error)) from error
    return columns


def _name_leaves(tree: Any, root: str) -> list[str]:
    """Return names of the leaves for messages, such as `data['x']`."""
    return [f"{root}{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(tree)]


class ArrayBatches(BatchSource):
    """Batches of examples in an order that is a function of seed, epoch and position.

    The examples after the last whole batch of an epoch are dropped, since all batches have one
    shape. A `seed` of None keeps the order of the arrays. Raises DataError for arrays of different
    lengths, and if there are too few examples for a batch.
    """

    def __init__(self, arrays: Any, batch_size: int, seed: int | None) -> None:
        names = _name_leaves(arrays, "data")
        leaves = jax.tree.leaves(arrays)
        if not leaves:
            raise DataError("data: is a structured array without fields; must have examples")
        for name, leaf in zip(names, leaves, strict=True):
            if leaf.ndim == 0 or leaf.shape[:1] != leaves[0].shape[:1]:
                raise DataError(
                    f"{name}: has shape {tuple(leaf.shape)}, {names[0]} {tuple(leaves[0].shape)}; "
                    "all arrays must have the same examples along their first axis"
                )
        columns = _to_columns(names, leaves)
        self._split = Split({str(number): column for number, column in enumerate(columns)})
        samples = len(self._split)
        if samples < batch_size:
            raise DataError(f"data: has {samples} examples; must have a batch of {batch_size}")
        self._order = SampleOrder(
            samples=samples,
            batch_size=batch_size,
            drop_remainder=True,
            repeat=1,
            seed=0 if seed is None else seed,
            shuffle=seed is not None,
            buffer_size=None,
        )
        shapes = [jax.ShapeDtypeStruct((batch_size, *c.shape[1:]), c.dtype) for c in columns]
        self.spec = jax.tree.unflatten(jax.tree.structure(arrays), shapes)
        self.steps_per_epoch = self._order.steps_per_epoch

    def open_loader(self, placement: DevicePlacement, start: int, stop: int) -> Loader:
        """Return a loader whose data is on the device, or streamed if it doesn't fit."""
        return make_loader(LoaderSource(self._split, self._order, placement, stop))

    def describe(self) -> dict[str, Any]:
        """Return the number of examples, the seed of their order and the SHA-256 of some."""
        samples = len(self._split)
        rows = np.unique(np.linspace(0, samples - 1, HASHED_EXAMPLES).astype(np.int64))
        seed = self._order.seed if self._order.shuffle else None
        digest = _hash_rows(self._split.columns.values(), rows)
        return {"examples": samples, "seed": seed, "sha256": digest}

    def list_rows(self, step: int) -> np.ndarray:
        return self._order.batches(step, 1).rows[0]

    def seek(self, step: int, position: Mapping[str, Any]) -> None:
        """Do nothing: the order is a function of the step."""


@dataclass(frozen=True)
class _ReadWindow:
    """Batches that were read together."""

    start: int
    """Number of steps before the window."""
    columns: list[np.ndarray]
    """Arrays (steps, ...), one per leaf of a batch."""
    state: Any = None
    """The iterator's state before these batches; None if it has no state."""
    failure: Exception | None = None
    """Error that the iterator raised after these batches; None if it raised none."""
    seconds: float = 0.0
    """Seconds that the iterator took for these batches."""

    @property
    def steps(self) -> int:
        return len(self.columns[0]) if self.columns else 0


class IteratorBatches(BatchSource):
    """Batches of an iterable, in its order; all have the shapes of the first batch.

    A resumed run sets the state of an iterator with `get_state` and `set_state`, such as grain's.
    It reads any other iterator again from its start, and compares the last batch. Raises DataError
    for a first batch that isn't arrays of examples.
    """

    def __init__(self, data: Any) -> None:
        self._iterator: Iterator[Any] = iter(data)
        self._has_state = all(hasattr(self._iterator, name) for name in ("get_state", "set_state"))
        self._first_state = self._get_state()
        self._start_position: Mapping[str, Any] = {"state": self._first_state, "skip": 0}
        """Position before the first step of this process."""
        try:
            first = next(self._iterator)
        except StopIteration:
            raise DataError("data: the iterator has no batches") from None
        self._names = _name_leaves(first, "batch")
        columns = _to_columns(self._names, jax.tree.leaves(first))
        if not columns:
            raise DataError("data: the first batch has no arrays; must have examples")
        for name, column in zip(self._names, columns, strict=True):
            if column.ndim == 0:
                raise DataError(f"{name}: is a single number; must be an array of examples")
        self._first_batch: list[np.ndarray] | None = columns
        """None after `read` has returned the first batch, or if it isn't needed."""
        shapes = [jax.ShapeDtypeStruct(column.shape, column.dtype) for column in columns]
        self.spec = jax.tree.unflatten(jax.tree.structure(first), shapes)
        self._windows: IteratorWindows | None = None
        self._start = 0
        """Number of steps before those of this process."""

    def open_loader(self, placement: DevicePlacement, start: int, stop: int) -> Loader:
        """Return a loader that reads one window ahead, and no batch after `stop`."""
        self._start = start
        self._windows = IteratorWindows(self, placement, start, stop)
        return Loader(self._windows, None)

    def position(self, step: int) -> dict[str, Any]:
        """Return the iterator's `state` and the number of batches to `skip` after it; without a
        state, the number to `skip` from the start and the `sha256` of the last of them."""
        assert self._windows is not None, "the loader is open"
        if step == self._start:
            return dict(self._start_position)
        window = self._windows.find_window(step)
        if self._has_state:
            return {"state": window.state, "skip": step - window.start}
        return {"skip": step, "sha256": _hash_rows(window.columns, step - 1 - window.start)}

    def seek(self, step: int, position: Mapping[str, Any]) -> None:
        """Set the iterator's state, and skip batches up to `step`."""
        self._start_position = position
        skip = position.get("skip", step)
        state = position.get("state")
        if state is not None:
            if not self._has_state:
                raise DataError(
                    "data: has no get_state and set_state; must be an iterator with both, as in "
                    "the saved run"
                )
            decoded = base64.b64decode(state["base64"]) if "base64" in state else state["json"]
            self._iterator.set_state(decoded)  # type: ignore[attr-defined]
            self._first_batch = None
        last: list[np.ndarray] | None = None
        for number in range(step - skip + 1, step + 1):
            try:
                last = self.read(number)
            except StopIteration:
                raise DataError(
                    f"data: ends before step {step}, at which the saved run continues; must be the "
                    "saved run's data from its start"
                ) from None
        digest = position.get("sha256")
        if digest is not None and last is not None and _hash_rows(last, ...) != digest:
            raise DataError(
                f"data: batch {step} differs from the saved run's; must be the same iterator from "
                "its start, or one with get_state and set_state"
            )

    def read(self, number: int) -> list[np.ndarray]:
        """Return the leaves of the next batch; messages have `number`. Raises StopIteration, and
        DataError for another structure, shape or dtype than the first batch has."""
        if self._first_batch is not None:
            columns = self._first_batch
            self._first_batch = None
            return columns
        batch = next(self._iterator)
        structure: Any = jax.tree.structure(batch)
        first_structure: Any = jax.tree.structure(self.spec)
        if structure != first_structure:
            raise DataError(f"data: batch {number} is {structure}, the first is {first_structure}")
        columns = _to_columns(self._names, jax.tree.leaves(batch))
        specs = jax.tree.leaves(self.spec)
        for name, column, spec in zip(self._names, columns, specs, strict=True):
            if describe(column) != describe(spec):
                raise DataError(
                    f"data: {name} of batch {number} is {describe(column)}, of the first "
                    f"{describe(spec)}; must be the same: drop or pad a short batch"
                )
        return columns

    def read_state(self) -> Any:
        """Return the iterator's state before the next batch as JSON; None if it has no state."""
        return self._get_state() if self._first_batch is None else self._first_state

    def _get_state(self) -> Any:
        return _encode_state(self._iterator.get_state()) if self._has_state else None  # type: ignore[attr-defined]


class IteratorWindows:
    """Windows of an iterator's batches; the next one is read on another thread."""

    kind: Literal["resident", "stream"] = "stream"

    def __init__(
        self, source: IteratorBatches, placement: DevicePlacement, start: int, stop: int
    ) -> None:
        self._source = source
        self._placement = placement
        self._stop = stop
        shapes = jax.tree.leaves(source.spec)
        batch_bytes = max(1, sum(shape.size * shape.dtype.itemsize for shape in shapes))
        self._steps = max(1, min(ITERATOR_WINDOW_STEPS, WINDOW_LIMIT_BYTES // batch_bytes))
        self.device_bytes = 2 * self._steps * batch_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[_ReadWindow]] | None = None
        """Start of the next window, and the future of its batches."""
        self._previous: list[_ReadWindow] = []
        """The last two windows."""

    def count_ready_steps(self, step: int) -> int:
        """Return the number of steps of the next window if it has been read, else 0."""
        future = None if self._next is None else self._next[1]
        return future.result().steps if future is not None and future.done() else 0

    def take(self, step: int) -> tuple[Window, PrepareTime]:
        """Return the window from `step`. Raises DataError at the end, and the iterator's errors."""
        if self._next is None:
            self._next = step, self._thread.submit(self._read, step)
        start, future = self._next
        assert start == step, "batches of an iterator are read in their order"
        window = future.result()
        if window.failure is not None and not window.steps:
            raise window.failure
        end = step + window.steps
        self._next = None
        if window.failure is not None:  # The next call raises it.
            self._next = end, Future()
            self._next[1].set_result(_ReadWindow(end, [], failure=window.failure))
        elif end < self._stop:
            self._next = end, self._thread.submit(self._read, end)
        self._previous = [*self._previous[-1:], window]
        prepared = PrepareTime({"iterator": window.seconds})
        return Window(step, end, self._transfer(window)), prepared

    def find_window(self, step: int) -> _ReadWindow:
        """Return the window with the batch of `step`, counted from 1, which is one of the last
        two that were taken."""
        [window] = (w for w in self._previous if w.start < step <= w.start + w.steps)
        return window

    def close(self) -> None:
        """Stop reading ahead."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, start: int) -> _ReadWindow:
        """Return the batches after `start` steps, with the error that ended them early."""
        count = min(self._steps, self._stop - start)
        batches = list[list[np.ndarray]]()
        state: Any = None
        failure: Exception | None = None
        started_at = time.perf_counter()
        try:
            state = self._source.read_state()
            for number in range(start + 1, start + count + 1):
                batches.append(self._source.read(number))
        except StopIteration:
            text = f"data: ended after {start + len(batches)} of {self._stop} batches"
            failure = TooFewBatchesError(text)
        except Exception as error:  # of the user's iterator; `take` raises it
            failure = error
        seconds = time.perf_counter() - started_at
        columns = [np.stack(leaves) for leaves in zip(*batches, strict=True)]
        return _ReadWindow(start, columns, state, failure, seconds)

    def _transfer(self, window: _ReadWindow) -> Any:
        """Return the inputs of a window on the device, padded to the length of all windows."""
        columns = {}
        for number, column in enumerate(window.columns):
            if window.steps < self._steps:
                padding = np.zeros((self._steps - window.steps, *column.shape[1:]), column.dtype)
                column = np.concatenate([column, padding])
            columns[str(number)] = self._placement.put_batches(column, column.shape[1])
        # A custom step reads only columns. Numbers of samples, epochs and counts have any value.
        numbers = np.zeros(self._steps, np.int32)
        batches = Batches(numbers[:, None], numbers, numbers + 1)
        return put_inputs(columns, batches, 0, self._placement, resident=False)


def _hash_rows(columns: Iterable[Column], rows: Any) -> str:
    """Return the SHA-256 of some rows of all columns; `rows` may be `...` for all rows."""
    digest = hashlib.sha256()
    for column in columns:
        digest.update(np.ascontiguousarray(column[rows]).tobytes())
    return digest.hexdigest()


def _encode_state(state: Any) -> Any:
    """Return an iterator's state as JSON. Raises DataError if JSON can't hold it."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    try:
        return {"json": json.loads(json.dumps(state))}
    except (TypeError, ValueError) as error:
        raise DataError(
            f"data: get_state returned a {type(state).__name__} that JSON can't hold ({error}); "
            "must return bytes, numbers, text, lists and dictionaries"
        ) from error
