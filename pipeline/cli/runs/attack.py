"""`python -m pipeline attack RUN_DIR --norm linf --radius 0.3`: accuracy under attacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pydantic import TypeAdapter

from pipeline.cli.commands.command import CommandResult
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, UsageError
from pipeline.core.files.error_text import no_such
from pipeline.core.files.real_files import require_real
from pipeline.core.reporter import Reporter
from pipeline.inspect.dumps.opened_recipe import load_state, open_recipe, require_checkpoints
from pipeline.stages.export.trained_run import read_run_recipe, spare_gpus
from pipeline.stages.measure_robustness import RobustnessMeasure, plan_attacks, write_robustness
from pipeline.stages.record.run_directory import RECIPE, ROBUSTNESS
from pipeline.training.robustness.attack_specs import (
    AnyAttack,
    ApgdAttack,
    AttackSpec,
    Norm,
    complete_attacks,
    find_norm_problem,
)
from pipeline.training.step import get_evaluated_weights

NAMES = tuple(
    get_args(attack.model_fields["attack"].annotation)[0] for attack in get_args(AnyAttack)
)
"""Names of all attacks."""
LINF_ONLY = "square"
CORRUPTIONS = "corruptions"


def main(
    run_dir: Path,
    norm: Norm = "linf",
    radius: float | None = None,
    steps: int | None = None,
    restarts: int | None = None,
    attacks: Sequence[str] = (),
    samples: int | None = None,
) -> CommandResult:
    """Attack the newest checkpoint of a run, and write robustness.json into its directory.

    `steps` and `restarts` apply to pgd and apgd; without `attacks`, all run. Raises UsageError
    for an unknown attack or a radius that is missing or too large, RecipeError if the data aren't
    images, DataError if the run can't be read, RunError if the file can't be written.
    """
    if not (run_dir / RECIPE).is_file():
        raise DataError(f"{run_dir}: isn't a run directory: it has no {RECIPE}")
    step = require_checkpoints(run_dir)[-1]
    require_real(run_dir, (ROBUSTNESS,), ())
    recipe = read_run_recipe(run_dir)
    specs = _list_attacks(recipe, norm, radius, attacks)
    numbers = {"steps": steps, "restarts": restarts}
    changes = {name: value for name, value in numbers.items() if value is not None}
    specs = [a.model_copy(update=changes) if a.attack in ("pgd", "apgd") else a for a in specs]
    spare_gpus(run_dir)
    with Reporter() as reporter:
        opened = open_recipe(recipe, run_dir)
        # The loss dlr of apgd needs three classes.
        if len(opened.dataset.targets) < 3:
            specs = [
                a.model_copy(update={"losses": ("ce",)}) if isinstance(a, ApgdAttack) else a
                for a in specs
            ]
        plan = plan_attacks(recipe, opened.dataset, specs, samples)
        state = load_state(opened, run_dir, step, reporter).state
        config = opened.built.step_config
        weights = get_evaluated_weights(config, state)
        measure = RobustnessMeasure(config, weights, opened.dataset, plan, recipe.seed, reporter)
        report = measure.measure(step)
        write_robustness(run_dir, report)
    return CommandResult(report.to_document())


def _list_attacks(
    recipe: Recipe, norm: Norm, radius: float | None, names: Sequence[str]
) -> list[AnyAttack]:
    """Return the attacks of these names, or all. Raises UsageError for a wrong name or radius."""
    for name in names:
        if name not in NAMES:
            raise UsageError([f"--attacks {name}"], no_such("attack", name, NAMES))
    if norm != "linf" and LINF_ONLY in names:
        raise UsageError([f"--attacks {LINF_ONLY}"], "needs --norm linf")
    adversarial = recipe.train.adversarial
    if radius is None and adversarial is None:
        raise UsageError(["--radius"], "missing; the run has no radius of train.adversarial")
    problem = None if radius is None else find_norm_problem(norm, radius)
    if problem is not None:
        raise UsageError([f"--radius {radius}"], problem.partition(": ")[2])
    fitting = names or [name for name in NAMES if norm == "linf" or name != LINF_ONLY]
    adapter: TypeAdapter[AnyAttack] = TypeAdapter(AttackSpec)
    ball = {"norm": norm, "radius": radius}
    return list(
        complete_attacks(
            [
                adapter.validate_python({"attack": name} | ({} if name == CORRUPTIONS else ball))
                for name in dict.fromkeys(fitting)
            ],
            adversarial,
        )
    )
