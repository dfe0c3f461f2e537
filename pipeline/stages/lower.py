"""Lower: settle how every convolution of the network is computed on this device.

Settled once a run: the choice is part of what makes a run repeat itself bit for bit, so it is kept
in the run directory and a resumed run takes it from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from pipeline.backends.autotune.tuner import Chosen, Tuning
from pipeline.backends.base import Backend
from pipeline.bounded_file import read_json
from pipeline.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.errors import RunError
from pipeline.knowledge_bank import write_result
from pipeline.models.layout import Layout, best_layout
from pipeline.models.lowerings.lowering import ROLES, Listing, Lowering, Lowerings, Problem
from pipeline.models.network import Network
from pipeline.observe.reporter import Reporter
from pipeline.run_directory import LOWERINGS
from pipeline.stages.build import Built
from pipeline.stages.data import Dataset
from pipeline.training.step import StepParts, image_shape
from pipeline.whole_file import write_whole


def lower(
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    run_dir: Path | None,
    reporter: Reporter,
) -> Built:
    """The same step, its convolutions computed as chosen for the device.

    A directory that has a choice already keeps it; one that has none gets it, and the result of
    tuning. Operations that run by themselves stay as they are. Raises RunError for a choice or a
    bank that can't be read.
    """
    network = built.parts.network
    if not isinstance(network, Network) or recipe.train.mode == "eager":
        return built
    file = run_dir / LOWERINGS if run_dir else None
    kept = read_choice(file) if file is not None and file.exists() else None
    chosen = _choose(recipe, dataset, built, backend, kept, run_dir, reporter)
    if kept is not None:
        reporter.stage("lower", f"as before: {file}")
    elif file is not None:
        write_choice(file, chosen)
    lowered = network.clone(chooser=chosen.lowerings, layout=chosen.layout)
    return replace(built, parts=replace(built.parts, network=lowered))


def _choose(
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    kept: Chosen | None,
    run_dir: Path | None,
    reporter: Reporter,
) -> Chosen:
    problems = list_problems(
        built.parts,
        built.state,
        recipe.train.batch_size // recipe.train.accumulate_steps,
        dataset.eval_order.batch_size,
    )
    network, platform = built.parts.network, backend.device.platform
    assert isinstance(network, Network)
    folder = cache_root(recipe.cache) / "autotune"
    layout = best_layout(network.layers, problems, platform) if kept is None else kept.layout
    tuning = Tuning(
        recipe.autotune,
        recipe.autotune_search,
        folder,
        kept.lowerings if kept is not None else None,
        layout,
    )

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        with reporter.clock(f"tuning {name}"):
            yield

    chosen = backend.choose_lowerings(problems, tuning, watch)
    if chosen.layout != "nhwc" and kept is None:
        nothing = "; nothing to tune" if recipe.autotune in ("tune", "repeat") else ""
        reporter.stage("lower", f"images as CHWN: vectors of samples, for few channels{nothing}")
    if chosen.found or chosen.by_rule:
        reporter.stage("lower", _line(chosen))
    if chosen.tuned and run_dir is not None:
        path = write_result(chosen.to_result(), run_dir, datetime.now())
        reporter.stage("lower", f"{chosen.tuned} tuned, kept in {tuning.bank}; {path.name}")
    return chosen


def list_problems(
    parts: StepParts, state: Any, train_batch: int, eval_batch: int
) -> tuple[Problem, ...]:
    """Every computation of a convolution in a step or an evaluation, by tracing the network.

    Gradients are needed of training alone, and none of the images that the network is given.
    """
    trained, evaluated = (
        _traced(parts, state, train_batch, True),
        _traced(parts, state, eval_batch, False),
    )
    height, width, channels = image_shape(parts.image)
    problems = [p for p in trained if not _reads_input(p, (height, width), channels)]
    return tuple(dict.fromkeys([*problems, *(p for p in evaluated if p.role == "forward")]))


def _traced(parts: StepParts, state: Any, batch: int, train: bool) -> tuple[Problem, ...]:
    listing = Listing()
    network: nn.Module = parts.network.clone(chooser=listing)
    images = jax.ShapeDtypeStruct((batch, *image_shape(parts.image)), jnp.float32)

    def call(state: Any, images: Any) -> Any:
        weights = {"params": state.params, "batch_stats": state.batch_stats}
        key = jax.random.key(0)
        return network.apply(
            weights, images, train=train, mutable=["batch_stats"], rngs={"dropout": key}
        )

    jax.eval_shape(call, state, images)
    return tuple(listing.problems)


def _reads_input(problem: Problem, sizes: tuple[int, int], channels: int) -> bool:
    """Whether this is the gradient of the network's own input, which nobody asks for."""
    at_input = problem.window.sizes == sizes and problem.channels == channels
    return problem.role == ROLES[1] and at_input


def write_choice(path: Path, chosen: Chosen) -> None:
    """As JSON: the layout of images, and each problem, as text, with what computes it."""
    convolutions = {problem: str(how) for problem, how in chosen.lowerings.chosen}
    document = {"layout": chosen.layout, "convolutions": convolutions}
    write_whole(path, json.dumps(document, indent=1) + "\n")


def read_choice(path: Path) -> Chosen:
    """What `write_choice` wrote. Raises RunError that names the file for anything else."""
    try:
        document = read_json(path)
        layouts: tuple[Layout, ...] = get_args(Layout)
        layout = layouts[layouts.index(document["layout"])]
        convolutions = document["convolutions"].items()
        return Chosen(
            Lowerings(tuple((p, Lowering.parse(how)) for p, how in convolutions)), layout=layout
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path}: not the lowerings of a run ({type(error).__name__}: {error}); "
            "delete it to have them chosen again"
        ) from error


def _line(chosen: Chosen) -> str:
    ways = [how for _, how in chosen.lowerings.chosen]
    onednn = sum(way.engine == "onednn" for way in ways)
    banked = len(chosen.found) - chosen.tuned
    parts = [f"{len(ways)} computations of convolutions: {banked} from the bank"]
    parts += [f"{chosen.tuned} tuned"] if chosen.tuned else []
    parts += [f"{chosen.by_rule} by rule"] if chosen.by_rule else []
    line = ", ".join(parts) + f"; {onednn} by oneDNN"
    before_ms = sum(found.before_us for found in chosen.found) / 1000
    after_ms = sum(found.after.us for found in chosen.found) / 1000
    return line + (f"; {before_ms:,.1f} -> {after_ms:,.1f} ms" if chosen.found else "")
