"""Lower: choose how the layers of the network are computed on this device.

The choice decides the last bits of a run's numbers. So it is made once and written into the run
directory, and a resumed run reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.backends.base import Backend
from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.knowledge_bank import write_result
from pipeline.core.files.value_text import join_first
from pipeline.core.host.platforms import get_platform
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset, NetworkInputs
from pipeline.models.lowerings.candidates import require_formula
from pipeline.models.lowerings.problem import (
    DEFAULT,
    ConvolutionProblem,
    DenseProblem,
    Layout,
    LoweringPolicy,
    Problem,
    RecordingPolicy,
)
from pipeline.models.lowerings.tune.machine import describe_device
from pipeline.models.lowerings.tune.rule import (
    FEW_TRACED_CHANNELS,
    choose_layout_by_rule,
    choose_step_layout_by_rule,
    has_choice,
)
from pipeline.models.lowerings.tune.search import Timer, make_random_operand
from pipeline.models.lowerings.tune.tuner import LoweringChoice, Tuning, find_layout
from pipeline.models.modules.apply_layers import LaidOutNetwork
from pipeline.stages.build import Built
from pipeline.stages.record.run_directory import LOWERINGS, RunFolder
from pipeline.training.parallel.microbatches import compute_microbatch_size
from pipeline.training.parallel.parallel_spec import make_shards
from pipeline.training.parallel.ranks import Ranks
from pipeline.training.parallel.sharding_rules import make_sharding_rules
from pipeline.training.state import Inputs, TrainState
from pipeline.training.step_config import StepConfig
from pipeline.training.update import shape_inputs

if TYPE_CHECKING:
    from pipeline.models.imported.with_lowerings import UnreplacedOperation

MAX_NAMED = 3
"""Most unlowered operations that a line of the log names."""

TUNING_S = 24 * 3600.0
"""Most seconds that other processes wait while the first process times lowerings."""


def lower(
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    folder: RunFolder | None,
    reporter: Reporter,
) -> Built:
    """Return the step with the fastest lowerings of its layers on the device.

    An earlier choice in the run's `folder` is used again. Otherwise a choice is made and written
    there, with the result of tuning. The first process chooses for all. In eager mode the step is
    returned unchanged. Raises RunError for a choice or a bank that can't be read.
    """
    step_config = built.step_config
    if recipe.train.mode == "eager":
        return built
    # A traced network has `lowerings`, which replace operations. A network of layers has a policy.
    if step_config.lowerings is not None:
        built = replace(built, single_steps=_needs_single_steps(recipe, built, backend, reporter))
    elif not hasattr(step_config.network, "policy"):
        return built
    if make_sharding_rules(recipe.parallel) is not None:
        # XLA can't divide the operations of lowerings among devices.
        return built

    def choose() -> dict[str, Any]:
        file = folder.path / LOWERINGS if folder else None
        earlier = read_choice(file) if file is not None and file.exists() else None
        banks = cache_root(recipe.cache) / "autotune"
        fixed = earlier.lowerings if earlier is not None else None
        tuning = Tuning(recipe.autotune, recipe.autotune_search, banks, fixed=fixed)
        request = _LoweringRequest(recipe, dataset, built, backend, tuning, reporter)
        if earlier is not None:
            require_layout(step_config, earlier.layout, file)
            # With `fixed`, this only checks that the device can compute the earlier lowerings.
            choice = request.choose_in(earlier.layout)
            reporter.print_detail("lower", f"as before: {file}")
            return choice.to_document()
        choice = _choose_layout(request)
        _report(choice, tuning, folder, reporter)
        if folder is not None:
            folder.accepted.add(partial(write_choice, folder.path / LOWERINGS, choice))
        return choice.to_document()

    ranks = folder.ranks if folder is not None else Ranks()
    choice = LoweringChoice.from_document(ranks.agree(choose, TUNING_S))
    laid_out = lay_out(step_config, choice.layout)
    return replace(built, step_config=with_policy(laid_out, choice.lowerings))


def _needs_single_steps(recipe: Recipe, built: Built, backend: Backend, reporter: Reporter) -> bool:
    """Report unlowered operations; return whether the run has no loop, so as not to slow them."""
    unlowered = list_unlowered_operations(built.step_config, built.state, recipe.train.batch_size)
    if not unlowered:
        return False
    names = join_first(list(map(str, unlowered)), MAX_NAMED, "; ", "; ")
    reporter.print_detail("lower", f"left to XLA: {names}")
    has_slow_loops = get_platform(backend.device.platform).has_slow_loops
    is_slow = has_slow_loops and any(operation.is_convolution for operation in unlowered)
    if is_slow and recipe.train.mechanism == "loop":
        reporter.warn("train.mechanism = loop: slows such convolutions down; soft has no loop")
    elif is_slow:
        reporter.print_detail(
            "lower", "mechanism soft: in a loop over steps such convolutions are slow"
        )
    return is_slow and recipe.train.mechanism != "loop"


def _can_be_chwn(step_config: StepConfig, network: LaidOutNetwork) -> bool:
    """Return whether the network reads one image, and can be computed in CHWN."""
    inputs = step_config.inputs
    return inputs.image is not None and network.can_be_batch_last(inputs.shape)


def require_layout(step_config: StepConfig, layout: Layout, file: Path | None) -> None:
    """Raise RunError if the network can't be computed in the layout of an earlier choice."""
    network = step_config.network
    if layout == "nhwc" or not isinstance(network, LaidOutNetwork):
        return
    if not _can_be_chwn(step_config, network):
        raise RunError(
            f"{file}: layout {layout}: a layer of this network can't be computed in it; must be "
            "nhwc; delete the file to choose the lowerings again"
        )


