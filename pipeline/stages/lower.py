"""Lower: choose how the layers of the network are computed on this device.

Chosen once a run: the choice decides the last bits of its numbers, so it is kept in the run
directory, and a resumed run reads it from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args

from flax import linen as nn

from pipeline.backends.base import Backend
from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.knowledge_bank import write_result
from pipeline.core.files.value_text import join_first
from pipeline.core.host.platforms import platform_of
from pipeline.core.reporter import Reporter
from pipeline.data.dataset import Dataset
from pipeline.models.lowerings.problem.image_layout import Layout
from pipeline.models.lowerings.problem.lowering import DEFAULT, Lowering, Lowerings, Problem
from pipeline.models.lowerings.tune.tuner import LoweringChoice, Tuning, find_layout
from pipeline.models.modules.layout import LaidOutNetwork, best_layout, has_choice
from pipeline.stages.build import Built
from pipeline.stages.lowering_problems import (
    layout_key,
    list_kept_operations,
    list_problems,
    time_gradients_us,
    with_policy,
)
from pipeline.stages.record.run_directory import LOWERINGS
from pipeline.stages.record.run_folder import RunFolder
from pipeline.training.parallel.cuts import cuts_of
from pipeline.training.parallel.microbatches import microbatch_size
from pipeline.training.parallel.ranks import Ranks
from pipeline.training.parallel.shards import shards_of
from pipeline.training.step import image_shape

SHOWN_KEPT = 3
"""Operations that are named where no lowering replaces them."""

TUNING_S = 24 * 3600.0
"""How long processes wait while the first one times lowerings."""


def lower(
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    folder: RunFolder | None,
    reporter: Reporter,
) -> Built:
    """Return the same step with its layers computed as chosen for the device.

    A choice that is in the run's `folder` is used again; else the choice is made and written there,
    with the result of tuning. Of the processes that share it the first one chooses for all. Eager
    mode changes nothing. Raises RunError for a choice or a bank that can't be read.
    """
    parts = built.parts
    if recipe.train.mode == "eager":
        return built
    if parts.lowerings is not None:
        single = _runs_single_steps(recipe, built, backend, reporter)
        built = replace(built, single_steps=single)
    elif not hasattr(parts.network, "policy"):
        return built
    if cuts_of(recipe.parallel) is not None:
        # XLA divides its own operations among devices, and no other ones.
        return built
    file = folder.path / LOWERINGS if folder else None

    def choose() -> dict[str, Any]:
        kept = read_choice(file) if file is not None and file.exists() else None
        banks = cache_root(recipe.cache) / "autotune"
        lowerings = kept.lowerings if kept is not None else None
        tuning = Tuning(recipe.autotune, recipe.autotune_search, banks, lowerings)
        request = _LoweringRequest(recipe, dataset, built, backend, tuning, reporter)
        chosen = _in_best_layout(request) if kept is None else request.chosen_in(kept.layout)
        if kept is not None:
            reporter.stage("lower", f"as before: {file}")
            return choice_to_document(chosen)
        _report(chosen, tuning, folder, reporter)
        if folder is not None:
            folder.accepted.add(partial(write_choice, folder.path / LOWERINGS, chosen))
        return choice_to_document(chosen)

    ranks = folder.ranks if folder is not None else Ranks()
    chosen = choice_of_document(ranks.agree(choose, TUNING_S))
    laid_out = replace(parts, network=_in_layout(parts.network, chosen.layout))
    return replace(built, parts=with_policy(laid_out, chosen.lowerings))


def _runs_single_steps(recipe: Recipe, built: Built, backend: Backend, reporter: Reporter) -> bool:
    """Whether the network keeps convolutions that a loop of this device would slow down.

    Reports what no lowering replaces.
    """
    kept = list_kept_operations(built.parts, built.state, recipe.train.batch_size)
    if not kept:
        return False
    shown = join_first(list(map(str, kept)), SHOWN_KEPT, "; ", "; ")
    reporter.stage("lower", f"left to XLA: {shown}")
    has_slow_loops = platform_of(backend.device.platform).has_slow_loops
    slow = has_slow_loops and any(one.is_convolution for one in kept)
    if slow and recipe.train.mechanism == "loop":
        reporter.warn("train.mechanism = loop: such convolutions are slow in a loop; soft has none")
    elif slow:
        reporter.stage("lower", "no loop over steps, in which such convolutions are slow: soft")
    return slow and recipe.train.mechanism != "loop"


def _in_layout(network: nn.Module, layout: Layout) -> nn.Module:
    """Return the network with images in a layout, if it has a choice."""
    return network.clone(layout=layout) if isinstance(network, LaidOutNetwork) else network


@dataclass(frozen=True, eq=False)
class _LoweringRequest:
    """Everything that the choice of a run's lowerings depends on."""

    recipe: Recipe
    dataset: Dataset
    built: Built
    backend: Backend
    tuning: Tuning
    reporter: Reporter
    chosen: dict[Layout, LoweringChoice] = field(default_factory=dict)
    """The choices so far."""

    @property
    def network(self) -> nn.Module:
        """The network."""
        return self.built.parts.network

    @property
    def batch(self) -> int:
        """Samples in a microbatch."""
        train = self.recipe.train
        return microbatch_size(train.batch_size, train.accumulate_steps, self.num_shards)

    @property
    def num_shards(self) -> int:
        """Number of shards of a batch, each computed by itself."""
        devices = self.backend.placement.parts
        shards = shards_of(self.recipe.parallel, self.recipe.train.batch_size, devices)
        return 1 if shards is None else shards.count

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Show a clock while something is tuned."""
        with self.reporter.clock(f"tuning {name}"):
            yield

    def problems_in(self, layout: Layout) -> tuple[Problem, ...]:
        """Return the problems of the network with images in a layout."""
        parts = replace(self.built.parts, network=_in_layout(self.network, layout))
        eval_batch = self.dataset.eval_order.batch_size // self.num_shards
        return list_problems(parts, self.built.state, self.batch, eval_batch)

    def chosen_in(self, layout: Layout) -> LoweringChoice:
        """Return the best lowerings with images in a layout."""
        if layout not in self.chosen:
            problems = self.problems_in(layout)
            chosen = self.backend.choose_lowerings(problems, self.tuning, self.watch)
            self.chosen[layout] = replace(chosen, layout=layout)
        return self.chosen[layout]

    def time_us(self, layout: Layout) -> float:
        """Time the gradients with the best lowerings in a layout, in microseconds."""
        lowerings = self.chosen_in(layout).lowerings
        network = _in_layout(self.network, layout).clone(policy=lowerings)
        with self.watch(f"the whole network in {layout.upper()}"):
            parts, state = self.built.parts, self.built.state
            return time_gradients_us(network, parts, state, self.batch, self.backend.device)


def _in_best_layout(request: _LoweringRequest) -> LoweringChoice:
    """Choose in the layout that is fastest by a bank or the clock, else in that of the rule."""
    network, device = request.network, request.backend.device
    if request.tuning.mode == "off" or not isinstance(network, LaidOutNetwork):
        return request.chosen_in("nhwc")
    problems = request.problems_in("nhwc")
    can_choose = network.can_be_batch_last(image_shape(request.built.parts.image))
    if not (can_choose and has_choice(problems, device.platform)):
        return request.chosen_in("nhwc")
    key = layout_key(network, request.built.parts, request.batch, device)
    tuned = find_layout(key, request.tuning.mode, request.tuning.folder, request.time_us)
    by_rule = best_layout(problems, device.platform)
    chosen = request.chosen_in(tuned.best if tuned is not None else by_rule)
    return replace(chosen, layout_found=tuned)


def _report(
    chosen: LoweringChoice, tuning: Tuning, folder: RunFolder | None, reporter: Reporter
) -> None:
    """Report what was chosen, and write the result of tuning into the run directory."""
    if chosen.layout != "nhwc":
        reporter.stage("lower", f"images as CHWN: vectors of samples{_why(chosen)}")
    if any(how != DEFAULT for _, how in chosen.lowerings.chosen):
        reporter.stage("lower", _line(chosen))
    if chosen.tuned and folder is not None:
        run_dir = folder.path

        def write() -> None:
            path = write_result(chosen.to_result(), run_dir, datetime.now())
            reporter.stage("lower", f"{chosen.tuned} tuned, kept in {tuning.folder}; {path.name}")

        folder.accepted.add(write)


def _why(chosen: LoweringChoice) -> str:
    if chosen.layout_found is None:
        return ", for few channels"
    nhwc_ms, chwn_ms = (chosen.layout_found.times_us[each] / 1000 for each in ("nhwc", "chwn"))
    return f"; gradients {nhwc_ms:,.2f} -> {chwn_ms:,.2f} ms"


def write_choice(path: Path, chosen: LoweringChoice) -> None:
    """Write the choice as JSON."""
    write_whole(path, json.dumps(choice_to_document(chosen), indent=1) + "\n")


def choice_to_document(chosen: LoweringChoice) -> dict[str, Any]:
    """Return the choice as JSON: the layout of images, and the lowering of each problem."""
    computations = {problem: str(how) for problem, how in chosen.lowerings.chosen}
    return {"layout": chosen.layout, "computations": computations}


def choice_of_document(document: Any) -> LoweringChoice:
    """Return the choice that JSON describes. Raises ValueError, KeyError, TypeError."""
    layouts: tuple[Layout, ...] = get_args(Layout)
    layout = layouts[layouts.index(document["layout"])]
    computations = document["computations"].items()
    lowerings = Lowerings(tuple((p, Lowering.parse(how)) for p, how in computations))
    return LoweringChoice(lowerings, layout=layout)


def read_choice(path: Path) -> LoweringChoice:
    """Read what `write_choice` wrote. Raises RunError that names the file for anything else."""
    try:
        return choice_of_document(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path}: not the lowerings of a run ({type(error).__name__}: {error}); "
            "delete it to have them chosen again"
        ) from error


def _line(chosen: LoweringChoice) -> str:
    lowerings = [how for _, how in chosen.lowerings.chosen]
    onednn = sum(how.engine == "onednn" for how in lowerings)
    banked = sum(result.status == "bank_hit" for result in chosen.results)
    parts = [f"{len(lowerings)} computations: {banked} from the bank"]
    tuned = len(chosen.results) - banked
    parts += [f"{tuned} tuned"] if tuned else []
    parts += [f"{chosen.by_rule} by rule"] if chosen.by_rule else []
    line = ", ".join(parts) + f"; {onednn} by oneDNN"
    before_ms = sum(result.before_us for result in chosen.results) / 1000
    after_ms = sum(result.after.us for result in chosen.results) / 1000
    return line + (f"; {before_ms:,.1f} -> {after_ms:,.1f} ms" if chosen.results else "")
