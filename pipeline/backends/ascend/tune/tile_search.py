"""Searches of the tilings of one product, and rules of experience that cost less than prices.

Searches are exhaustive, genetic, in a tree of decisions that a small network rates, or both of
the last.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import TuneMode
from pipeline.backends.ascend.cost.tiling import (
    Product,
    Tiling,
    choose_default_tiling,
    compute_stage_cycles,
    list_blocks,
    list_tilings,
    sum_cycles,
    to_row,
    to_tiling,
)
from pipeline.core.files.knowledge_bank import Round

DECISIONS_COUNT = 5
"""Among how many cores to split the batch, m, k and n: four decisions; then which block to use."""
INPUTS_COUNT = 2 * DECISIONS_COUNT + 7
"""The decision (one-hot, 5), 4 limits, earlier choices (5, the last is always 0), and 3 numbers of
an option (`make_inputs`)."""
HIDDEN_COUNT = 16
LEARNING_RATE = 0.1


class DecisionNetwork:
    """Chances of a decision's options, by a network with a hidden layer of tanh units.

    It guides a tree search and learns from it, as in AlphaZero (Silver et al. 2017). The tree gives
    each option a share, larger for a better reward; shares sum to 1. Each step descends the
    cross-entropy of shares and chances.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self.hidden = generator.normal(0, INPUTS_COUNT**-0.5, (INPUTS_COUNT, HIDDEN_COUNT))
        # From zeros, all options have the same chance at first.
        self.output = np.zeros(HIDDEN_COUNT)

    def compute_chances(self, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the chance of each option, from inputs (options, INPUTS_COUNT)."""
        scores = np.tanh(inputs @ self.hidden) @ self.output
        powers = np.exp(scores - scores.max())
        return np.asarray(powers / powers.sum())

    def compute_gradients(
        self, inputs: NDArray[np.float64], shares: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the gradients by hidden and output of the cross-entropy with shares."""
        units = np.tanh(inputs @ self.hidden)
        errors = self.compute_chances(inputs) - shares
        by_unit = errors[:, None] * self.output * (1 - units**2)
        return inputs.T @ by_unit, units.T @ errors

    def learn(self, inputs: NDArray[np.float64], shares: NDArray[np.float64]) -> None:
        """Make one step of gradient descent."""
        hidden, output = self.compute_gradients(inputs, shares)
        self.hidden -= LEARNING_RATE * hidden
        self.output -= LEARNING_RATE * output


def make_inputs(
    choices: Sequence[int], options: Sequence[int], limits: Sequence[int], cores_count: float
) -> NDArray[np.float64]:
    """Return the network's inputs (options, INPUTS_COUNT) for the decision after some choices.

    All options share the decision (one-hot), `limits` (the product's batch, m, k and n) and the
    choices. A number x is log(x + 1) to the base `cores_count` + 1. An option's numbers are its
    logarithm, or a block's place; the square of it; and whether the option divides its limit.
    """
    depth = len(choices)
    scale = np.log2(cores_count + 1)
    state = np.zeros(INPUTS_COUNT - 3)
    state[depth] = 1.0
    state[DECISIONS_COUNT : DECISIONS_COUNT + 4] = np.log2(np.add(limits, 1)) / scale
    state[DECISIONS_COUNT + 4 : DECISIONS_COUNT + 4 + depth] = np.log2(np.add(choices, 1)) / scale
    values = np.array(options, dtype=np.float64)
    if depth == DECISIONS_COUNT - 1:
        scaled = (values + 1) / len(options)
        divides = np.zeros_like(scaled)
    else:
        scaled = np.log2(values + 1) / scale
        divides = (limits[depth] % values == 0).astype(np.float64)
    features = np.stack([scaled, scaled**2, divides], axis=1)
    return np.concatenate([np.tile(state, (len(options), 1)), features], axis=1)


POPULATION_COUNT = 24
GENERATIONS_COUNT = 12
ELITE_COUNT = 6
MUTATION_CHANCE = 0.3
"""Chance that a gene of a child changes."""
ROUNDS_COUNT = 10
WALKS_PER_ROUND = 20
EXPLORATION = 1.0
"""Weight of the upper confidence bound. Rewards are in 0..1, and 1/2 for the default tiling."""
TEMPERATURE = 0.05
"""Difference of rewards at which an option's share in the network's target falls to 1/e."""
PRUNED_FACTOR = 4.0
"""Experience rules out tilings that it rates above this multiple of the best."""
CHILD_TRIES = 8
"""A place of a generation stays empty after this many children that aren't useful."""

Genes = tuple[int, int, int, int, int]
"""Cores of the batch, m, k, n, and the index of the block."""
CORE_FRACTALS = 64
"""Fewest products of fractals that are worth starting a core for."""
DEPTH_FACTOR = 2.0
"""Cost of splitting the depth, whose sums must be added in memory, if cores can share the rest."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Time of a product: the p-norm of its stages with power `overlap`, plus the cores' start."""

    product: Product
    hw: Hardware
    overlap: float

    def choose_default_tiling(self) -> Tiling:
        """Return the tiling of the vendor's rule of thumb."""
        return choose_default_tiling(self.product, self.hw, self.overlap)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Output blocks (rows, columns) that a gene chooses from."""
        return list_blocks(self.hw)

    @property
    def limits(self) -> tuple[int, int, int, int]:
        """The most cores that can share the batch, m, k and n."""
        return self.product.batch, self.product.m, self.product.k, self.product.n

    def compute_times_us(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the microseconds of each row of tilings."""
        cycles = sum_cycles(compute_stage_cycles(self.product, self.hw, rows), self.overlap)
        span_us = max(self.hw.task_floor_all_cores_us - self.hw.task_floor_one_core_us, 0.0)
        core_us = span_us / self.hw.ai_cores_count
        return np.asarray(cycles / self.hw.ai_core_clock_mhz + rows[:, :4].prod(axis=1) * core_us)


@dataclass(frozen=True, slots=True)
class Search:
    """The best tiling and its time, the number of priced tilings, the best time of each round."""

    tiling: Tiling
    us: float
    trials: int
    rounds: tuple[Round, ...]


def search_tiles(objective: Objective, mode: TuneMode, key: str) -> Search:
    """Return the best tiling of a search, which includes the default tiling.

    The random numbers depend on `key` alone.
    """
    if mode == "exhaustive":
        default = to_row(objective.choose_default_tiling())
        rows = np.concatenate([default, list_tilings(objective.product, objective.hw)])
        times_us = objective.compute_times_us(rows)
        best = int(np.argmin(times_us))
        us = float(times_us[best])
        return Search(to_tiling(rows[best]), us, len(rows), (Round(us),))
    generator = np.random.default_rng([0, zlib.crc32(key.encode())])
    if mode == "ga":
        return _search_genes(objective, generator)
    tree = _search_tree(objective, generator)
    if mode == "rl":
        return tree
    genes = _search_genes(objective, generator)
    gene_rounds = (replace(round_, best_us=min(round_.best_us, tree.us)) for round_ in genes.rounds)
    return replace(
        genes if genes.us < tree.us else tree,
        trials=tree.trials + genes.trials,
        rounds=(*tree.rounds, *gene_rounds),
    )


class _Ledger:
    """Times of priced genes, the best tiling so far, and the best time of each round."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.times_us: dict[Genes, float] = {}
        default = to_row(objective.choose_default_tiling())
        self.best_row = default[0]
        self.default_us = float(objective.compute_times_us(default)[0])
        self.best_us = self.default_us
        self.rounds: list[Round] = []

    def price(self, genes: Sequence[Genes]) -> None:
        """Price genes that weren't priced before."""
        new_genes = sorted(set(genes) - self.times_us.keys())
        if not new_genes:
            return
        rows = self.to_rows(new_genes)
        times_us = self.objective.compute_times_us(rows)
        self.times_us.update(zip(new_genes, times_us.tolist(), strict=True))
        best = int(np.argmin(times_us))
        if times_us[best] < self.best_us:
            self.best_us = float(times_us[best])
            self.best_row = rows[best]

    def to_rows(self, genes: Sequence[Genes]) -> NDArray[np.float64]:
        """Return genes as rows of tilings."""
        blocks = self.objective.blocks
        rows = [(*cores, *blocks[block]) for *cores, block in genes]
        return np.array(rows, dtype=np.float64)

    def rate(self, genes: Sequence[Genes]) -> NDArray[np.float64]:
        """Return the costs of genes by experience, as in `rate_tilings`."""
        return rate_tilings(
            self.objective.limits, self.objective.hw.ai_cores_count, self.to_rows(genes)
        )

    def end_round(self) -> None:
        """Record the best time so far for a round."""
        self.rounds.append(Round(self.best_us))

    def make_result(self) -> Search:
        """Return the best tiling of all rounds."""
        trials = len(self.times_us) + 1
        return Search(to_tiling(self.best_row), self.best_us, trials, tuple(self.rounds))


def _clip_genes(genes: Sequence[int], objective: Objective) -> Genes:
    """Return genes within the product's limits and the cores, which earlier genes get first."""
    remaining = int(objective.hw.ai_cores_count)
    cores: list[int] = []
    for value, limit in zip(genes, objective.limits, strict=False):
        cores.append(max(min(int(value), limit, remaining), 1))
        remaining //= cores[-1]
    batch, m, k, n = cores
    return batch, m, k, n, int(genes[4])


def _search_genes(objective: Objective, generator: np.random.Generator) -> Search:
    """Search by generations of crossings and mutations of the fastest genes.

    The first generation has the best of all combinations of the levels by experience. Experience
    also prunes the children.
    """
    ledger = _Ledger(objective)
    combinations = sorted(set(_combine_levels([], objective)))
    ratings = ledger.rate(combinations)
    limit = PRUNED_FACTOR * ratings.min()
    ranked = [combinations[place] for place in np.argsort(ratings, kind="stable")]
    population = ranked[: min(POPULATION_COUNT, int((ratings <= limit).sum()))]
    for _ in range(GENERATIONS_COUNT):
        ledger.price(population)
        ledger.end_round()
        ranked = sorted(set(population), key=lambda genes: (ledger.times_us[genes], genes))
        elite = ranked[:ELITE_COUNT]
        children = (
            _make_useful_child(elite, ledger, limit, generator)
            for _ in range(POPULATION_COUNT - len(elite))
        )
        population = [*elite, *(child for child in children if child is not None)]
    return ledger.make_result()


def _combine_levels(choices: list[int], objective: Objective) -> Iterator[Genes]:
    """Yield the combinations of all decisions after some choices."""
    if len(choices) == DECISIONS_COUNT:
        yield _clip_genes(choices, objective)
        return
    for option in _list_options(choices, objective):
        yield from _combine_levels([*choices, option], objective)


def _make_useful_child(
    elite: Sequence[Genes], ledger: _Ledger, limit: float, generator: np.random.Generator
) -> Genes | None:
    """Return a new child that experience rates at most `limit`; None after `CHILD_TRIES` tries."""
    for _ in range(CHILD_TRIES):
        child = _make_child(elite, ledger.objective, generator)
        if child not in ledger.times_us and ledger.rate([child])[0] <= limit:
            return child
    return None


def _make_child(
    elite: Sequence[Genes], objective: Objective, generator: np.random.Generator
) -> Genes:
    """Return genes of two parents, with cores multiplied and the block replaced by chance."""
    mother = elite[int(generator.integers(len(elite)))]
    father = elite[int(generator.integers(len(elite)))]
    genes = [
        first if generator.random() < 0.5 else second
        for first, second in zip(mother, father, strict=True)
    ]
    for place in range(4):
        if generator.random() < MUTATION_CHANCE:
            genes[place] = round(genes[place] * float(generator.choice((0.5, 0.75, 1.5, 2.0))))
    if generator.random() < MUTATION_CHANCE:
        genes[4] = int(generator.integers(len(objective.blocks)))
    return _clip_genes(genes, objective)


@dataclass(slots=True)
class _Node:
    """A decision in the tree: its visits, their best reward, and the next decisions.

    A closed node has no tiling that wasn't visited.
    """

    visits: int = 0
    best: float = 0.0
    is_closed: bool = False
    children: dict[int, _Node] = field(default_factory=dict)


def _search_tree(objective: Objective, generator: np.random.Generator) -> Search:
    """Search by walks down a chain of decisions, guided by a network that the walks train.

    A round ends with the network's own choice.
    """
    ledger = _Ledger(objective)
    root = _Node()
    network = DecisionNetwork(generator)
    for _ in range(ROUNDS_COUNT):
        for _ in range(WALKS_PER_ROUND):
            if not root.is_closed:
                _walk_tree(root, network, ledger)
        ledger.price([choose_by_network(network, objective)])
        ledger.end_round()
    return ledger.make_result()


def _walk_tree(root: _Node, network: DecisionNetwork, ledger: _Ledger) -> None:
    """Walk to a tiling, price it, and train the network on the decisions of the walk."""
    objective = ledger.objective
    path = [root]
    choices: list[int] = []
    decisions: list[tuple[_Node, list[int], NDArray[np.float64]]] = []
    for _ in range(DECISIONS_COUNT):
        node = path[-1]
        options = _list_options(choices, objective)
        inputs = make_inputs(choices, options, objective.limits, objective.hw.ai_cores_count)
        decisions.append((node, options, inputs))
        choices.append(_choose_option(node, options, network.compute_chances(inputs)))
        path.append(node.children.setdefault(choices[-1], _Node()))
    genes = _clip_genes(choices, objective)
    ledger.price([genes])
    reward = 1 / (1 + ledger.times_us[genes] / ledger.default_us)
    path[-1].is_closed = True
    for node in path:
        node.visits += 1
        node.best = max(node.best, reward)
    for node, options, inputs in reversed(decisions):
        visited = [place for place, option in enumerate(options) if option in node.children]
        children = [node.children[options[place]] for place in visited]
        is_complete = len(children) == len(options)
        node.is_closed = is_complete and all(child.is_closed for child in children)
        weights = np.exp([(child.best - node.best) / TEMPERATURE for child in children])
        network.learn(inputs[visited], weights / weights.sum())


def choose_by_network(network: DecisionNetwork, objective: Objective) -> Genes:
    """Return the genes of the options with the largest chances."""
    choices: list[int] = []
    for _ in range(DECISIONS_COUNT):
        options = _list_options(choices, objective)
        chances = network.compute_chances(
            make_inputs(choices, options, objective.limits, objective.hw.ai_cores_count)
        )
        choices.append(options[int(chances.argmax())])
    return _clip_genes(choices, objective)


def _list_options(choices: Sequence[int], objective: Objective) -> list[int]:
    """Return the options of the decision after some choices.

    For the batch, m and k they are powers of two and the most cores that can be used, for n this
    maximum alone, and then the blocks.
    """
    depth = len(choices)
    if depth == DECISIONS_COUNT - 1:
        return list(range(len(objective.blocks)))
    remaining = int(objective.hw.ai_cores_count) // math.prod(choices)
    max_cores = max(min(remaining, objective.limits[depth]), 1)
    if depth == DECISIONS_COUNT - 2:
        return [max_cores]
    return sorted({max_cores, *(2**power for power in range(max_cores.bit_length()))})


def _choose_option(node: _Node, options: Sequence[int], chances: NDArray[np.float64]) -> int:
    """Return the option of the largest upper confidence bound, in which its chance has a part.

    An option without visits counts as good as the best one. Closed options are left out.
    """

    def compute_bound(place: int) -> float:
        child = node.children.get(options[place], _Node(best=node.best))
        bonus = chances[place] * math.sqrt(node.visits) / (1 + child.visits)
        return child.best + EXPLORATION * float(bonus)

    places = range(len(options))
    is_open = [not node.children.get(options[place], _Node()).is_closed for place in places]
    return options[max(filter(is_open.__getitem__, places), key=compute_bound)]


def rate_tilings(
    limits: Sequence[int], cores_count: float, rows: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the expected cost of each tiling relative to an ideal one, from rows (tilings, 6).

    `limits` are the batch, m, k and n of the product, in fractals. As many cores as are worth it
    should be busy, with equal parts, and parts should be multiples of their blocks. Each row of a
    block is loaded again for its columns and the reverse, so square blocks load least. The depth
    should be split only if there is nothing else to share.
    """
    sizes = np.array(limits, dtype=np.float64)
    cores = rows[:, :4]
    parts = np.ceil(sizes / cores)
    part_padding = (parts * cores).prod(axis=1) / sizes.prod()
    sides = parts[:, [1, 3]]
    blocks = np.minimum(rows[:, 4:], sides)
    block_padding = (np.ceil(sides / blocks) * blocks / sides).prod(axis=1)
    loads = 1 + (1 / blocks).sum(axis=1)
    useful_cores = np.clip(sizes.prod() / CORE_FRACTALS, 1, cores_count)
    used_cores = cores.prod(axis=1)
    mismatch = np.maximum(used_cores / useful_cores, useful_cores / used_cores)
    can_share = sizes[[0, 1, 3]].prod() >= useful_cores
    depth = np.where(can_share & (rows[:, 2] > 1), DEPTH_FACTOR, 1.0)
    return np.asarray(part_padding * block_padding * loads * mismatch * depth)
