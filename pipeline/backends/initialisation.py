"""Initialisation on the CPU: few small programs that draw all arrays of a state, piece by piece.

One program for all arrays takes longer to compile than a step of training, and keeps three times
their memory. Here the random bits of any array, 1,024 values a row, come from one program, and each
distribution has one more (`find_draws`), whatever the number of arrays, their shapes and factors.
Values of a distribution depend on 23 of their bits alone, so large states look them up in a table.
The bits of all arrays are those that the one program gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.backends.find_draws import (
    BITS,
    CONSTANT,
    Draw,
    Fill,
    Formula,
    apply_formula,
    constant_of,
    find_draws,
)
from pipeline.data.random import threefry_2x32
from pipeline.training.parallel.placement import DevicePlacement
from pipeline.training.state import TrainState

ROWS, COLUMNS = 256, 1024
"""Values that a call draws: 1 MB, too many for the cost of a call to count, few enough for a cache
and for the smallest network not to wait for them."""

UNOPTIMIZED: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Options of programs with formulas. Optimised ones would contract products and sums, which changes
last bits of the weights of all runs before."""

KEPT_BITS = 23
"""Bits of a float32 between 1 and 2; draws of jax are made of such a number."""
TABLE_VALUES = 1 << KEPT_BITS
WORTH_A_TABLE = 3 * TABLE_VALUES
"""Values of one distribution from which on a table of all of them is faster."""

PLACED_AT_ONCE = 1 << 24
"""Values that are drawn before they are put on the devices."""

THREADS = 2

Compile = Callable[..., Any]
"""(function, arguments, options) -> the compiled function."""
Program = Callable[..., Any]


def compile_initialisation(
    init: Callable[[Array], TrainState],
    seed: np.ndarray,
    placement: DevicePlacement,
    compile_: Compile,
    on_devices: Callable[..., Any],
) -> Callable[[Array], TrainState]:
    """Compile `init(seed)` into a function with the same results, bit for bit.

    `compile_` compiles a function for one device of this process. Results that are not drawn value
    by value are computed by a program of their own, which every device runs: `on_devices` compiles
    it.
    """
    traced, state = jax.make_jaxpr(init, return_shape=True)(seed)
    found = find_draws(traced)
    rest = [position for position, one in enumerate(found) if one is None]
    others = on_devices(partial(_chosen_leaves, init, rest)) if rest else None
    by_formula: dict[Formula, dict[int, Draw]] = {}
    for position, one in enumerate(found):
        if isinstance(one, Draw):
            by_formula.setdefault(one.formula, {})[position] = one
    samplers = {
        formula: _sampler(
            formula, sum(draw.size for draw in draws.values()), compile_, placement.device
        )
        for formula, draws in by_formula.items()
    }

    def initialise(words: Array) -> TrainState:
        leaves: list[Any] = [None] * len(found)
        if others is not None:
            for position, leaf in zip(rest, others(words), strict=True):
                leaves[position] = leaf
        own_words = np.asarray(words)
        for formula, draws in by_formula.items():
            sampler = samplers[formula]()
            for portion in _portions(draws):
                drawn = _draw(list(portion.values()), sampler, own_words)
                for position, draw in portion.items():
                    leaves[position] = placement.put(drawn[draw])
                # Or the host's arrays of all portions would be there at once.
                jax.block_until_ready([leaves[position] for position in portion])
        fills = [(repr(one), n, one) for n, one in enumerate(found) if isinstance(one, Fill)]
        for _, equal in groupby(sorted(fills, key=itemgetter(0)), itemgetter(0)):
            (_, _, fill), *_ = same = list(equal)
            source = np.full(fill.shape, fill.value)
            for _, position, _ in same:
                leaves[position] = placement.put(source)
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    return initialise


def _sampler(
    formula: Formula, total: int, compile_: Compile, device: jax.Device
) -> Callable[[], Program]:
    """Compile what draws rows of a distribution.

    The result makes a function (keys uint32 (rows, 2), first counters uint32 (rows,)) -> float32
    (rows, columns), without factors.
    """
    shape = ROWS, COLUMNS
    keys = np.zeros((ROWS, 2), np.uint32), np.zeros(ROWS, np.uint32)
    bits = np.zeros(shape, np.uint32)
    apply = compile_(partial(apply_formula, formula), (bits,), UNOPTIMIZED)
    if total <= WORTH_A_TABLE or not _keeps_few_bits(formula):
        random = compile_(random_bits, keys, None)
        return lambda: lambda *of_rows: apply(random(*of_rows))
    table = np.zeros(TABLE_VALUES, np.float32)
    look_up = compile_(_look_up, (table, *keys), None)
    # On the device once, or every call would copy it there.
    return lambda: partial(look_up, jax.device_put(_table(apply), device))


