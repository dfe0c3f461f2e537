"""Initialisation on the CPU: a few small programs that draw all arrays of a state by rows.

One program for all arrays would take longer to compile than a step of training, and three times the
memory of the arrays. Here one program draws random bits for all arrays, in rows of 1,024 values.
Each distribution (a formula of `find_draws`) has one more program, which computes values from bits,
whatever the number, shapes and scales of its arrays. A value depends on only 23 of its bits, so
values of large states come from a table. The arrays have the bits that one program would compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Sharding

from pipeline.backends.find_draws import (
    BITS,
    CONSTANT,
    Draw,
    Fill,
    Formula,
    apply_formula,
    find_draws,
    read_constant,
)
from pipeline.core.host.platforms import get_platform
from pipeline.data.random import encrypt_threefry
from pipeline.training.parallel.state_sharing import DevicePlacement
from pipeline.training.state import TrainState

ROWS = 256
COLUMNS = 1024
"""Shape of the values that a call draws: 1 MB, so that a call is cheap for small networks too."""
UNOPTIMIZED: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Options of programs with formulas. Optimised programs would join products and sums, and change
the last bits of weights."""
VALUE_BITS = 23
"""Number of random bits that a value depends on: the mantissa of the float32 that jax draws."""
TABLE_VALUES = 1 << VALUE_BITS
TABLE_WORTH_VALUES = 3 * TABLE_VALUES
"""Number of drawn values above which a table of the distribution is faster."""
PORTION_VALUES = 1 << 24
"""Number of values that are drawn before they are put on the devices."""
THREADS = 2
"""Number of threads that call the programs of a distribution."""
Compile = Callable[..., Any]
"""Function from a function, its arguments and options to the compiled function."""
Program = Callable[..., Any]


def compile_initialisation(
    init: Callable[[Array], TrainState],
    seed: np.ndarray,
    placement: DevicePlacement,
    compile_: Compile,
    compile_on_devices: Callable[..., Any],
    shardings: Sequence[Sharding] | None = None,
) -> Callable[[Array], TrainState]:
    """Compile `init(seed)` into a function with the same results, bit for bit.

    `compile_` compiles a function for one device of this process. `compile_on_devices` compiles a
    program for all devices: the program of arrays that `find_draws` doesn't describe. `shardings`
    are of the state's arrays; None if every device has all arrays.
    """
    traced, state = jax.make_jaxpr(init, return_shape=True)(seed)
    arrays = find_draws(traced)
    undrawn = [position for position, array in enumerate(arrays) if array is None]
    compute_undrawn = None
    if undrawn:
        compute_undrawn = compile_on_devices(partial(_select_leaves, init, undrawn))
    by_formula: dict[Formula, dict[int, Draw]] = {}
    # The keys are texts, since the texts of 0.0 and -0.0 differ.
    fills: dict[str, tuple[Fill, list[int]]] = {}
    for position, array in enumerate(arrays):
        if isinstance(array, Draw):
            by_formula.setdefault(array.formula, {})[position] = array
        elif isinstance(array, Fill):
            _, positions = fills.setdefault(repr(array), (array, []))
            positions.append(position)
    samplers = {}
    for formula, draws in by_formula.items():
        num_values = sum(draw.size for draw in draws.values())
        samplers[formula] = _compile_sampler(formula, num_values, compile_, placement.device)

    def put(position: int, array: Any) -> Any:
        return placement.put(array, None if shardings is None else shardings[position])

    def initialise(words: Array) -> TrainState:
        leaves: list[Any] = [None] * len(arrays)
        if compute_undrawn is not None:
            for position, leaf in zip(undrawn, compute_undrawn(words), strict=True):
                leaves[position] = leaf if shardings is None else put(position, np.asarray(leaf))
        host_words = np.asarray(words)
        for formula, draws in by_formula.items():
            sampler = samplers[formula]()
            for portion in _split_portions(draws):
                values = _draw_arrays(list(portion.values()), sampler, host_words)
                for position, draw in portion.items():
                    leaves[position] = put(position, values[draw])
                # Wait, so that the host's memory never has the arrays of all portions.
                jax.block_until_ready([leaves[position] for position in portion])
        for fill, positions in fills.values():
            constant = np.full(fill.shape, fill.value)
            for position in positions:
                leaves[position] = put(position, constant)
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    return initialise


def _compile_sampler(
    formula: Formula, num_values: int, compile_: Compile, device: jax.Device
) -> Callable[[], Program]:
    """Compile the program that draws rows of a distribution.

    Returns a function that makes a sampler: a function from keys, uint32 (rows, 2), and the first
    counter of each row, uint32 (rows,), to values, float32 (rows, columns), that aren't multiplied
    by `Draw.scale` yet.
    """
    keys = np.zeros((ROWS, 2), np.uint32), np.zeros(ROWS, np.uint32)
    bits = np.zeros((ROWS, COLUMNS), np.uint32)
    apply = compile_(partial(apply_formula, formula), (bits,), UNOPTIMIZED)
    if num_values <= TABLE_WORTH_VALUES or not _reads_high_bits_only(formula):
        random = compile_(draw_bits, keys, None)
        return lambda: lambda keys, first: apply(random(keys, first))
    table = np.zeros(TABLE_VALUES, np.float32)
    look_up = compile_(_look_up, (table, *keys), None)
    # The sampler's table is put on the device once, not by every call.
    return lambda: partial(look_up, jax.device_put(_make_table(apply), device))


