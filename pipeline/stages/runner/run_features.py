"""The list of a run's features, and the features that a recipe uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.core.errors import RecipeError, first_line
from pipeline.core.files.value_text import show
from pipeline.engine.schedule import is_due
from pipeline.stages.runner.run_feature import RestoreRun, RunFeature

if TYPE_CHECKING:
    from pipeline.backends.base import Estimate, Executable
    from pipeline.checkpoint.checkpointer import Copies
    from pipeline.checkpoint.host_state import HostState
    from pipeline.config.recipe import Recipe
    from pipeline.data.inputs import Dataset
    from pipeline.engine.callbacks.callback import Monitor
    from pipeline.engine.history import Examination, History
    from pipeline.stages.autosink.sink_plan import SinkPlan
    from pipeline.stages.compile import CompileOptions
    from pipeline.stages.record.summary import Summary
    from pipeline.stages.runner.context import BuiltRun, CompiledRun, RunContext, RunOptions
    from pipeline.stages.runner.evaluations import Evaluations
    from pipeline.training.parallel.ranks import Ranks
    from pipeline.training.state import TrainState


class Listed(NamedTuple):
    """A feature of the list."""

    key: str
    """The key of the recipe that asks for it, for messages."""
    is_used: Callable[[Recipe], bool]
    place: str
    """`module:class`, a RunFeature, which is imported if a recipe uses it."""
    is_optional: bool = False
    """Whether a run goes on without it if its module isn't installed."""


RUN_FEATURES = (
    Listed(
        "train.resume",
        lambda recipe: recipe.train.resume is not None,
        "pipeline.stages.runner.resumed_run:ResumedRun",
    ),
    Listed(
        "launch",
        lambda recipe: recipe.launch.name != "none",
        "pipeline.stages.launch.join:JoinedProcesses",
    ),
    Listed(
        "launch.processes",
        lambda recipe: recipe.launch.name == "local",
        "pipeline.stages.launch.local:LocalRun",
    ),
    Listed(
        "privacy",
        lambda recipe: recipe.privacy is not None,
        "pipeline.stages.private_run:PrivateRun",
    ),
    Listed(
        "train.features",
        lambda recipe: any(feature.name == "lora" for feature in recipe.train.features),
        "pipeline.stages.runner.adapted_run:AdaptedRun",
    ),
    Listed(
        "parallel.mode",
        lambda recipe: recipe.parallel.mode == "auto",
        "pipeline.stages.plan_devices:PlannedDevices",
    ),
    Listed(
        "device",
        lambda recipe: recipe.device.is_emulated,
        "pipeline.stages.estimate:ModelledTimes",
    ),
    Listed(
        "train.memory",
        lambda recipe: recipe.train.memory is not None,
        "pipeline.stages.fit_memory:MemoryLimit",
    ),
    Listed(
        "train.sink_size",
        lambda recipe: recipe.train.chooses_sink,
        "pipeline.stages.autosink.choose_sink:SinkSearch",
    ),
    Listed(
        "train.minutes",
        lambda recipe: recipe.train.deadline is not None,
        "pipeline.stages.choose_steps:DeadlineSteps",
    ),
    Listed(
        "profile.mode",
        lambda recipe: recipe.profile.mode != "off",
        "pipeline.inspect.profiler.run_profile:RunProfile",
    ),
    Listed(
        "dump.steps",
        lambda recipe: recipe.dump.steps is not None,
        "pipeline.inspect.dumps.dump_step:DumpedSteps",
    ),
    Listed(
        "checkpoint.prefix",
        lambda recipe: (recipe.checkpoint.prefix or recipe.checkpoint.directory) is not None,
        "pipeline.stages.runner.checkpoint_copies:CheckpointCopies",
    ),
    Listed(
        "checkpoint.mirror",
        lambda recipe: recipe.checkpoint.mirror is not None,
        "pipeline.stages.runner.run_mirror:RunMirror",
    ),
    Listed(
        "stages",
        lambda recipe: "train" in recipe.stages,
        "pipeline.inspect.autopsy.run_autopsy:RunAutopsy",
        is_optional=True,
    ),
    Listed(
        "privacy.audit",
        lambda recipe: bool(recipe.privacy is not None and recipe.privacy.audit),
        "pipeline.stages.private_run:CanaryAudit",
    ),
    Listed(
        "eval.robustness",
        lambda recipe: bool(recipe.eval.robustness),
        "pipeline.stages.measure_robustness:FinalRobustness",
    ),
    Listed(
        "receipt.every_steps",
        lambda recipe: recipe.receipt.every_steps is not None and "train" in recipe.stages,
        "pipeline.inspect.receipts.run_receipt:RunReceipt",
    ),
)
"""All features of this package, in the order in which a run calls them."""


def open_features(recipe: Recipe) -> RunFeatures:
    """Import and make the features that a recipe uses.

    Those of plug-ins are last. Raises RecipeError if one isn't installed or can't be made.
    """
    used = [listed for listed in RUN_FEATURES if listed.is_used(recipe)]
    loaded = [_load(listed) for listed in used]
    features = [cls(recipe) for cls in loaded if cls is not None]
    for position, spec in enumerate(recipe.run_features):
        try:
            features.append(_require_feature(spec.open(recipe)))
        except Exception as error:  # a plug-in can raise any error
            key = f"run_features.{position} ({spec.name})"
            reason = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise RecipeError(f"{key}: {reason}{first_line(error)}") from error
    return RunFeatures(features)


def _require_feature(feature: object) -> RunFeature:
    if not isinstance(feature, RunFeature):
        raise ValueError(f"{show(feature)}: must be an instance of a subclass of RunFeature")
    return feature


