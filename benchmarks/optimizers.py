"""Each optimizer on `lenet5_digits` and `gpt_text`, tuned by the same trials.

    python -m benchmarks.optimizers --folder FOLDER --save

Declared before the first run: 12 trials of learning rate and weight decay at the places of
`python -m pipeline arena` (a sequence that the seed 0 shifts; the same places for each optimizer),
rates within three decades around the arena's centre of the optimizer, weight decay by the kind of
decay. Trials train on four of five folds of the training split, and the lowest loss of the fifth
after the last step is chosen; a trial whose loss isn't finite, or rises, is not. The chosen numbers
are trained with three other seeds on the whole split, and the table has the evaluation split after
the last step. Budgets are steps. `gpt_text` is the arena's: two blocks of 64, windows of 32 bytes.
The same command continues a folder that was stopped.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import add_save, heading, publish, table
from pipeline.core.errors import PipelineError
from pipeline.core.registry import list_components
from pipeline.study.arena.contest import OPTIMIZER, RATE, SHIPPED, Contest, SearchRange, Workload
from pipeline.study.arena.contest_runs import Entry, hold_arena, make_slug, read_run, run_heat

PACKAGES = ("jax", "jaxlib", "optax")
DECAY = "train.optimizer.weight_decay"
DECAYS = {True: (1e-3, 0.3), False: (1e-6, 1e-3)}
"""Weight decay of optimizers that decouple it, and of those that add it to the gradient."""
TRIALS = 12
SEEDS = 3
TEXT = next(workload for workload in SHIPPED if workload.name == "text")
WORKLOADS = (
    Workload("lenet5_digits", ("+recipe=lenet5_digits",), 440, "loss", evaluations=1),
    Workload("gpt_text", TEXT.overrides, 200, "loss", evaluations=1),
)


def main() -> None:
    """Train what is left of the runs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the runs")
    parser.add_argument("--optimizers", help="names with commas; all without")
    add_save(parser, "optimizers.md")
    args = parser.parse_args()
    names = args.optimizers.split(",") if args.optimizers else sorted(list_components(OPTIMIZER))
    rows = [make_row(name, args.folder / name) for name in names]
    titles = ["optimizer"]
    for measure in ("accuracy", "perplexity"):
        titles += ["rate", "decay", "loss (least to most)", measure, "diverged"]
    words = f" --optimizers {args.optimizers}" if args.optimizers else ""
    title = "Optimizers, tuned by the same 12 trials"
    head = heading(
        title, f"python -m benchmarks.optimizers{words} --folder FOLDER --save", PACKAGES
    )
    steps = ", ".join(f"`{item.name}` {item.steps} steps" for item in WORKLOADS)
    note = (
        f"{steps}, five columns each. Means of {SEEDS} seeds that no trial had. `(edge)`: the "
        "chosen rate is the lowest or highest of the trials, so its best may lie outside. "
        "`diverged`: trials."
    )
    absent = [name for name in sorted(list_components(OPTIMIZER)) if name not in names]
    end = ""
    if absent:
        end = (
            f"\nNot trained yet, {len(absent)}: {', '.join(absent)}. The command without "
            "`--optimizers` continues the folder."
        )
    publish("\n".join([head, note, "", table(titles, rows), end]), args.save)


def make_row(name: str, folder: Path) -> list[str]:
    """Return the row of an optimizer, with the reason instead of figures if it is refused."""
    is_decoupled = getattr(list_components(OPTIMIZER)[name], "decoupled", False)
    decay = SearchRange(DECAY, *DECAYS[is_decoupled])
    cells = [name]
    for workload in WORKLOADS:
        contest = Contest(
            OPTIMIZER, (name,), name, (workload,), TRIALS, SEEDS, 0, searches=((None, decay),)
        )
        place = folder / workload.name
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with hold_arena(place, contest) as held:
                entry = run_heat(held, workload, place).entries[0]
            runs = place / workload.name / f"0_{make_slug(name)}"
            cells += list_cells(entry, runs, is_accuracy=workload is WORKLOADS[0])
        except PipelineError as error:
            cells += [f"refused: {' '.join(str(error).split()):.160}", *[""] * 4]
        print(cells, flush=True)
    return cells


def list_cells(entry: Entry, runs: Path, *, is_accuracy: bool) -> list[str]:
    """Return the cells of an optimizer on a workload."""
    diverged = f"{sum(run.has_diverged for run in entry.trial_runs)} of {len(entry.trials)}"
    if entry.settings is None:
        return ["", "", "diverged", "", diverged]
    rates = [trial[RATE] for trial in entry.trials]
    rate = entry.settings[RATE]
    edge = " (edge)" if rate in (min(rates), max(rates)) else ""
    losses = [run.value for run in entry.finals.values()]
    finite = [loss for loss in losses if loss is not None]
    return [
        f"{rate:.2g}{edge}",
        f"{entry.settings[DECAY]:.2g}",
        format_losses(finite, len(losses)),
        format_measure(finite, runs, entry, is_accuracy=is_accuracy),
        diverged,
    ]


def format_losses(finite: Sequence[float], count: int) -> str:
    """Return the mean with its range, and how many seeds diverged."""
    if len(finite) < count:
        return f"{count - len(finite)} of {count} seeds diverged"
    return f"{statistics.mean(finite):.4f} ({min(finite):.4f} to {max(finite):.4f})"


def format_measure(finite: Sequence[float], runs: Path, entry: Entry, *, is_accuracy: bool) -> str:
    """Return the mean accuracy, or the perplexity of the mean loss."""
    if not finite:
        return ""
    if not is_accuracy:
        return f"{math.exp(statistics.mean(finite)):.2f}"
    folders = [runs / f"trial_{entry.chosen}_seed_{seed}" for seed in entry.finals]
    values = [read_run(folder, "accuracy").values[-1] for folder in folders]
    return f"{statistics.mean(value for value in values if value is not None):.4f}"


if __name__ == "__main__":
    main()
