"""`python -m pipeline attack RUN_DIR --norm linf --radius 0.3`: accuracy under attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import UsageError
from pipeline.core.files.error_text import explain_unknown_name
from pipeline.core.files.real_files import require_real
from pipeline.core.files.strict_json import write_json
from pipeline.core.reporter import Reporter
from pipeline.inspect.dumps.opened_recipe import (
    OpenedRecipe,
    find_newest_step,
    load_state,
    open_run_recipe,
)
from pipeline.stages.export.trained_run import read_run_recipe
from pipeline.stages.measure_robustness import RobustnessMeasure, plan_attacks
from pipeline.stages.record.run_directory import ROBUSTNESS
from pipeline.training.robustness.attack_specs import (
    AdversarialSpec,
    AnyAttack,
    AttackSpec,
    Norm,
    complete_attacks,
    find_norm_problem,
)
from pipeline.training.robustness.robustness_rows import WHITE_BOX
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

    `steps` and `restarts` apply to pgd and apgd. `attacks` are names; empty: all. `radius` is for
    pixels from 0 to 1; None: that of train.adversarial. Raises UsageError for an unknown attack or
    a radius that is missing or too large, RecipeError if the data aren't images, DataError if the
    run can't be read, RunError if the file can't be written.
    """
    step = find_newest_step(run_dir)
    require_real(run_dir, (ROBUSTNESS,), ())
    _require_valid(norm, radius, attacks, read_run_recipe(run_dir).train.adversarial)
    with Reporter() as reporter:
        opened = open_run_recipe(run_dir)
        recipe = opened.recipe
        options = {"steps": steps, "restarts": restarts}
        settings = {name: value for name, value in options.items() if value is not None}
        specs = _list_attacks(opened, norm, radius, attacks, settings)
        plan = plan_attacks(recipe, opened.dataset, specs, samples)
        state = load_state(opened, run_dir, step, reporter).state
        config = opened.built.step_config
        weights = get_evaluated_weights(config, state)
        measure = RobustnessMeasure(config, weights, opened.dataset, plan, recipe.seed, reporter)
        report = measure.measure(step)
        write_json(run_dir / ROBUSTNESS, report.to_document())
    return CommandResult(report.to_document())


def _require_valid(
    norm: Norm, radius: float | None, names: Sequence[str], adversarial: AdversarialSpec | None
) -> None:
    """Raise UsageError for a wrong name or radius."""
    for name in names:
        if name not in NAMES:
            raise UsageError([f"--attacks {name}"], explain_unknown_name("attack", name, NAMES))
    if norm != "linf" and LINF_ONLY in names:
        raise UsageError([f"--attacks {LINF_ONLY}"], "needs --norm linf")
    if radius is None and adversarial is None:
        raise UsageError(["--radius"], "missing; the run has no radius of train.adversarial")
    problem = None if radius is None else find_norm_problem(norm, radius)
    if problem is not None:
        raise UsageError([f"--radius {radius}"], problem.partition(": ")[2])


def _list_attacks(
    opened: OpenedRecipe,
    norm: Norm,
    radius: float | None,
    names: Sequence[str],
    settings: Mapping[str, int],
) -> Sequence[AnyAttack]:
    """Return the attacks of `names`, or all of the norm if empty; `settings` are for WHITE_BOX."""
    attacks = names or [name for name in NAMES if norm == "linf" or name != LINF_ONLY]
    adapter: TypeAdapter[AnyAttack] = TypeAdapter(AttackSpec)
    specs = []
    for name in dict.fromkeys(attacks):
        fields: dict[str, Any] = {"attack": name}
        if name != CORRUPTIONS:
            fields |= {"norm": norm, "radius": radius}
        if name in WHITE_BOX:
            fields |= settings
        if name == "apgd" and len(opened.dataset.targets) < 3:
            # The loss dlr needs three classes.
            fields["losses"] = ["ce"]
        specs.append(adapter.validate_python(fields))
    return complete_attacks(specs, opened.recipe.train.adversarial)
