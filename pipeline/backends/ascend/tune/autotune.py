"""AutoTune, emulated: a search for the tiling of every matrix product, with a knowledge bank.

The flow is CANN's. An operator is looked up, together with the operators fused into it, in the
custom bank and then in the built-in bank. If a bank has it, and neither tuning nor REPEAT_TUNE is
on, the stored tiling is used. If tuning or REPEAT_TUNE is on, the operator is tuned again, and the
better tiling is stored in the custom bank. An operator in no bank is tuned if tuning is on, and the
better of the tuned and the default tiling is stored. If tuning is off, the default tiling is
stored.

The modes are CANN's GA (genetic search over tilings), RL (a tree search over a chain of
decisions, guided by a network that learns from the tree), both ("RL,GA"), and an exhaustive search.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import ExecutionConfig, OptionError, TuneMode
from pipeline.backends.ascend.chip.tasks import Task, TaskGraph
from pipeline.backends.ascend.cost.efficiency import Efficiency
from pipeline.backends.ascend.cost.task_time import (
    CUBE_CLASSES,
    price_tasks,
    runs_on_vector,
    to_product,
)
from pipeline.backends.ascend.cost.tiling import Product, Tiling, to_row
from pipeline.backends.ascend.tune.tile_search import Objective, Search, search_tiles
from pipeline.core.errors import RunError
from pipeline.core.files.knowledge_bank import (
    Banks,
    Round,
    Status,
    Tuned,
    make_operator_record,
    reuse_or_search,
)
from pipeline.core.files.paths import expand_home
from pipeline.core.files.trusted_files import find_foreign_owner, find_writers

BUILT_IN = Path(__file__).with_name("built_in.json")
"""Bank of the matrix products of ResNet-50 with a batch of 32, from an exhaustive search."""

CORE_FIGURES = (
    "ai_cores_count", "ai_core_clock_mhz", "cube_fp16_macs_per_cycle", "l0a_kib", "l0b_kib",
    "l0c_kib", "l1_kib", "l1_to_l0a_bytes_per_cycle", "l1_to_l0b_bytes_per_cycle",
    "l0c_to_ub_bytes_per_cycle", "ub_to_l2_bytes_per_cycle", "l2_read_bytes_per_cycle",
)  # fmt: skip
"""Figures of the core that a tiling depends on. An entry of a bank is for one set of figures."""
BANK_VARIABLE = "TUNE_BANK_PATH"
CUSTOM_BANK = "custom_bank.json"
REPEAT_VARIABLE = "REPEAT_TUNE"
SWITCH_WORDS = {"true": True, "1": True, "false": False, "0": False}
MAX_TILE = 2**31 - 1
"""Largest number of a bank's tiling."""
REPEAT_MODE: TuneMode = "rl,ga"
"""Mode in which stored operators are tuned again if REPEAT_TUNE is on and no mode is chosen."""


@dataclass(frozen=True, slots=True)
class TunedTask:
    """A matrix product before and after tuning. `trials` is the number of tilings that the search
    priced, 0 without a search."""

    index: int
    """Index of the task in the graph."""
    product: Task
    key: str
    before_us: float
    after_us: float
    tiling: Tiling
    trials: int
    status: Status
    rounds: tuple[Round, ...]

    @property
    def gain(self) -> float:
        """Share of the time that tuning saves."""
        return 1 - self.after_us / self.before_us


