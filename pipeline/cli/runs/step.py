"""`python -m pipeline step RUN_DIR N`: what happened at a step, by layer and by sample."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import DataError, RecipeError, UsageError, printable
from pipeline.core.plugins.loading import take_flags, to_flags
from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch
from pipeline.inspect.dumps.dump_step import compare_losses
from pipeline.inspect.dumps.opened_recipe import logged_loss
from pipeline.inspect.replay import Replay, mark, open_replay
from pipeline.inspect.step.step_bundle import is_bundle, read_bundle, require_empty, write_bundle
from pipeline.inspect.step.step_report import (
    SampleRow,
    SampleShares,
    format_layer_rows,
    format_sample_rows,
    list_features,
    make_layer_rows,
    make_sample_rows,
    measure_samples,
    place_samples,
    read_record,
)
from pipeline.training.features.freezing import select_phase
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig
from pipeline.training.telemetry import count_updates


def main(
    run_dir: Path, step: int | None, out: Path | None = None, *, approximate: bool = False
) -> CommandResult:
    """Print what happened at `step`, counted from 1, of a run, and write a bundle into `out`.

    Of a bundle, print the same, computed again; the exit status is 1 if bits differ. Raises
    UsageError for other arguments, DataError if the run can't be read or its data have changed,
    RecipeError for a private run, RunError if bits of the run can't be had, unless `approximate`.
    """
    if is_bundle(run_dir):
        if step is not None or out is not None or approximate:
            problem = f"{run_dir} is the bundle of a step, which is computed without more arguments"
            raise UsageError([str(run_dir)], problem)
        return _compute_bundle(run_dir)
    if step is None:
        raise UsageError(
            [str(run_dir)], "isn't the bundle of a step; name the step of a run, RUN_DIR N"
        )
    if out is not None:
        require_empty(out)
    with Reporter() as reporter, open_replay(run_dir, reporter, approximate=approximate) as replay:
        return _examine_step(replay, step, out)


def _examine_step(replay: Replay, step: int, out: Path | None) -> CommandResult:
    opened, reporter = replay.opened, replay.reporter
    replay.require_steps([step], least=1)
    if opened.built.privacy is not None:
        raise RecipeError("privacy: must be null for step, since figures of samples aren't private")
    record = replay.compute_step(step)
    state = replay.go_to(step - 1)
    lost = tuple(replay.lost)
    config = select_phase(opened.built.step_config, step - 1)
    batch = opened.batch(step - 1)
    run_loss = logged_loss(replay.run_dir, step - 1)
    shares = _measure(config, state, batch, opened.backend.device, reporter)
    rates = opened.built.learning_rates
    layers = make_layer_rows(
        config, state, shares, rates[min(int(count_updates(state)), len(rates) - 1)]
    )
    places = place_samples(opened.dataset.train, batch)
    samples = make_sample_rows(shares, batch, places, opened.dataset.targets)
    position = opened.built.run_schedule.place(step)
    numbers = read_record(record)
    facts: dict[str, Any] = {
        "step": step,
        "model": opened.recipe.model.name,
        "epoch": position.epoch,
        "epoch_step": position.epoch_step,
        "run_loss": run_loss,
        **numbers,
        "features": list_features(opened.recipe, config, state, record),
        "layers": [asdict(row) for row in layers],
        "samples": [asdict(row) for row in samples],
        "sample_loss": shares.loss,
        "approximate": list(lost),
    }
    place = f"step {step:,} of {opened.recipe.model.name}, step {position.epoch_step:,} of epoch"
    losses = compare_losses(numbers["loss"], run_loss)
    reporter.print_stage("step", mark(lost, f"{place} {position.epoch:,}: {losses}"))
    names = {"learning_rate": "learning rate", "grad_norm": "gradient norm"}
    columns = [
        f"{names.get(name, name.replace('_', ' '))} {value:.8g}"
        for name, value in numbers.items()
        if name not in ("loss", "skipped")
    ]
    reporter.print_stage("record", mark(lost, ", ".join(columns)))
    reporter.print_stage("features", mark(lost, "; ".join(facts["features"]) or "none"))
    reporter.print_lines(f"\n{mark(lost, 'layers, by the gradient before clipping:')}")
    for line in format_layer_rows(layers):
        reporter.print_lines(f"  {line}")
    _print_samples(samples, lost, reporter)
    if out is not None:
        write_bundle(out, replay.run_dir, config, state, batch, facts)
        facts["folder"] = str(out)
        plugins, _ = take_flags(sys.orig_argv)
        words = ["python", "-m", "pipeline", *to_flags(plugins), "step", str(out)]
        reporter.print_stage("bundle", f"{out}; again: {shlex.join(words)}")
    return CommandResult(facts)


def _print_samples(samples: Sequence[SampleRow], lost: Sequence[str], reporter: Reporter) -> None:
    title = f"{len(samples)} samples, by share of loss or gradient:"
    reporter.print_lines(f"\n{mark(lost, title)}")
    for line in format_sample_rows(samples):
        reporter.print_lines(f"  {line}")
    reporter.print_lines("")


def _measure(
    config: StepConfig, state: TrainState, batch: Batch, device: jax.Device, reporter: Reporter
) -> SampleShares:
    count = int(batch.count)
    with (
        reporter.clock(f"computing the gradients of {count:,} samples"),
        jax.default_device(device),
    ):
        return measure_samples(config, state, batch)


def _compute_bundle(folder: Path) -> CommandResult:
    """Compute the step of a bundle again; the exit status is 1 if a figure has other bits."""
    bundle = read_bundle(folder)
    facts = bundle.facts
    with Reporter() as reporter:
        shares = _measure(bundle.step_config, bundle.state, bundle.batch, bundle.device, reporter)
        try:
            recorded = {row["position"]: SampleRow(**row) for row in facts["samples"]}
            places = [(recorded[n].sample, recorded[n].place) for n in range(len(shares.losses))]
            made = make_sample_rows(shares, bundle.batch, places, bundle.step_config.targets)
            labels = [printable(str(recorded[row.position].label)) for row in made]
            samples = [replace(row, label=label) for row, label in zip(made, labels, strict=True)]
            title = f"step {int(facts['step']):,} of {printable(str(facts['model']))}"
            lost = list(map(str, facts["approximate"]))
            loss = float(facts["sample_loss"]) if facts["sample_loss"] is not None else np.nan
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{folder}: does not describe a step: {error}") from error
        reporter.print_stage("step", mark(lost, f"{title}: loss {shares.loss:.8g}"))
        if bundle.left_out:
            names = ", ".join(bundle.left_out)
            reporter.print_stage("step", f"computed without {names}, which no bundle has")
        _print_samples(samples, lost, reporter)
        differing = [row.sample for row in samples if row != recorded[row.position]]
        is_same = not differing and np.array_equal(loss, shares.loss, equal_nan=True)
        text = "this is what the run's machine has computed, to the bit"
        if not is_same:
            text = f"the figures of {len(differing)} of {len(samples)} samples have other bits"
            text += f"; the loss was {loss:.9g}, now {shares.loss:.9g}"
        reporter.print_stage("same" if is_same else "differs", text)
    return CommandResult(
        {
            **_select_recorded(facts),
            "sample_loss": shares.loss,
            "samples": [asdict(row) for row in samples],
            "same": is_same,
        },
        exit_status=0 if is_same else 1,
    )


def _select_recorded(facts: Mapping[str, Any]) -> dict[str, Any]:
    names = ("step", "model", "run_loss", "approximate")
    return {name: facts.get(name) for name in names}
