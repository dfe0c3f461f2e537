"""The cheapest choice of a state for each variable of a sum of tables, under a bound on memory.

Variables are eliminated one after the other, those with the smallest tables first (OptCNN's node
and edge elimination; Viterbi on a chain). To eliminate a variable, its tables are added, and for
each state of its neighbours its best state is chosen. Parallel branches between two blocks become
one table by the addition. If memory is bounded, a table has, for each state, several points of time
and memory.

Sums of equal tables are computed once, so repeated blocks cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Scope = tuple[int, ...]
MAX_SLOPES = 16
"""Number of slopes that `find_fastest` tries."""
TIE = 1e-9
"""Costs with a smaller relative difference are equal; then the smaller memory is better."""


@dataclass(eq=False)
class Table:
    """Time and memory for each state of some variables: arrays of shape (states..., points).

    The points of a state are sorted by ascending memory and descending time. Missing points have
    infinite time. Tables are compared by identity: equal blocks share one table.
    """

    time: Floats
    memory: Floats
    origin: tuple[NDArray[Any], NDArray[Any]] | None = None
    """Where each point comes from: the indices of the two points that were added, or the state of
    the variable that was eliminated and the index of that state's point."""

    @classmethod
    def from_arrays(cls, time: Any, memory: Any = None) -> Table:
        """Return a table with one point for each state, whose memory is 0 by default."""
        times = np.asarray(time, np.float64)
        memories = np.zeros_like(times) if memory is None else np.asarray(memory, np.float64)
        return cls(times[..., None], memories[..., None])


@dataclass(frozen=True)
class Factor:
    """A table over the variables of `scope`, which are ascending."""

    scope: Scope
    table: Table
    parts: tuple[Factor, ...] = ()
    """The two factors that were added, or the one from which a variable was eliminated, or none."""
    eliminated: int | None = None
    """The variable that was eliminated, if one was."""


@dataclass(frozen=True)
class Choice:
    """A state for each variable, with their total time and memory."""

    states: Mapping[int, int]
    time: float
    memory: float


