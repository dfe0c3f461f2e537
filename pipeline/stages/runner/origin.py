"""Origin of a run: the file in its directory that a resumed run is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import jax

from pipeline.checkpoint.restore import FOLDER, saved_steps
from pipeline.data.dataset import Dataset
from pipeline.data.text.text_format import write_tokenizer
from pipeline.stages.learning_rates import fingerprints
from pipeline.stages.record.continuity import require_same_origin
from pipeline.stages.record.environment import describe_process
from pipeline.stages.record.provenance import Provenance, add_provenance
from pipeline.stages.runner.context import RunContext
from pipeline.training.rate_table import RateFile


def record_data(
    context: RunContext, dataset: Dataset, device: jax.Device, rate_files: Mapping[str, RateFile]
) -> RunContext:
    """Keep in the run directory what the run is made from; a resumed run is held against it.

    Returns the context with this process. Raises RecipeError where a run to resume had other data.
    """
    if context.ranks.is_first:
        process = _origin(context, dataset, device, rate_files)
        context.folder.accepted.add(partial(add_provenance, context.run_dir, process))
        context = replace(context, process=process)
    image, text = dataset.raw_image, dataset.text
    context.summary.data = {
        "image": {"shape": list(image.shape), "dtype": image.dtype},
        "classes": list(dataset.classes),
        "targets": dataset.targets.to_dict(),
        **({} if dataset.table is None else {"table": dataset.table.to_dict()}),
        **({} if text is None else {"text": text.to_dict()}),
    }
    if context.ranks.is_first and text is not None:
        context.folder.accepted.add(partial(write_tokenizer, context.run_dir, text))
    return context


def _origin(
    context: RunContext, dataset: Dataset, device: jax.Device, rate_files: Mapping[str, RateFile]
) -> Provenance:
    """Describe this process. Raises DataError where it can't go on with the run."""
    recipe = context.recipe
    # As read: the part of it that is evaluated may change.
    splits = {"train": dataset.train, "eval": dataset.whole_eval}
    process = describe_process(recipe.seed, context.summary.versions, device, splits)
    if rate_files:
        data = {**process.data, "learning rates": fingerprints(rate_files)}
        process = replace(process, data=data)
    if context.resuming and saved_steps(context.run_dir / FOLDER):
        changed, warn = recipe.train.resume_changed, context.reporter.warn
        require_same_origin(context.run_dir, process, changed, warn)
    return process
