"""Searches of the tilings of one product.

Searches are exhaustive, genetic, in a tree of decisions with a learned policy, or both of the last.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
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

POPULATION_COUNT = 24
GENERATIONS_COUNT = 12
ELITE_COUNT = 6
MUTATION_CHANCE = 0.3
ROUNDS_COUNT = 10
WALKS_PER_ROUND = 20
EXPLORATION = 0.5
"""Weight of the upper confidence bound. Rewards are in 0..1, and 1/2 for the default tiling."""
DECISIONS_COUNT = 5
FEATURES_COUNT = 3
LEARNING_RATE = 0.3
MEAN_RATE = 0.05

Genes = tuple[int, int, int, int, int]
"""Cores of the batch, m, k, n, and the index of the block."""


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
    def limits(self) -> tuple[int, int, int, int]:
        """The most cores that can share the batch, m, k and n."""
        return self.product.batch, self.product.m, self.product.k, self.product.n

    def times_us(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the microseconds of each row of tilings."""
        cycles = sum_cycles(compute_stage_cycles(self.product, self.hw, rows), self.overlap)
        span_us = max(self.hw.task_floor_all_cores_us - self.hw.task_floor_one_core_us, 0.0)
        core_us = span_us / self.hw.ai_cores_count
        return np.asarray(cycles / self.hw.ai_core_clock_mhz + rows[:, :4].prod(axis=1) * core_us)


@dataclass(frozen=True, slots=True)
class Search:
    """Result of a search: tiling, number of priced tilings, and best time after each round."""

    tiling: Tiling
    trials: int
    rounds: tuple[Round, ...]


def search_tiles(
    objective: Objective, default: Tiling, mode: TuneMode, seed: int, key: str
) -> Search:
    """Return the best tiling of a search, which includes the default tiling.

    The random numbers depend on `seed` and `key` alone.
    """
    if mode == "exhaustive":
        rows = np.concatenate([to_row(default), list_tilings(objective.product, objective.hw)])
        times_us = objective.times_us(rows)
        best = int(np.argmin(times_us))
        return Search(to_tiling(rows[best]), len(rows), (Round(float(times_us[best])),))
    generator = np.random.default_rng([seed, zlib.crc32(key.encode())])
    if mode == "ga":
        return _search_genes(objective, default, generator)
    tree = _search_tree(objective, default, generator)
    if mode == "rl":
        return tree
    genes = _search_genes(objective, default, generator)
    tree_us = tree.rounds[-1].best_us
    gene_rounds = (replace(round_, best_us=min(round_.best_us, tree_us)) for round_ in genes.rounds)
    best_search = genes if genes.rounds[-1].best_us < tree_us else tree
    return Search(best_search.tiling, tree.trials + genes.trials, (*tree.rounds, *gene_rounds))


class _Ledger:
    """Times of priced genes, the best tiling so far, and the best time of each round."""

    def __init__(self, objective: Objective, default: Tiling) -> None:
        self.objective = objective
        self.blocks = list_blocks(objective.hw)
        self.times_us: dict[Genes, float] = {}
        self.best_row = to_row(default)[0]
        self.default_us = float(objective.times_us(to_row(default))[0])
        self.best_us = self.default_us
        self.rounds: list[Round] = []

    def price(self, genes: Sequence[Genes]) -> None:
        """Price genes that weren't priced before."""
        new_genes = sorted(set(genes) - self.times_us.keys())
        if not new_genes:
            return
        rows = np.array([(*g[:4], *self.blocks[g[4]]) for g in new_genes], dtype=np.float64)
        times_us = self.objective.times_us(rows)
        self.times_us.update(zip(new_genes, times_us.tolist(), strict=True))
        best = int(np.argmin(times_us))
        if times_us[best] < self.best_us:
            self.best_us = float(times_us[best])
            self.best_row = rows[best]

    def end_round(self) -> None:
        """Record the best time so far for a round."""
        self.rounds.append(Round(self.best_us))

    def make_result(self) -> Search:
        """Return the best tiling of all rounds."""
        return Search(to_tiling(self.best_row), len(self.times_us) + 1, tuple(self.rounds))


def _clip_genes(genes: Sequence[int], objective: Objective) -> Genes:
    """Return genes within the product's limits and the cores, which earlier genes get first."""
    remaining = int(objective.hw.ai_cores_count)
    cores: list[int] = []
    for value, limit in zip(genes, objective.limits, strict=False):
        cores.append(max(min(int(value), limit, remaining), 1))
        remaining //= cores[-1]
    batch, m, k, n = cores
    return batch, m, k, n, int(genes[4])


def _search_genes(objective: Objective, default: Tiling, generator: np.random.Generator) -> Search:
    """Search by generations of crossings and mutations of the fastest genes."""
    ledger = _Ledger(objective, default)
    blocks = len(ledger.blocks)
    cores = math.log2(max(objective.hw.ai_cores_count, 1))
    population = []
    for _ in range(POPULATION_COUNT):
        values = [round(2**share) for share in generator.dirichlet(np.ones(4)) * cores]
        values.append(int(generator.integers(blocks)))
        population.append(_clip_genes(values, objective))
    for _ in range(GENERATIONS_COUNT):
        ledger.price(population)
        ledger.end_round()
        ranked = sorted(set(population), key=lambda genes: (ledger.times_us[genes], genes))
        elite = ranked[:ELITE_COUNT]
        children = [
            _make_child(elite, objective, generator, blocks)
            for _ in range(POPULATION_COUNT - len(elite))
        ]
        population = [*elite, *children]
    return ledger.make_result()