def _load(listed: Listed) -> type[RunFeature] | None:
    """Import a feature; None if an optional one isn't installed. Raises RecipeError for others."""
    module, _, name = listed.place.partition(":")
    try:
        feature: type[RunFeature] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        if listed.is_optional:
            return None
        raise RecipeError(
            f"{listed.key}: needs {module}, and this installation has no {error.name}"
        ) from error
    return feature


class RunFeatures(RunFeature):
    """Several features, called one after another. Of those that decide, the first decides."""

    def __init__(self, features: Sequence[RunFeature] = ()) -> None:
        self._features = tuple(features)

    @property
    def restore_s(self) -> float | None:  # type: ignore[override]
        return max((each.restore_s for each in self._features if each.restore_s), default=None)

    def launch(self, recipe: Recipe, options: RunOptions, features: RunFeature) -> Summary | None:
        summaries = (each.launch(recipe, options, features) for each in self._features)
        return next((summary for summary in summaries if summary is not None), None)

    @contextmanager
    def join(self, recipe: Recipe) -> Iterator[Ranks | None]:
        with ExitStack() as stack:
            joined = [stack.enter_context(each.join(recipe)) for each in self._features]
            yield next((ranks for ranks in joined if ranks is not None), None)

    def fit(self, recipe: Recipe, processes: int) -> Recipe:
        for each in self._features:
            recipe = each.fit(recipe, processes)
        return recipe

    def find_run(self, recipe: Recipe) -> Path | None:
        runs = (each.find_run(recipe) for each in self._features)
        return next((run_dir for run_dir in runs if run_dir is not None), None)

    def restore_run(self, recipe: Recipe, run_dir: Path | None) -> RestoreRun | None:
        runs = (each.restore_run(recipe, run_dir) for each in self._features)
        return next((restore for restore in runs if restore is not None), None)

    def resume(self, recipe: Recipe, run_dir: Path) -> Recipe:
        for each in self._features:
            recipe = each.resume(recipe, run_dir)
        return recipe

    def begin(self, context: RunContext) -> None:
        for each in self._features:
            each.begin(context)

    def change_data(self, context: RunContext, dataset: Dataset) -> Dataset:
        for each in self._features:
            dataset = each.change_data(context, dataset)
        return dataset

    def plan(self, built_run: BuiltRun) -> BuiltRun:
        for each in self._features:
            built_run = each.plan(built_run)
        return built_run

    def price(self, built_run: BuiltRun) -> Estimate | None:
        estimates = (each.price(built_run) for each in self._features)
        return next((estimate for estimate in estimates if estimate is not None), None)

    def shorten(self, built_run: BuiltRun) -> BuiltRun:
        for each in self._features:
            built_run = each.shorten(built_run)
        return built_run

    def compile(self, built_run: BuiltRun, options: CompileOptions) -> Executable | None:
        executables = (each.compile(built_run, options) for each in self._features)
        return next((executable for executable in executables if executable is not None), None)

    def start_state(self, run: CompiledRun, state: TrainState, *, resumed: bool) -> TrainState:
        for each in self._features:
            state = each.start_state(run, state, resumed=resumed)
        return state

    def choose_sinks(
        self, run: CompiledRun, estimate: Estimate | None, host: HostState
    ) -> SinkPlan | None:
        plans = (each.choose_sinks(run, estimate, host) for each in self._features)
        return next((plan for plan in plans if plan is not None), None)

    def prepare(self, run: CompiledRun, sink: SinkPlan, step: int) -> CompiledRun:
        for each in self._features:
            run = each.prepare(run, sink, step)
        return run

    def check(self, run: CompiledRun) -> None:
        for each in self._features:
            each.check(run)

    @contextmanager
    def train(self, run: CompiledRun) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self._features:
                stack.enter_context(each.train(run))
            yield

    @contextmanager
    def copy_checkpoints(self, evaluations: Evaluations) -> Iterator[Sequence[Copies]]:
        with ExitStack() as stack:
            opened = [stack.enter_context(f.copy_checkpoints(evaluations)) for f in self._features]
            yield [copies for several in opened for copies in several]

    @property
    def monitors(self) -> Sequence[Monitor]:
        return [monitor for each in self._features for monitor in each.monitors]

    @property
    def state_steps(self) -> Sequence[int]:
        return sorted({step for each in self._features for step in each.state_steps})

    @property
    def state_periods(self) -> Sequence[int]:
        return sorted({period for each in self._features for period in each.state_periods})

    def see_state(self, state: TrainState, step: int) -> None:
        for each in self._features:
            if step in each.state_steps or is_due(step, each.state_periods):
                each.see_state(state, step)

    def advance(self, context: RunContext) -> None:
        for each in self._features:
            each.advance(context)

    def measure(self, run: CompiledRun, state: TrainState) -> Mapping[str, float]:
        measured: dict[str, float] = {}
        for each in self._features:
            measured |= each.measure(run, state)
        return measured

    def examine(self, run: CompiledRun, state: TrainState, step: int) -> Examination | None:
        examinations = (each.examine(run, state, step) for each in self._features)
        return next((found for found in examinations if found is not None), None)

    def record(self, run: CompiledRun, history: History) -> None:
        for each in self._features:
            each.record(run, history)

    def conclude_training(
        self, run: CompiledRun, estimate: Estimate | None, state: TrainState
    ) -> None:
        for each in self._features:
            each.conclude_training(run, estimate, state)

    def conclude(self, run: CompiledRun, state: TrainState) -> None:
        for each in self._features:
            each.conclude(run, state)