def lay_out(step_config: StepConfig, layout: Layout) -> StepConfig:
    """Return the step with images in a layout; unchanged if its network has only one layout."""
    if step_config.lowerings is not None:
        return replace(step_config, lowerings=replace(step_config.lowerings, layout=layout))
    if isinstance(step_config.network, LaidOutNetwork):
        return replace(step_config, network=step_config.network.clone(layout=layout))
    return step_config


@dataclass(frozen=True, eq=False)
class _LoweringRequest:
    """Inputs of the choice of a run's lowerings."""

    recipe: Recipe
    dataset: Dataset
    built: Built
    backend: Backend
    tuning: Tuning
    reporter: Reporter
    choices: dict[Layout, LoweringChoice] = field(default_factory=dict)
    """The choices so far, by layout."""

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch."""
        train = self.recipe.train
        return compute_microbatch_size(train.batch_size, train.accumulate_steps, self.num_shards)

    @property
    def num_shards(self) -> int:
        """Number of shards of a batch."""
        devices = self.backend.placement.parts
        shards = make_shards(self.recipe.parallel, self.recipe.train.batch_size, devices)
        return 1 if shards is None else shards.count

    def watch(self, name: str) -> AbstractContextManager[None]:
        """Show a clock while the body tunes `name`."""
        return self.reporter.clock(f"tuning {name}")

    def list_problems(self, layout: Layout) -> tuple[Problem, ...]:
        """List the problems of the network with images in a layout."""
        step_config = lay_out(self.built.step_config, layout)
        eval_batch = self.dataset.eval_order.batch_size // self.num_shards
        return list_problems(
            step_config,
            self.built.state,
            self.microbatch_size,
            eval_batch,
            self.built.train_inputs,
        )

    def choose_in(self, layout: Layout) -> LoweringChoice:
        """Return the best lowerings with images in a layout."""
        if layout not in self.choices:
            problems = self.list_problems(layout)
            choice = self.backend.choose_lowerings(problems, self.tuning, self.watch)
            self.choices[layout] = replace(choice, layout=layout)
        return self.choices[layout]

    def time_us(self, layout: Layout) -> float:
        """Return the microseconds of the gradients with the best lowerings in a layout."""
        step_config = self.built.step_config
        policy = self.choose_in(layout).lowerings
        network = lay_out(step_config, layout).network.clone(policy=policy)
        with self.watch(f"the whole network in {layout.upper()}"):
            return time_gradients_us(
                network, step_config, self.built.state, self.microbatch_size, self.backend.device
            )


def _choose_layout(request: _LoweringRequest) -> LoweringChoice:
    """Return lowerings in the layout that is fastest by a bank or by timing, or else by a rule."""
    step_config = request.built.step_config
    device = request.backend.device
    network = step_config.network
    if request.tuning.mode != "off" and step_config.lowerings is not None:
        return request.choose_in(_choose_traced_layout(request))
    if request.tuning.mode == "off" or not isinstance(network, LaidOutNetwork):
        return request.choose_in("nhwc")
    problems = request.list_problems("nhwc")
    if not (_can_be_chwn(step_config, network) and has_choice(problems, device.platform)):
        return request.choose_in("nhwc")
    key = make_layout_key(network, step_config, request.microbatch_size, device)
    tuned = find_layout(key, request.tuning.mode, request.tuning.folder, request.time_us)
    layout = tuned.best if tuned is not None else choose_layout_by_rule(problems, device.platform)
    return replace(request.choose_in(layout), timed_layout=tuned)


def _choose_traced_layout(request: _LoweringRequest) -> Layout:
    """Return the layout of a traced network's convolutions. It is NHWC if XLA computes one of them,
    and with batch norm, whose sums would read the other layout."""
    built, batch = request.built, request.microbatch_size
    if built.state.collections or list_unlowered_operations(built.step_config, built.state, batch):
        return "nhwc"
    problems, platform = request.list_problems("nhwc"), request.backend.device.platform
    return choose_step_layout_by_rule(problems, platform, FEW_TRACED_CHANNELS)


def _report(
    choice: LoweringChoice, tuning: Tuning, folder: RunFolder | None, reporter: Reporter
) -> None:
    """Report a choice, and write the result of tuning into the run directory."""
    if choice.layout != "nhwc":
        reason = ": few channels"
        if choice.timed_layout is not None:
            nhwc_ms = choice.timed_layout.times_us["nhwc"] / 1000
            chwn_ms = choice.timed_layout.times_us["chwn"] / 1000
            reason = f"; gradients {nhwc_ms:,.2f} -> {chwn_ms:,.2f} ms"
        reporter.print_detail("lower", f"images as CHWN, to vectorize over samples{reason}")
    if any(lowering != DEFAULT for _, lowering in choice.lowerings.chosen):
        reporter.print_detail("lower", _format_line(choice))
    if choice.num_timed and folder is not None:
        run_dir = folder.path

        def write() -> None:
            path = write_result(choice.to_result(), run_dir, datetime.now())
            reporter.print_stage(
                "lower", f"{choice.num_timed} tuned, kept in {tuning.folder}; {path.name}"
            )

        folder.accepted.add(write)


def _format_line(choice: LoweringChoice) -> str:
    """Return a line for the log: the origins of the lowerings, and the time that they save."""
    lowerings = [lowering for _, lowering in choice.lowerings.chosen]
    num_onednn = sum(lowering.engine == "onednn" for lowering in lowerings)
    num_banked = sum(result.status == "bank_hit" for result in choice.results)
    num_tuned = len(choice.results) - num_banked
    line = f"{len(lowerings)} computations: {num_banked} from the bank"
    if num_tuned:
        line += f", {num_tuned} tuned"
    if choice.num_by_rule:
        line += f", {choice.num_by_rule} by rule"
    line += f"; {num_onednn} by oneDNN"
    if choice.results:
        before_ms = sum(result.before_us for result in choice.results) / 1000
        after_ms = sum(result.after.us for result in choice.results) / 1000
        line += f"; {before_ms:,.1f} -> {after_ms:,.1f} ms"
    return line


def write_choice(path: Path, choice: LoweringChoice) -> None:
    """Write a choice as JSON."""
    write_whole(path, json.dumps(choice.to_document(), indent=1) + "\n")


def read_choice(path: Path) -> LoweringChoice:
    """Read a file of `write_choice`. Raises RunError for any other file."""
    try:
        choice = LoweringChoice.from_document(read_json(path))
        for problem, lowering in choice.lowerings.chosen:
            require_formula(problem, lowering)
        return choice
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path}: must be the lowerings of a run ({type(error).__name__}: {error}); "
            "delete it to choose them again"
        ) from error


def list_problems(
    step_config: StepConfig,
    state: TrainState,
    train_batch: int,
    eval_batch: int,
    train_inputs: Sequence[NetworkInputs] = (),
) -> tuple[Problem, ...]:
    """Trace a step and an evaluation, and return their computations that can be lowered.

    Gradients are computed as in training, without the gradient of the network's inputs: nothing
    needs it.
    """

    def trace(step_config: StepConfig, batch: int, train: bool) -> list[Problem]:
        listing = RecordingPolicy()
        recorded = with_policy(step_config, listing)
        forward = recorded.apply_lowerings(_make_forward(recorded.network, train))
        inputs = shape_inputs(step_config.inputs, batch)
        # Each layer also chooses the lowerings of its gradients in the forward pass.
        jax.eval_shape(forward, inputs, state.params, state.collections)
        return list(listing.problems)

    problems: list[Problem] = []
    for inputs in train_inputs or (step_config.inputs,):
        train_problems = trace(replace(step_config, inputs=inputs), train_batch, True)
        problems += [item for item in train_problems if not _is_input_gradient(item, inputs.shape)]
    eval_problems = trace(step_config, eval_batch, False)
    problems += [problem for problem in eval_problems if problem.role == "forward"]
    return tuple(dict.fromkeys(problems))


def list_unlowered_operations(
    step_config: StepConfig, state: TrainState, batch: int
) -> tuple[UnreplacedOperation, ...]:
    """List the convolutions and max pools of an imported network that no lowering replaces."""
    from pipeline.models.imported.with_lowerings import list_unreplaced, scope_root

    forward = _make_forward(step_config.network, True)
    root = scope_root(step_config.network)
    inputs = shape_inputs(step_config.inputs, batch)
    traced = jax.make_jaxpr(forward)(inputs, state.params, state.collections)
    return list_unreplaced(traced, root=root)


def with_policy(step_config: StepConfig, policy: LoweringPolicy) -> StepConfig:
    """Return the configuration with a policy of lowerings for its network."""
    if step_config.lowerings is not None:
        return replace(step_config, lowerings=replace(step_config.lowerings, policy=policy))
    return replace(step_config, network=step_config.network.clone(policy=policy))


def _make_forward(network: nn.Module, train: bool) -> Callable[[Inputs, Any, Any], Any]:
    """Return the function (inputs, params, collections) -> (logits, new collections)."""

    def call(inputs: Inputs, params: Any, collections: Any) -> Any:
        variables = {"params": params, **collections}
        rngs = {"dropout": jax.random.key(0)}
        return network.apply(variables, inputs, train=train, mutable=[*collections], rngs=rngs)

    return call


def _is_input_gradient(problem: Problem, shape: tuple[int, ...]) -> bool:
    """Return whether a problem is, by its shape, the gradient of the network's only input."""
    if problem.role != "input_grad":
        return False
    if isinstance(problem, ConvolutionProblem):
        return (*problem.window.sizes, problem.channels) == shape  # height, width, channels
    return isinstance(problem, DenseProblem) and problem.channels == prod(shape)


