"""`python -m pipeline convert records OUT KEY=VALUE ...`: write ArrayRecord files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.config.compose import compose_and_check
from pipeline.config.hydra_options import add_train_length
from pipeline.core.errors import RecipeError, UsageError
from pipeline.core.files.paths import expand_home
from pipeline.core.reporter import Reporter
from pipeline.data.records.record_writer import require_free, write_records
from pipeline.stages.data import read_selected


def main(out: Path, overrides: Sequence[str], *, overwrite: bool = False) -> CommandResult:
    """Write the dataset that the overrides describe into the folder `out`.

    Raises UsageError if `out` is KEY=VALUE, RecipeError for an invalid recipe or a dataset of
    tables or texts, DataError for unreadable data, and RunError if the folder can't be written.
    """
    out = expand_home(out)
    if "=" in out.name:
        raise UsageError([str(out)], "OUT must come first, a folder to write")
    recipe = compose_and_check(add_train_length(overrides))
    require_free(out, overwrite)
    reporter = Reporter()
    dataset = recipe.dataset
    with reporter.clock(f"reading {dataset.name}"):
        data = read_selected(recipe)
    lost = {
        "the columns of a table": data.table,
        "a tokenizer": data.text,
        "the sample rate of sound": data.audio,
        "means and deviations of series": data.scale,
    }
    content = next((name for name, part in lost.items() if part is not None), None)
    if content is not None:
        problem = f"records can't hold {content}; must be a dataset of images or arrays"
        raise RecipeError([f"dataset = {dataset.name}: {problem}"])

    def show_progress(column: str, done: int, samples: int) -> None:
        reporter.print_stage("convert", f"{column}: {done:,} of {samples:,} samples")

    spec = write_records(out, dataset.name, data, overwrite=overwrite, notify=show_progress)
    columns = [*spec.train.columns.values(), *spec.eval.columns.values()]
    files = [file for column in columns for file in column.files]
    size_mb = sum(file.size_bytes for file in files) / 1e6
    reporter.print_stage(
        "done",
        f"{out}: {spec.train.samples:,} training and {spec.eval.samples:,} evaluation samples of "
        f"{spec.source} in {len(files)} files, {size_mb:,.1f} MB; use it with dataset=records "
        f"dataset.root={out}",
    )
    samples = {"train": spec.train.samples, "eval": spec.eval.samples}
    return CommandResult({"folder": str(out), "samples": samples})
