"""Trial of the change that a verdict advises: it is measured for a few steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from rich.console import Console

from pipeline.backends.base import Backend, Executable
from pipeline.config.compose import check_tree
from pipeline.config.recipe import Recipe
from pipeline.core.errors import PipelineError
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.engine.schedule import RunSchedule
from pipeline.inspect.profiler.step_profile import PredictedChange, StepVerdict
from pipeline.inspect.profiler.verdict import RESIDENT, Evidence
from pipeline.models.modules.apply_layers import intercept_layers
from pipeline.stages.autosink.dispatch_costs import TimedRuns, Variant
from pipeline.stages.build import build
from pipeline.stages.fit_memory import FittedExecutable, compile_to_fit
from pipeline.stages.lower import lower

MAX_COMPILE_S = 30.0
MAX_READ_S = 30.0
MAX_STEP_MS = 200.0
"""Limits beyond which a trial would take too long."""
ROUNDS = 5
TRIAL_S = 0.15
MIN_GAIN = 1.03
"""Least gain of a change that helps."""
PRECISIONS = {"converting": "O0", "memory-bound": "bf16", "compute-bound": "bf16"}
"""Precision that may help, by verdict."""


@dataclass(frozen=True)
class Trial:
    """A change to try: keys of the recipe, or a layer to leave out."""

    what: str
    keys: tuple[tuple[str, Any], ...] = ()
    """Keys of the section `train`, with their values."""
    layer: str | None = None


def try_change(
    verdict: StepVerdict,
    recipe: Recipe,
    dataset: Dataset,
    backend: Backend,
    executable: Executable,
    evidence: Evidence,
) -> StepVerdict:
    """Return the verdict with the measured gain of its change, or of another candidate.

    Candidates are another precision, resident data instead of streamed data, and a step without the
    layer that the verdict names. The verdict stays as it is if the run continues after its profile,
    or if reading, compiling or a step takes long.
    """
    trial = _choose_trial(verdict, recipe, dataset, evidence)
    takes_long = executable.report.compile_s > MAX_COMPILE_S or evidence.step_ms > MAX_STEP_MS
    if trial is None or takes_long or recipe.profile.mode != "only":
        return verdict
    tree = recipe.whole_tree()
    tree["train"].update(trial.keys)
    # Both contexts yield a list, which is empty if no layer could be left out.
    leave_out = _leave_out_layer(trial.layer) if trial.layer is not None else nullcontext([True])
    try:
        changed_recipe = check_tree(tree)
        with Reporter(console=Console(file=StringIO())) as silent, leave_out as left_out:
            built = build(changed_recipe, dataset, silent)
            built = lower(changed_recipe, dataset, built, backend, None, silent)
            changed = compile_to_fit(changed_recipe, dataset, built, backend, silent)
        if not left_out:
            return verdict
        sides = [side for side in (executable, changed) if isinstance(side, FittedExecutable)]
        samples_at_once = [side.samples_at_once for side in sides]
        schedule = built.run_schedule
        gain = _measure_gain(recipe, changed_recipe, schedule, executable, changed, evidence)
        if samples_at_once != [side.samples_at_once for side in sides]:
            # Out of memory: the step was traced again, with the layer.
            return verdict
    except PipelineError:
        # The device doesn't support the change, or its losses aren't finite.
        return verdict
    change = PredictedChange(trial.what, evidence.step_ms / gain, gain, "tried here")
    if gain < MIN_GAIN and verdict.name == "callback-bound":
        # The callback is called even if nothing reads its result, so the trial measures no gain.
        return verdict
    if gain < MIN_GAIN:
        return replace(verdict, change=None, tried=(change,))
    return replace(verdict, change=change)


def _choose_trial(
    verdict: StepVerdict, recipe: Recipe, dataset: Dataset, evidence: Evidence
) -> Trial | None:
    """Return the change to try for a verdict; None without a candidate."""
    if verdict.layer is not None:
        assert verdict.change is not None, "it names the layer"
        return Trial(verdict.change.what, layer=verdict.layer)
    if verdict.change is not None and verdict.change.what == RESIDENT:
        steps = dataset.train_order.steps_per_epoch
        read_s = sum(evidence.loader.prepare_ms_per_step.values()) * steps / 1000
        return Trial(RESIDENT, (("feed", "resident"),)) if read_s <= MAX_READ_S else None
    precision = PRECISIONS.get(verdict.name)
    is_fixed = recipe.train.to_float or recipe.parallel.mode != "none"
    if precision is None or precision == evidence.precision or is_fixed:
        return None
    return Trial(f"train.precision={precision}", (("precision", precision),))


@contextmanager
def _leave_out_layer(path: str) -> Iterator[list[bool]]:
    """Leave out a layer in the body's traces; yield a list, empty if the layer changes shapes."""
    left_out: list[bool] = []

    def skip_layer(layer: Any, compute: Any, x: Any, context: Any) -> Any:
        result = compute(x)
        if str(context) != path or (result.shape, result.dtype) != (x.shape, x.dtype):
            return result
        left_out.append(True)
        return x

    with intercept_layers(skip_layer):
        yield left_out


def _measure_gain(
    recipe: Recipe,
    changed_recipe: Recipe,
    schedule: RunSchedule,
    before: Executable,
    after: Executable,
    evidence: Evidence,
) -> float:
    """Return the median ratio of the step times before and after, in alternating trials.

    With streamed data the time before is the profile's, since a trial would read the first windows
    again.
    """
    streams = before.loader.kind == "stream"
    ratios = []
    # Reading ahead would compete with the trial for the processor.
    before.loader.close()
    with (
        TimedRuns(recipe, schedule, before, is_terminal=False) as old,
        TimedRuns(changed_recipe, schedule, after, is_terminal=False) as new,
    ):
        first = new if streams else old
        single_ms = max(1e-3, first.time(Variant(None, "none"), 4).step_ms)
        sink_steps = max(1, int(1000 * TRIAL_S / 3 / single_ms))
        if streams:
            sink_steps = min(sink_steps, evidence.sink_steps or 1)
        variant = Variant(sink_steps, "loop")
        steps = sink_steps * max(3, int(1000 * TRIAL_S / (single_ms * sink_steps)))
        for _ in range(ROUNDS):
            old_ms = evidence.step_ms if streams else old.time(variant, steps).step_ms
            ratios.append(old_ms / new.time(variant, steps).step_ms)
    return statistics.median(ratios)