def time_gradients_us(
    network: nn.Module, step_config: StepConfig, state: TrainState, batch: int, device: jax.Device
) -> float:
    """Return the microseconds of the gradients of all parameters, timed on random numbers."""
    forward = _make_forward(network, True)

    def compute_loss(params: Any, inputs: Inputs, collections: Any) -> Array:
        logits, _ = forward(inputs, params, collections)
        return jnp.square(logits).mean()

    def compute_gradients(operands: tuple[Inputs, Any, Any]) -> Any:
        inputs, params, collections = operands
        return jax.grad(compute_loss)(params, inputs, collections)

    shapes = (state.params, state.collections)
    weights = jax.tree.map(lambda shape: make_random_operand(shape.shape, shape.dtype), shapes)
    inputs = step_config.inputs.pack(
        lambda array: make_random_operand((batch, *array.shape), array.dtype)
    )
    return Timer((inputs, *weights), device).time_us(compute_gradients)


def make_layout_key(
    network: LaidOutNetwork, step_config: StepConfig, batch: int, device: jax.Device
) -> str:
    """Return the key of a network, its samples and the device in a knowledge bank."""
    sample = step_config.inputs.shape
    digest = hashlib.sha256(network.structure(sample).encode()).hexdigest()[:16]
    shape = "x".join(map(str, (batch, *sample)))
    return f"network {digest} {shape} {network.dtype} on {describe_device(device)}"
