"""The evaluation under attacks that ends a run, in its lines, its summary and robustness.json."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.strict_json import json_text
from pipeline.stages.measure_robustness import RobustnessMeasure, plan_attacks
from pipeline.stages.record.run_directory import ROBUSTNESS
from pipeline.stages.runner.context import CompiledRun
from pipeline.training.parallel.placement import gather_arrays
from pipeline.training.robustness.attack_specs import complete_attacks
from pipeline.training.robustness.robustness_rows import RobustnessReport
from pipeline.training.state import TrainState
from pipeline.training.step import get_evaluated_weights


def conclude_robustness(run: CompiledRun, state: TrainState) -> None:
    """Measure the robustness of the final state, and record it.

    All processes measure, so that none waits for another; the first one writes.
    """
    context = run.context
    recipe = context.recipe
    config = run.built.step_config
    weights = jax.tree.map(jnp.asarray, gather_arrays(get_evaluated_weights(config, state)))
    attacks = complete_attacks(recipe.eval.robustness, recipe.train.adversarial)
    plan = plan_attacks(recipe, run.dataset, attacks)
    check = context.options.signals.check
    measure = RobustnessMeasure(
        config, weights, run.dataset, plan, recipe.seed, context.reporter, check
    )
    report = measure.measure(int(state.step))
    if context.ranks.is_first:
        write_robustness(context.run_dir, report)
    if report.robust_accuracy is not None:
        context.summary.metrics["robust_accuracy"] = report.robust_accuracy


def write_robustness(run_dir: Path, report: RobustnessReport) -> None:
    """Write a report into a run directory. Raises RunError if it can't be written."""
    try:
        write_whole(run_dir / ROBUSTNESS, json_text(report.to_document(), indent=1) + "\n")
    except OSError as error:
        raise RunError(f"{run_dir / ROBUSTNESS}: can't be written: {error.strerror}") from error
