"""Lines of a run of ten minutes or more, besides its end: its first loss, its memory, its first
checkpoint, and what would be shorter."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from pipeline.config.resolved_settings import LENGTH_UNITS, check_deadline, list_event_periods
from pipeline.core.files.value_text import format_bytes, format_duration
from pipeline.core.host.limits import find_usable_bytes
from pipeline.core.host.platforms import get_platform
from pipeline.engine.schedule import Event, list_multiples
from pipeline.stages.runner.context import CompiledRun
from pipeline.training.state import count_bytes

if TYPE_CHECKING:
    from pipeline.stages.runner.outlook import Outlook

EARLY_S = 60.0
"""Time to the first line with a loss from which on a shorter sink is proposed; the
proposal's is the same."""


def list_long_lines(run: CompiledRun, outlook: Outlook, first: int) -> Iterator[str]:
    """Yield the lines after the first one."""
    yield from describe_first_loss(run, outlook)
    yield from describe_memory(run)
    if "checkpoint" in run.context.recipe.stages:
        yield describe_checkpoints(run, outlook, first)
    for change in list_shorter_runs(run, outlook):
        yield f"shorter: {change}"


def describe_first_loss(run: CompiledRun, outlook: Outlook) -> Iterator[str]:
    """Yield when the first line with a loss is due, unless that is soon, and the key that makes it
    earlier."""
    recipe = run.context.recipe
    sink_steps = run.built.run_schedule.sink_steps or 1
    # A line is due at an end of a sink, and not more often than every `loss_every` steps.
    due_step = -(-recipe.monitor.loss_every // sink_steps) * sink_steps
    due_s = min(due_step, outlook.steps) * outlook.step_s
    if due_s < EARLY_S or not due_step:
        return
    early_steps = max(1, int(EARLY_S / outlook.step_s))
    keys = {"train.sink_size": sink_steps, "monitor.loss_every": recipe.monitor.loss_every}
    cure = " ".join(f"{key}={early_steps}" for key, steps in keys.items() if steps > early_steps)
    text = f"the first line with a loss after {format_duration(due_s)}"
    # Sinks that are counted are the length of the run.
    if cure and recipe.train.sink_epochs is None:
        every = format_duration(early_steps * outlook.step_s)
        text += f"; {cure} prints one every {every}, and changes the speed alone"
    yield text


def describe_memory(run: CompiledRun) -> Iterator[str]:
    """Yield the memory that training takes, if the program runs on this machine's processors."""
    programs = [item for item in run.executable.report.programs if item.figures is None]
    if not programs or not get_platform(run.backend.device.platform).is_host:
        return
    temporary_bytes = max(program.temporary_bytes for program in programs)
    needed_bytes = (
        count_bytes(run.built.state) + temporary_bytes + run.executable.loader.device_bytes
    )
    usable_bytes = find_usable_bytes()
    verdict = "fits" if needed_bytes <= usable_bytes else "may not fit"
    available = f"{format_bytes(usable_bytes)} are available"
    yield f"{verdict} into memory: takes {format_bytes(needed_bytes)}, {available}"


def describe_checkpoints(run: CompiledRun, outlook: Outlook, first: int) -> str:
    """Return when the next checkpoint is due, and how much work is lost at most."""
    recipe = run.context.recipe
    schedule = run.built.run_schedule
    periods = list_event_periods(recipe, schedule.steps_per_epoch)[Event.CHECKPOINT]
    nexts = [list_multiples(period, first, schedule.total) for period in periods]
    next_s = [(steps[0] - first) * outlook.step_s for steps in nexts if steps]
    period_s = recipe.checkpoint.save_seconds
    longest_s = min([period_s, *(period * outlook.step_s for period in periods)])
    return (
        f"first checkpoint after {format_duration(min([period_s, *next_s]))}; a crash loses at "
        f"most {format_duration(longest_s)} of work"
    )


def list_shorter_runs(run: CompiledRun, outlook: Outlook) -> list[str]:
    """Return changes of a recipe that make a run shorter, each with its gain, at most three."""
    recipe = run.context.recipe
    changes = []
    gain = _count_enlarged(run)
    if gain is not None:
        changes.append(gain)
    share = outlook.evaluations_s / outlook.seconds
    every_epochs = recipe.eval.every_epochs
    if share > 0.05 and every_epochs is not None and outlook.evaluations > 1:
        saved = format_duration(0.9 * outlook.evaluations_s)
        changes.append(f"eval.every_epochs={10 * every_epochs} saves {saved}")
    hour_steps = int(3600 / outlook.step_s)
    if outlook.seconds > 2 * 3600 and hour_steps and _can_have_deadline(run):
        epochs = hour_steps / run.built.run_schedule.steps_per_epoch
        changes.append(
            f"train.minutes=60 trains what fits into an hour, {hour_steps:,} steps or "
            f"{epochs:,.2f} epochs"
        )
    if recipe.train.precision == "O0":
        changes.append("train.precision=bf16, whose gain `python -m pipeline forecast` predicts")
    return changes[:3]


def _can_have_deadline(run: CompiledRun) -> bool:
    """Return whether `train.minutes` may be the length of the run."""
    recipe = run.context.recipe
    train = recipe.train.model_copy(update={**dict.fromkeys(LENGTH_UNITS), "minutes": 60.0})
    is_valid = not list(check_deadline(recipe.model_copy(update={"train": train})))
    return is_valid and run.context.ranks.size == 1


def _count_enlarged(run: CompiledRun) -> str | None:
    """Return a text about map ops that enlarge images; None without any."""
    raw_image = run.dataset.raw_image
    if raw_image is None or run.dataset.inputs.image is None:
        return None
    raw = raw_image.shape[:2]
    shape = run.dataset.inputs.shape[:2]
    ratio = prod(shape) / max(1, prod(raw))
    if ratio < 2:
        return None
    size = "x".join(map(str, raw))
    return (
        f"images at their {size}, without the resize to {'x'.join(map(str, shape))}, have "
        f"{ratio:.0f} times fewer pixels"
    )
