"""`python -m pipeline attack RUN_DIR --norm linf --radius 0.3`: accuracy under attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import UsageError
from pipeline.core.files.atomic_write import write_json
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.trusted_files import require_real
from pipeline.core.reporter import Reporter
from pipeline.inspect.dumps.opened_recipe import (
    OpenedRecipe,
    find_newest_step,
    open_run_recipe,
)
from pipeline.inspect.replay import replay_state
from pipeline.stages.measure_robustness import WHITE_BOX, RobustnessMeasure, plan_attacks
from pipeline.stages.record.run_directory import ROBUSTNESS
from pipeline.stages.record.trained_run import read_run_recipe
from pipeline.training.robustness.attack_specs import (
    AdversarialSpec,
    AnyAttack,
    AttackSpec,
    Norm,
    complete_attacks,
    find_norm_problem,
)
from pipeline.training.step import get_evaluated_weights

NAMES: tuple[str, ...] = tuple(
    name
    for attack in get_args(AnyAttack)
    for name in get_args(attack.model_fields["attack"].annotation)
)
"""Names of all attacks: the values of their literal fields `attack`."""
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
    """Attack the newest checkpoint of a run, and write robustness.json into the run's directory.

    `steps` and `restarts` apply to pgd and apgd. `attacks` are names; empty: all attacks for the
    norm. `radius` is for pixels from 0 to 1; None: the radius of train.adversarial. `samples` None:
    all. Raises UsageError for an unknown attack, or a radius that is missing or too large,
    RecipeError if the data aren't images, DataError if the run can't be read, RunError if the file
    can't be written.
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
        state = replay_state(opened, run_dir, step, reporter)
        config = opened.built.step_config
        weights = get_evaluated_weights(config, state)
        evaluation = RobustnessMeasure(config, weights, opened.dataset, plan, recipe.seed, reporter)
        document = evaluation.measure(step).to_document()
        write_json(run_dir / ROBUSTNESS, document)
    return CommandResult(document)


def _require_valid(
    norm: Norm, radius: float | None, names: Sequence[str], adversarial: AdversarialSpec | None
) -> None:
    """Raise UsageError for an unknown attack, or an invalid radius."""
    for name in names:
        if name not in NAMES:
            raise UsageError([f"--attacks {name}"], explain_unknown_name("attack", name, NAMES))
    if norm != "linf" and LINF_ONLY in names:
        raise UsageError([f"--attacks {LINF_ONLY}"], "needs --norm linf")
    if radius is None and adversarial is None:
        raise UsageError(["--radius"], "must be set for a run without train.adversarial")
    problem = None if radius is None else find_norm_problem(norm, radius)
    if problem is not None:
        # `problem` is "radius = 2.0: must be ..."; the option's name replaces the key.
        _, _, requirement = problem.partition(": ")
        raise UsageError([f"--radius {radius}"], requirement)


def _list_attacks(
    opened: OpenedRecipe,
    norm: Norm,
    radius: float | None,
    names: Sequence[str],
    settings: Mapping[str, int],
) -> Sequence[AnyAttack]:
    """Return the attacks called `names`; if `names` is empty, all attacks for the norm.

    `settings` are fields of the attacks in `WHITE_BOX`.
    """
    all_names = [name for name in NAMES if norm == "linf" or name != LINF_ONLY]
    adapter: TypeAdapter[AnyAttack] = TypeAdapter(AttackSpec)
    specs = []
    for name in dict.fromkeys(names or all_names):
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
