"""`python -m pipeline leakage RUN_DIR`: do a run's weights show which samples trained them?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import UsageError
from pipeline.core.files.atomic_write import write_json
from pipeline.core.files.trusted_files import require_real
from pipeline.core.reporter import Reporter
from pipeline.inspect.dumps.opened_recipe import find_newest_step, open_run_recipe
from pipeline.inspect.leakage import (
    LEAST_SHADOWS,
    PrivacyBound,
    plan_audit,
    rate_scores,
    score_by_shadows,
)
from pipeline.inspect.replay import replay_state
from pipeline.stages.record.run_directory import LEAKAGE


def main(run_dir: Path, shadows: int, samples: int) -> CommandResult:
    """Guess which samples a run was trained on, and write leakage.json into its directory.

    The attacks guess for `samples` training samples (members) and as many held-out samples, or for
    fewer if a split is smaller. `shadows` is the number of shadow networks that LiRA trains; with 0
    LiRA is skipped.
    Raises UsageError for too few shadow networks, RecipeError if the samples can't be audited,
    DataError if the run can't be read, RunError if a shadow network diverges.
    """
    if 0 < shadows < LEAST_SHADOWS:
        rule = (
            f"must be 0, or at least {LEAST_SHADOWS}: an attack needs 2 networks with each sample "
            "and 2 without"
        )
        raise UsageError([f"--shadows {shadows}"], rule)
    step = find_newest_step(run_dir)
    require_real(run_dir, (LEAKAGE,), ())
    with Reporter() as reporter:
        opened = open_run_recipe(run_dir)
        audit = plan_audit(opened, step, samples)
        num_pairs = len(audit.members)
        counts = f"{num_pairs:,} members and {num_pairs:,} held-out samples"
        reporter.print_stage("leakage", f"{counts}, step {step:,}")
        bound = None
        budget = opened.built.privacy
        if budget is not None:
            bound = PrivacyBound(budget.compute_epsilon(step), budget.spec.delta)
            line = f"epsilon {bound.epsilon:.4f}, delta {bound.delta:g}: bounds every attack"
            reporter.print_stage("privacy", line)
        # Margins and scores of members come first, then held-out samples'.
        margins = audit.compute_margins(replay_state(opened, run_dir, step, reporter))
        rows = rate_scores("loss", margins[:num_pairs], margins[num_pairs:], bound)
        if shadows:
            shadow_margins, was_trained_on = audit.train_shadows(shadows, reporter)
            scores = score_by_shadows(margins, shadow_margins, was_trained_on)
            name = f"LiRA, {shadows} shadow networks"
            rows += rate_scores(name, scores[:num_pairs], scores[num_pairs:], bound)
        for row in rows:
            reporter.print_stage("leakage", str(row))
    facts = {
        "step": step,
        "pairs": num_pairs,
        "shadows": shadows,
        "privacy": None if bound is None else asdict(bound),
        "attacks": [asdict(row) for row in rows],
    }
    write_json(run_dir / LEAKAGE, facts)
    return CommandResult(facts)