def initialise_state(
    init: Callable[[Any], TrainState], seed: np.ndarray, placement: DevicePlacement
) -> TrainState:
    """Return `init(seed)` with the bits of a run, whose initialisation is compiled by this module
    on platforms that optimize slowly."""
    if not get_platform(placement.device.platform).optimizes_slowly:
        return jax.jit(init)(seed)

    def compile_(function: Callable[..., Any], args: Any, options: Any) -> Any:
        return jax.jit(function).lower(*args).compile(compiler_options=options)

    def compile_undrawn(function: Callable[..., Any]) -> Any:
        return compile_(function, (seed,), UNOPTIMIZED)

    initialise = compile_initialisation(init, seed, placement, compile_, compile_undrawn)
    return initialise(jnp.asarray(seed))


def draw_bits(keys: Any, first: Any) -> Any:
    """Return random bits uint32 (rows, columns) of keys (rows, 2), counters from `first` (rows,).

    They equal `jax.random.bits` for fewer than 2**32 values with
    `jax_threefry_partitionable`. JAX's loop is slower, since it writes every round to memory.
    """
    counters = first[:, None] + lax.iota(jnp.uint32, COLUMNS)
    high, low = encrypt_threefry((keys[:, :1], keys[:, 1:]), (jnp.zeros_like(counters), counters))
    return high ^ low


def _look_up(table: Any, keys: Any, first: Any) -> Any:
    indices = draw_bits(keys, first) >> (32 - VALUE_BITS)
    return table.at[indices].get(mode="promise_in_bounds")


def _make_table(apply: Program) -> np.ndarray:
    """Return the values of a distribution by the highest bits, float32 (TABLE_VALUES,)."""
    values = np.empty((TABLE_VALUES // (ROWS * COLUMNS), ROWS, COLUMNS), np.float32)
    bits = np.arange(TABLE_VALUES, dtype=np.uint32) << (32 - VALUE_BITS)
    for rows, chunk in zip(values, bits.reshape(values.shape), strict=True):
        rows[:] = apply(chunk)
    return values.ravel()


def _reads_high_bits_only(formula: Formula) -> bool:
    """Return whether the formula reads only the highest `VALUE_BITS` bits."""
    if formula[0] == BITS:
        return False
    if formula[0] == CONSTANT:
        return True
    if formula[0] == "shift_right_logical" and formula[2][0] == BITS:
        count = formula[3]
        return count[0] == CONSTANT and int(read_constant(count)) == 32 - VALUE_BITS
    return all(map(_reads_high_bits_only, formula[2:]))


def _select_leaves(
    init: Callable[[Array], TrainState], positions: Sequence[int], words: Array
) -> list[Array]:
    leaves = jax.tree.leaves(init(words))
    return [leaves[position] for position in positions]


def _split_portions(draws: Mapping[int, Draw]) -> Iterator[dict[int, Draw]]:
    """Divide arrays into portions of about `PORTION_VALUES` values."""
    portion: dict[int, Draw] = {}
    for position, draw in draws.items():
        portion[position] = draw
        if sum(draw.size for draw in portion.values()) >= PORTION_VALUES:
            yield portion
            portion = {}
    if portion:
        yield portion


def _draw_arrays(
    draws: Sequence[Draw], sampler: Program, words: np.ndarray
) -> dict[Draw, np.ndarray]:
    """Draw arrays of a distribution; a call of `sampler` may draw rows of several arrays."""
    arrays = {draw: np.empty(draw.shape, np.float32) for draw in draws}
    counts = [-(-array.size // COLUMNS) for array in arrays.values()]
    ends = np.cumsum(counts)
    rows = int(ends[-1])
    owners = np.repeat(np.arange(len(counts)), counts)
    row_in_array = np.arange(rows) - np.repeat(ends - counts, counts)
    keys = np.array([fold_key_words(words, draw.folds) for draw in arrays], np.uint32)
    flat = [array.reshape(-1) for array in arrays.values()]
    scales = [np.float32(draw.scale) for draw in arrays]

    def draw_rows(first: int) -> None:
        chunk = np.arange(first, first + ROWS).clip(max=rows - 1)
        counters = (row_in_array[chunk] * COLUMNS).astype(np.uint32)
        values = np.asarray(sampler(keys[owners[chunk]], counters)).reshape(-1)
        last = min(first + ROWS, rows)
        for owner in range(owners[first], owners[last - 1] + 1):
            start = max(first, ends[owner] - counts[owner])
            stop = min(last, ends[owner])
            out_begin = row_in_array[start] * COLUMNS
            out_end = (row_in_array[stop - 1] + 1) * COLUMNS
            out = flat[owner][out_begin:out_end]
            begin = (start - first) * COLUMNS
            np.multiply(values[begin : begin + out.size], scales[owner], out=out)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="initialisation") as threads:
        list(threads.map(draw_rows, range(0, rows, ROWS)))
    return arrays


def fold_key_words(seed: np.ndarray, folds: Sequence[int]) -> np.ndarray:
    """Return the seed's key with numbers folded in, as `jax.random.fold_in` does: uint32 (2,)."""
    key = seed.astype(np.uint32)
    for number in folds:
        counter = np.zeros(1, np.uint32), np.array([number], np.uint32)
        key = np.concatenate(encrypt_threefry((key[:1], key[1:]), counter))
    return key