@dataclass
class Eliminator:
    """Adds tables and eliminates variables. Results are cached for equal tables.

    The cost of a point is time + `slope` x memory, or memory if the slope is infinite. A state has
    at most `points` points: the cheapest if 1, else also those with the least memory and the least
    time. Points with more memory than `most_memory` are dropped, and so are points whose cost is
    more than `gap` above the least cost of their state: no best choice has them (`find_fastest`).
    """

    points: int = 1
    most_memory: float = np.inf
    slope: float = 0.0
    gap: float = np.inf
    _cache: dict[Any, Table] = field(default_factory=dict)

    def find_best(self, factors: Sequence[Factor], sizes: Sequence[int]) -> Choice | None:
        """Return the fastest choice that fits, the first of equal ones; None if none fits."""
        pending: dict[int, Factor] = dict(enumerate(factors))
        # Every variable gets a table of zeros, in case that no factor has it.
        for variable, size in enumerate(sizes):
            zeros = self._cache.setdefault(("zeros", size), Table.from_arrays(np.zeros(size)))
            pending[len(pending)] = Factor((variable,), zeros)
        adjacent: dict[int, set[int]] = {variable: {variable} for variable in range(len(sizes))}
        for factor in factors:
            for variable in factor.scope:
                adjacent[variable].update(factor.scope)
        table_sizes = {v: prod(sizes[n] for n in neighbours) for v, neighbours in adjacent.items()}
        number = len(pending)
        while table_sizes:
            variable = min(table_sizes, key=lambda v: (table_sizes[v], len(adjacent[v]), v))
            keys = [key for key, factor in pending.items() if variable in factor.scope]
            total = self._add_all([pending.pop(key) for key in keys])
            pending[number] = self._eliminate(total, variable)
            number += 1
            del table_sizes[variable]
            neighbours = adjacent.pop(variable) - {variable}
            for other in neighbours:
                adjacent[other] = (adjacent[other] | neighbours) - {variable}
                table_sizes[other] = prod(sizes[n] for n in adjacent[other])
        total = self._add_all(list(pending.values()))
        point = int(np.argmin(total.table.time))
        time = float(total.table.time[point])
        if np.isinf(time):
            return None
        return Choice(_trace_states(total, point), time, float(total.table.memory[point]))

    def _add_all(self, factors: Sequence[Factor]) -> Factor:
        """Add tables, those with small scopes first and equal scopes one after the other."""
        ordered = sorted(factors, key=lambda factor: (len(factor.scope), factor.scope))
        total = ordered[0]
        for factor in ordered[1:]:
            total = self._add(total, factor)
        return total

    def _add(self, left: Factor, right: Factor) -> Factor:
        scope = tuple(sorted({*left.scope, *right.scope}))
        left_new = tuple(axis for axis, other in enumerate(scope) if other not in left.scope)
        right_new = tuple(axis for axis, other in enumerate(scope) if other not in right.scope)
        key = ("add", left.table, right.table, left_new, right_new)

        def add_points(left_values: Floats, right_values: Floats) -> Floats:
            """Return the sums of all pairs of points, (states..., pairs)."""
            left_points = np.expand_dims(left_values, left_new)[..., :, None]
            right_points = np.expand_dims(right_values, right_new)[..., None, :]
            sums = left_points + right_points
            return sums.reshape(*sums.shape[:-2], -1)

        if key not in self._cache:
            self._cache[key] = self._thin(
                add_points(left.table.time, right.table.time),
                add_points(left.table.memory, right.table.memory),
                points=right.table.time.shape[-1],
            )
        return Factor(scope, self._cache[key], (left, right))

    def _eliminate(self, factor: Factor, variable: int) -> Factor:
        axis = factor.scope.index(variable)
        scope = tuple(other for other in factor.scope if other != variable)
        key = ("eliminate", factor.table, axis)

        def join_states(values: Floats) -> Floats:
            """Return the points of all states of the variable along the last axis."""
            moved = np.moveaxis(values, axis, -2)
            return moved.reshape(*moved.shape[:-2], -1)

        if key not in self._cache:
            self._cache[key] = self._thin(
                join_states(factor.table.time),
                join_states(factor.table.memory),
                points=factor.table.time.shape[-1],
            )
        return Factor(scope, self._cache[key], (factor,), variable)

    def _compute_cost(self, time: Floats, memory: Floats) -> Floats:
        """Return the cost of each point; infinite for missing points."""
        if self.slope == 0:
            return time
        if self.slope == np.inf:
            return np.where(np.isfinite(time), memory, np.inf)
        return np.where(np.isfinite(time), time + self.slope * memory, np.inf)

    def _thin(self, time: Floats, memory: Floats, points: int) -> Table:
        """Drop points of each state. The second index of a point's origin is below `points`."""
        time = np.where(memory <= self.most_memory, time, np.inf)
        if self.points == 1:
            cost = self._compute_cost(time, memory)
            cheapest = cost.min(axis=-1, keepdims=True) * (1 + TIE)
            order = np.argmin(np.where(cost <= cheapest, memory, np.inf), axis=-1)[..., None]
            time = np.take_along_axis(time, order, -1)
            memory = np.take_along_axis(memory, order, -1)
            return Table(time, memory, (order // points, order % points))
        # Sort by memory, then time. A point is dominated unless it is faster than all before it.
        order = np.lexsort((time, memory), axis=-1)
        time = np.take_along_axis(time, order, -1)
        memory = np.take_along_axis(memory, order, -1)
        least_time = np.minimum.accumulate(time, axis=-1)
        undominated = np.isfinite(time)
        undominated[..., 1:] &= time[..., 1:] < least_time[..., :-1]
        cost = self._compute_cost(time, memory)
        if self.gap < np.inf:
            undominated &= cost <= cost.min(axis=-1, keepdims=True) + self.gap
        undominated = _thin_by_levels(undominated, memory, cost, self.points)
        # Move undominated points to the front. The largest number in a state is the new axis.
        front = np.argsort(~undominated, axis=-1, kind="stable")
        front = front[..., : max(1, int(undominated.sum(axis=-1).max(initial=1)))]
        exists = np.take_along_axis(undominated, front, -1)
        time = np.where(exists, np.take_along_axis(time, front, -1), np.inf)
        memory = np.where(exists, np.take_along_axis(memory, front, -1), np.inf)
        order = np.take_along_axis(order, front, -1)
        return Table(time, memory, (order // points, order % points))


def _thin_by_levels(
    undominated: NDArray[Any], memory: Floats, cost: Floats, max_count: int
) -> NDArray[Any]:
    """Return a mask of at most `max_count` undominated points of each state.

    If a state has more, the mask has the points with the least memory and with the least time, and
    the cheapest point in each of `max_count - 2` equal intervals of memory, called levels.
    """
    counts = undominated.sum(axis=-1)
    if counts.max(initial=0) <= max_count:
        return undominated
    first = np.argmax(undominated, axis=-1)[..., None]
    last = undominated.shape[-1] - 1 - np.argmax(undominated[..., ::-1], axis=-1)[..., None]
    low = np.min(np.where(undominated, memory, np.inf), axis=-1, keepdims=True)
    high = np.max(np.where(undominated, memory, -np.inf), axis=-1, keepdims=True)
    span = np.where(high > low, high - low, 1)
    levels = max(1, max_count - 2)
    with np.errstate(invalid="ignore"):
        level = np.floor((memory - low) / span * levels)
    level = np.where(undominated, np.minimum(level, levels - 1), np.inf)
    # By level and then by cost, the first of each level is its cheapest.
    order = np.lexsort((np.where(undominated, cost, np.inf), level), axis=-1)
    ordered = np.take_along_axis(level, order, -1)
    cheapest = np.isfinite(ordered)
    cheapest[..., 1:] &= ordered[..., 1:] > ordered[..., :-1]
    thinned = np.zeros_like(undominated)
    np.put_along_axis(thinned, order, cheapest, -1)
    for place in (first, last):
        np.put_along_axis(thinned, place, np.take_along_axis(undominated, place, -1), -1)
    return np.where((counts > max_count)[..., None], thinned, undominated)


def find_fastest(
    factors: Sequence[Factor], sizes: Sequence[int], most_memory: float, points: int
) -> Choice | None:
    """Return the fastest choice of at most `most_memory`; None if none exists.

    First several slopes (Lagrange multipliers) are tried. For each slope, the least value of time +
    slope x (memory - `most_memory`) is a lower bound on the time of all choices that fit, and its
    choice may fit itself. The gap is the difference between the fastest choice that fits and the
    largest lower bound. Then a search with several points for each state drops points beyond the
    gap. The result is exact unless a state has more than `points` points.
    """
    unbounded = Eliminator().find_best(factors, sizes)
    if unbounded is None or unbounded.memory <= most_memory:
        return unbounded
    best = Eliminator(slope=np.inf).find_best(factors, sizes)
    if best is None or best.memory > most_memory:
        return None
    bound = unbounded.time
    slope_of_bound = 0.0
    low = 0.0
    high = np.inf
    slope = unbounded.time / unbounded.memory
    for _ in range(MAX_SLOPES):
        choice = Eliminator(slope=slope).find_best(factors, sizes)
        assert choice is not None
        lower_bound = choice.time + slope * (choice.memory - most_memory)
        if lower_bound > bound:
            bound = lower_bound
            slope_of_bound = slope
        if choice.memory <= most_memory:
            high = slope
            if choice.time < best.time:
                best = choice
        else:
            low = slope
        # Larger until a choice fits, then by bisection.
        slope = slope * 4 if high == np.inf else (low + high) / 2
    gap = max(best.time - bound, 0.0) * (1 + TIE)
    exact = Eliminator(points, most_memory, slope_of_bound, gap).find_best(factors, sizes)
    return best if exact is None or best.time <= exact.time else exact


def _trace_states(total: Factor, point: int) -> dict[int, int]:
    """Return the states of all variables that lead to a point of a table without variables."""
    states: dict[int, int] = {}
    stack = [(total, point)]
    while stack:
        factor, index = stack.pop()
        origin = factor.table.origin
        if not factor.parts or origin is None:
            continue
        place = (*(states[variable] for variable in factor.scope), index)
        first, second = (int(indices[place]) for indices in origin)
        if factor.eliminated is None:
            stack += zip(factor.parts, (first, second), strict=True)
        else:
            states[factor.eliminated] = first
            stack.append((factor.parts[0], second))
    return states
