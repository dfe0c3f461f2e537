"""`python -m pipeline dump RUN_DIR --step N`: the tensors of every layer in one step of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.config.inspection_specs import Content, What, parse_steps
from pipeline.core.errors import DataError, UsageError
from pipeline.core.files.trusted_files import require_real_trees
from pipeline.core.reporter import Reporter
from pipeline.inspect.dumps.dump_files import require_layers
from pipeline.inspect.dumps.dump_step import DumpRequest, compare_losses, dump_step
from pipeline.inspect.dumps.layer_programs import Weights, layer_kinds
from pipeline.inspect.dumps.opened_recipe import logged_loss
from pipeline.inspect.replay import mark, open_replay
from pipeline.stages.record.run_directory import DUMP, RECIPE, describe_missing_run


def main(
    run_dir: Path,
    steps: str,
    layers: Sequence[str] = (),
    what: What = "all",
    content: Content = "tensors",
    out: Path | None = None,
    max_mib: int = 4096,
    *,
    approximate: bool = False,
) -> CommandResult:
    """Write the dumps of `steps` (5, 0|5|10 or 5-10); the exit status is 1 if a dump stops early.

    Raises UsageError for steps in another form, DataError if the run can't be read, its data have
    changed or `out` isn't a folder, RunError if a state of the run can't be had, unless
    `approximate`, and RecipeError for a pattern that no layer matches.
    """
    try:
        numbers = parse_steps(steps)
    except ValueError as error:
        raise UsageError([f"--step {steps}"], str(error)) from error
    if not (run_dir / RECIPE).is_file():
        raise DataError(describe_missing_run(run_dir))
    if out is None:
        require_real_trees(run_dir, (DUMP,))
    elif out.exists() and not out.is_dir():
        raise DataError(f"--out {out}: must be a folder, which is made if it doesn't exist")
    dumps = []
    with Reporter() as reporter, open_replay(run_dir, reporter, approximate=approximate) as replay:
        replay.require_steps(numbers)
        opened = replay.opened
        settings = {"layers": layers, "what": what, "content": content, "max_mib": max_mib}
        spec = opened.recipe.dump.model_copy(update={**settings, "path": out})
        recipe = opened.recipe.model_copy(update={"dump": spec})
        request = DumpRequest(recipe, run_dir, opened.device_name)
        opened.programs(numbers[0])  # raises RecipeError unless the network is a list of layers
        require_layers(layers, list(layer_kinds(opened.built)), "--layers")
        for step in numbers:
            state = replay.go_to(step)
            lost = tuple(replay.lost)
            loss = logged_loss(run_dir, step)
            with reporter.clock(f"dumping step {step}"):
                weights = Weights.of(state)
                batch = opened.batch(step)
                request = replace(request, approximate=lost)
                report = dump_step(request, opened.programs(step), weights, batch, step, loss)
            reporter.print_stage("dump", mark(lost, f"step {step}: {report}"))
            losses = compare_losses(report.loss, loss)
            reporter.print_stage("dump", mark(lost, f"step {step}: {losses}"))
            facts = {"step": step, "run_loss": loss, **asdict(report), "folder": str(report.folder)}
            facts["approximate"] = list(lost)
            facts["written"] = facts.pop("num_tensors")
            dumps.append(facts)
            if report.stopped is not None:
                return CommandResult({"dumps": dumps}, exit_status=1)
    return CommandResult({"dumps": dumps})