@dataclass(frozen=True)
class TuneResult:
    """Result of AutoTune for a graph."""

    mode: TuneMode | None
    tasks: tuple[TunedTask, ...]

    @property
    def tiles(self) -> Mapping[int, Tiling]:
        """Argument of `price_tasks`: tilings by index of the task. Tasks that tuning doesn't make
        faster aren't in it."""
        tuned = (task for task in self.tasks if task.after_us < task.before_us)
        return {task.index: task.tiling for task in tuned}

    @property
    def before_us(self) -> float:
        """Time of all matrix products with the vendor's default tilings."""
        return sum(task.before_us for task in self.tasks)

    @property
    def after_us(self) -> float:
        """Time of all matrix products with the tuned tilings."""
        return sum(task.after_us for task in self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of CANN's result file: an entry for each operator, whose key is the
        list of its fused names as text. Times are in microseconds."""
        operators: dict[str, Any] = {}
        for task in self.tasks:
            entry = _to_operator(task, self.mode)
            names = entry.pop("op")
            same = sum(json.loads(key)[: len(names)] == names for key in operators)
            # Operators of equal names, such as a layer's that is applied twice, are numbered.
            operators[json.dumps([*names, f"#{same + 1}"] if same else names)] = entry
        return operators


def tune(
    graph: TaskGraph, hw: Hardware, config: ExecutionConfig, efficiency: Efficiency
) -> TuneResult:
    """Return a tiling for every matrix product of the graph.

    Every tiling is at least as fast as the vendor's default. Raises RunError for an unknown mode
    and for an invalid bank.
    """
    mode = config.auto_tune
    if mode is not None and mode not in get_args(TuneMode):
        raise RunError(f"AutoTune mode {mode!r}: must be one of {', '.join(get_args(TuneMode))}")
    overlap = efficiency.constants.cube_overlap
    custom = Path(config.tune_bank) if config.tune_bank else None
    banks = Banks(custom, BUILT_IN, check_tile_entry)
    entries = banks.read()
    keys: dict[int, str] = {}
    objectives: dict[str, Objective] = {}
    outcomes: dict[str, Tuned[Search]] = {}
    for index in find_tunable_tasks(graph, hw):
        task = graph.tasks[index]
        assert task.cube is not None
        product = to_product(task, task.cube, graph.buffers, hw)
        key = make_bank_key(task, product, hw)
        keys[index] = key
        if key not in outcomes:
            objectives[key] = Objective(product, hw, overlap)
            outcomes[key] = _tune_product(key, entries.get(key), objectives[key], config)
    banks.add(
        {
            key: {"tiling": list(astuple(outcome.best.tiling)), "us": outcome.best.us}
            for key, outcome in outcomes.items()
            if outcome.status != "bank_hit"
        }
    )
    tiles = {index: outcomes[key].best.tiling for index, key in keys.items()}
    before = price_tasks(graph, hw, efficiency)
    after = price_tasks(graph, hw, efficiency, tiles)
    tuned = []
    for index, key in keys.items():
        outcome = outcomes[key]
        searched = outcome.searched or outcome.best
        tiling = outcome.best.tiling
        if after[index].us >= before[index].us:
            tiling = objectives[key].choose_default_tiling()
        tuned.append(
            TunedTask(
                index=index,
                product=graph.tasks[index],
                key=key,
                before_us=before[index].us,
                after_us=min(after[index].us, before[index].us),
                tiling=tiling,
                trials=searched.trials,
                status=outcome.status,
                rounds=searched.rounds,
            )
        )
    return TuneResult(mode, tuple(tuned))


def _tune_product(
    key: str, entry: Mapping[str, Any] | None, objective: Objective, config: ExecutionConfig
) -> Tuned[Search]:
    """Return the bank's tiling, a search's tiling, or the better of both if the product is tuned
    again."""
    banked = None
    if entry is not None:
        banked = Search(Tiling(*entry["tiling"]), float(entry["us"]), 0, ())
    is_searched = config.auto_tune is not None or (config.repeat_tune and banked is not None)

    def search() -> Search:
        if is_searched:
            return search_tiles(objective, config.auto_tune or REPEAT_MODE, key)
        default = objective.choose_default_tiling()
        default_us = objective.compute_times_us(to_row(default))
        return Search(default, float(default_us[0]), 0, ())

    return reuse_or_search(banked, search, repeat=is_searched)


def find_tunable_tasks(graph: TaskGraph, hw: Hardware) -> tuple[int, ...]:
    """Return the indices of the tasks that the cube runs."""
    return tuple(
        index
        for index, task in enumerate(graph.tasks)
        if task.cube is not None
        and task.cost_class in CUBE_CLASSES
        and not runs_on_vector(task, hw)
    )


def make_bank_key(task: Task, product: Product, hw: Hardware) -> str:
    """Return a bank's key: the fused operators, the fields of `product`, a digest of the core."""
    figures = json.dumps([getattr(hw, name) for name in CORE_FIGURES])
    chip = hashlib.sha256(figures.encode()).hexdigest()[:12]
    shape = f"{product.batch}x{product.m}x{product.k}x{product.n} /{product.expansion:g}"
    operators = f"{task.cost_class} [{', '.join((task.type, *task.fused))}]"
    types = f"out{product.out_bytes}"
    if product.float32:
        types += " float32"
    return f"{operators} {shape} {types} images{product.images} core{chip}"


def check_tile_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bank's entry with its types. Raises ValueError for values out of range."""
    tiling = [int(value) for value in entry["tiling"]]
    us = float(entry["us"])
    if len(tiling) != len(fields(Tiling)) or not 1 <= min(tiling) <= max(tiling) <= MAX_TILE:
        raise ValueError(f"a tiling must have {len(fields(Tiling))} numbers from 1 to {MAX_TILE:,}")
    if not 0 < us < float("inf"):
        raise ValueError(f"us = {us}: must be positive and finite")
    return {"tiling": tiling, "us": us}


def _to_operator(task: TunedTask, mode: TuneMode | None) -> dict[str, Any]:
    """Return the entry of an operator in the result file. Its name has the scope, the type and the
    fused operators."""
    product = task.product
    op = [part for part in (product.scope, product.type, *product.fused) if part]
    return {
        **make_operator_record(op, task.key, task.before_us, task.after_us, task.status),
        "mode": (mode or REPEAT_MODE) if task.trials else "off",
        "gain": task.gain,
        "tiling": asdict(task.tiling),
        "trials": task.trials,
        "ticks_best": list(map(str, task.rounds)),
    }


def find_custom_bank(file: str | Path | None) -> str | None:
    """Return the custom bank's file; None if neither `file` nor TUNE_BANK_PATH names it.

    TUNE_BANK_PATH is CANN's variable for the folder of its custom bank. Raises OptionError if the
    folder is missing, or if another user owns or can write it, since the bank decides how operators
    are tiled.
    """
    if file is not None:
        return str(file)
    value = os.environ.get(BANK_VARIABLE)
    if not value:
        return None
    problem = f"{BANK_VARIABLE} = {value}:"
    folder = expand_home(Path(value))
    if not folder.is_dir():
        raise OptionError(f"{problem} must be a folder that exists")
    status = folder.stat()
    owner = find_foreign_owner(status)
    if owner is not None:
        raise OptionError(f"{problem} must belong to you, not to {owner}")
    writers = find_writers(status)
    if writers is not None:
        raise OptionError(f"{problem} must be writable by you alone; {writers} can write it")
    return str(folder / CUSTOM_BANK)


def find_result_folder(bank: str | None) -> Path | None:
    """Return the folder of TUNE_BANK_PATH, where CANN writes its result files too; None if `bank`
    isn't in the folder of this variable."""
    value = os.environ.get(BANK_VARIABLE)
    folder = expand_home(Path(value)) if value else None
    return folder if folder is not None and bank == str(folder / CUSTOM_BANK) else None


def should_repeat(option: bool) -> bool:
    """Return whether stored operators are tuned again, by an option or CANN's REPEAT_TUNE.

    Raises OptionError if the variable isn't true, false, 1 or 0.
    """
    value = os.environ.get(REPEAT_VARIABLE) or "false"
    if value.lower() not in SWITCH_WORDS:
        raise OptionError(f"{REPEAT_VARIABLE} = {value}: must be true or false")
    return option or SWITCH_WORDS[value.lower()]