def _make_child(
    elite: Sequence[Genes], objective: Objective, generator: np.random.Generator, blocks: int
) -> Genes:
    mother, father = (elite[int(generator.integers(len(elite)))] for _ in range(2))
    genes = [a if generator.random() < 0.5 else b for a, b in zip(mother, father, strict=True)]
    for at in range(4):
        if generator.random() < MUTATION_CHANCE:
            genes[at] = round(genes[at] * float(generator.choice((0.5, 0.75, 1.5, 2.0))))
    if generator.random() < MUTATION_CHANCE:
        genes[4] = int(generator.integers(blocks))
    return _clip_genes(genes, objective)


@dataclass(slots=True)
class _Node:
    """A decision in the tree: its visits, the sum of their rewards, and the next decisions."""

    visits: int = 0
    reward: float = 0.0
    children: dict[int, _Node] = field(default_factory=dict)


class _Policy:
    """Chances of a decision's options, log-linear in features, learned from the rewards of walks.

    The gradient is REINFORCE's (Williams 1992): that of the log of the chance, times the reward
    minus the mean reward. The chances guide the tree, as in AlphaGo (Silver et al. 2016).
    """

    def __init__(self) -> None:
        self.weights = np.zeros((DECISIONS_COUNT, FEATURES_COUNT))
        self.mean_reward = 0.5

    def compute_chances(self, depth: int, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the chance of each option, from features (options, FEATURES_COUNT)."""
        scores = features @ self.weights[depth]
        powers = np.exp(scores - scores.max())
        return np.asarray(powers / powers.sum())

    def learn(self, decisions: Sequence[_Decision], reward: float) -> None:
        """Make one step of gradient ascent on the reward of a walk."""
        gain = LEARNING_RATE * (reward - self.mean_reward)
        for depth, features, place in decisions:
            expected = self.compute_chances(depth, features) @ features
            self.weights[depth] += gain * (features[place] - expected)
        self.mean_reward += MEAN_RATE * (reward - self.mean_reward)


_Decision = tuple[int, NDArray[np.float64], int]
"""Depth of a decision, the features of its options, and the place of the chosen option."""


def _search_tree(objective: Objective, default: Tiling, generator: np.random.Generator) -> Search:
    """Search by walks down a chain of decisions, each by its upper confidence bound."""
    ledger = _Ledger(objective, default)
    root = _Node()
    policy = _Policy()
    for _ in range(ROUNDS_COUNT):
        for _ in range(WALKS_PER_ROUND):
            _walk_tree(root, policy, ledger, objective, generator)
        ledger.end_round()
    return ledger.make_result()


def _walk_tree(
    root: _Node,
    policy: _Policy,
    ledger: _Ledger,
    objective: Objective,
    generator: np.random.Generator,
) -> None:
    node = root
    path = [root]
    decisions: list[_Decision] = []
    choices: list[int] = []
    for depth in range(DECISIONS_COUNT):
        options = _list_options(depth, choices, objective, len(ledger.blocks))
        features = _featurize(depth, options, objective)
        place = _choose_option(node, options, policy.compute_chances(depth, features), generator)
        decisions.append((depth, features, place))
        choices.append(options[place])
        node = node.children.setdefault(options[place], _Node())
        path.append(node)
    genes = _clip_genes(choices, objective)
    ledger.price([genes])
    reward = 1 / (1 + ledger.times_us[genes] / ledger.default_us)
    policy.learn(decisions, reward)
    for node in path:
        node.visits += 1
        node.reward += reward


def _featurize(depth: int, options: Sequence[int], objective: Objective) -> NDArray[np.float64]:
    """Return features of each option: share, its square, and whether the option divides its limit.

    The shape is (options, FEATURES_COUNT). The share is of the cores, or of the blocks.
    """
    sizes = np.array(options, dtype=np.float64)
    if depth == DECISIONS_COUNT - 1:
        share = (sizes + 1) / len(options)
        return np.stack([share, share**2, np.zeros_like(share)], axis=1)
    limit = objective.limits[depth]
    share = np.log2(sizes + 1) / math.log2(objective.hw.ai_cores_count + 1)
    return np.stack([share, share**2, (limit % sizes == 0).astype(np.float64)], axis=1)


def _list_options(
    depth: int, choices: Sequence[int], objective: Objective, blocks: int
) -> list[int]:
    """Return powers of two of the remaining cores, and all of them; at the last depth, blocks."""
    if depth == 4:
        return list(range(blocks))
    remaining = int(objective.hw.ai_cores_count) // math.prod(choices)
    most = min(remaining, objective.limits[depth])
    if depth == 3:
        return [max(most, 1)]
    powers = {2**power for power in range(most.bit_length()) if 2**power <= most}
    return sorted(powers | {max(most, 1)})


def _choose_option(
    node: _Node,
    options: Sequence[int],
    chances: NDArray[np.float64],
    generator: np.random.Generator,
) -> int:
    """Return the place of an unvisited option, drawn by chance, or of the best bound if none is."""
    unvisited = [place for place, option in enumerate(options) if option not in node.children]
    if unvisited:
        weights = chances[unvisited] / chances[unvisited].sum()
        return int(generator.choice(unvisited, p=weights))

    def compute_bound(place: int) -> float:
        child = node.children[options[place]]
        bonus = math.sqrt(math.log(node.visits + 1) / child.visits)
        bonus *= 0.5 + 0.5 * chances[place] * len(options)
        return child.reward / child.visits + EXPLORATION * bonus

    return max(range(len(options)), key=compute_bound)