def random_bits(keys: Any, first: Any) -> Any:
    """Random bits uint32 (rows, columns): those that jax draws for a key at counters from `first`.

    `keys` is (rows, 2), `first` (rows,). As `jax.random.bits` of arrays of fewer than 2**32 values,
    with `jax_threefry_partitionable`; without its loop, which would write every round to memory.
    """
    counters = first[:, None] + lax.iota(jnp.uint32, COLUMNS)
    high, low = threefry_2x32((keys[:, :1], keys[:, 1:]), (jnp.zeros_like(counters), counters))
    return high ^ low


def _look_up(table: Any, keys: Any, first: Any) -> Any:
    places = random_bits(keys, first) >> (32 - KEPT_BITS)
    return table.at[places].get(mode="promise_in_bounds")


def _table(apply: Program) -> np.ndarray:
    """Values of a distribution by the bits that decide them."""
    values = np.empty((TABLE_VALUES // (ROWS * COLUMNS), ROWS, COLUMNS), np.float32)
    bits = np.arange(TABLE_VALUES, dtype=np.uint32) << (32 - KEPT_BITS)
    for own, chunk in zip(values, bits.reshape(values.shape), strict=True):
        own[:] = apply(chunk)
    return values.ravel()


def _keeps_few_bits(formula: Formula) -> bool:
    """Whether the bits are used without the lowest ones alone."""
    if formula[0] == BITS:
        return False
    if formula[0] == CONSTANT:
        return True
    if formula[0] == "shift_right_logical" and formula[2][0] == BITS:
        count = formula[3]
        return count[0] == CONSTANT and int(constant_of(count)) == 32 - KEPT_BITS
    return all(map(_keeps_few_bits, formula[2:]))


def _chosen_leaves(
    init: Callable[[Array], TrainState], chosen: Sequence[int], words: Array
) -> list[Array]:
    leaves = jax.tree.leaves(init(words))
    return [leaves[position] for position in chosen]


def _portions(draws: Mapping[int, Draw]) -> Iterator[dict[int, Draw]]:
    """Divide arrays into portions of about `PLACED_AT_ONCE` values."""
    portion: dict[int, Draw] = {}
    for position, draw in draws.items():
        portion[position] = draw
        if sum(one.size for one in portion.values()) >= PLACED_AT_ONCE:
            yield portion
            portion = {}
    if portion:
        yield portion


def _draw(draws: Sequence[Draw], sampler: Program, words: np.ndarray) -> dict[Draw, np.ndarray]:
    """Draw arrays of one distribution in calls that may draw rows of several."""
    arrays = {draw: np.empty(draw.shape, np.float32) for draw in draws}
    counts = [-(-array.size // COLUMNS) for array in arrays.values()]
    ends = np.cumsum(counts)
    rows = int(ends[-1])
    owner = np.repeat(np.arange(len(counts)), counts)
    in_own = np.arange(rows) - np.repeat(ends - counts, counts)
    keys = np.array([key_words(words, draw.folds) for draw in arrays], np.uint32)
    flat = [array.reshape(-1) for array in arrays.values()]
    scales = [np.float32(draw.scale) for draw in arrays]

    def call(first: int) -> None:
        chunk = np.arange(first, first + ROWS).clip(max=rows - 1)
        counters = (in_own[chunk] * COLUMNS).astype(np.uint32)
        values = np.asarray(sampler(keys[owner[chunk]], counters)).reshape(-1)
        last = min(first + ROWS, rows)
        for own in range(owner[first], owner[last - 1] + 1):
            start, stop = max(first, ends[own] - counts[own]), min(last, ends[own])
            into = flat[own][in_own[start] * COLUMNS : (in_own[stop - 1] + 1) * COLUMNS]
            begin = (start - first) * COLUMNS
            np.multiply(values[begin : begin + into.size], scales[own], out=into)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="initialisation") as threads:
        list(threads.map(call, range(0, rows, ROWS)))
    return arrays


def key_words(seed: np.ndarray, folds: Sequence[int]) -> np.ndarray:
    """The words of a key: that of the seed, with numbers folded in as `jax.random.fold_in` does."""
    key = seed.astype(np.uint32)
    for number in folds:
        counter = np.zeros(1, np.uint32), np.array([number], np.uint32)
        key = np.concatenate(threefry_2x32((key[:1], key[1:]), counter))
    return key
