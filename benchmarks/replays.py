"""What docs/replay.md says of steps, samples and keys, counted over cases that a seed draws.

    python -m benchmarks.replays steps --count 20        # 50 steps of each run
    python -m benchmarks.replays samples --count 50
    python -m benchmarks.replays keys --count 60
    python -m benchmarks.replays cooldowns

`steps` trains runs of drawn keys, and computes drawn steps of each again, in any order. A step is
right if its loss has the bits of metrics.jsonl, which this script reads by itself, and if no file
of the run has changed. `samples` changes one training sample of a network that is trained for 30
epochs, and looks at the step of the last ten that reads it and whose loss exceeds the same step
without the change by most: the sample should be the first of the ranking of `step`, or have the
largest loss. Harmless changes don't count. `keys` trains two runs with one or two keys that act at
step 1, and up to six that act later: `bisect` should name the former in at most 2 log2 n + 6 runs.
`cooldowns` plans and trains eight lengths of a warmup-stable-decay schedule as one sweep, in at
most 2.6 times the steps of the longest. The exit status is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.forks import SCHEDULES, SMALL, TRAINED, run_quietly
from pipeline import load_recipe
from pipeline.inspect.dumps.opened_recipe import make_silent_reporter
from pipeline.inspect.replay import open_replay
from pipeline.stages.data import read_selected

STEPS_OF_A_RUN = 50
HARM = 1.0
"""A sample is harmful in a step if the sum of the batch's losses is larger by so much, in nats,
than in the same step of a run without the change."""
KINDS = ("label", "blank", "outlier", "another class", "overflow")
"""What happens to a sample: a wrong label; zeros; 20 times its values, negative; the pixels of a
sample of another class; a value with which the network overflows."""
PLANTED = (
    "train.loss.smoothing=0.05",
    "train.batch_size=24",
    "model.hidden=[24]",
    "dataset.train.ops=[{name: resize, size: [32, 32]}, {name: rescale, factor: 0.05, shift: 0.0}]",
    "train.optimizer.lr=0.015",
)
"""Keys that change the numbers of step 1."""
LATER = (
    "train.optimizer.momentum=0.8",
    "train.optimizer.nesterov=true",
    "train.clip.norm=1000",
    "train.schedule.milestones=[30,40]",
    "train.schedule.factors=[0.3,0.1]",
    "train.on_nan=skip",
    "eval.every_steps=20",
)
"""Keys that change no number of step 1."""


def run_with_json(*words: str) -> dict[str, Any]:
    """Run a command in this process, and return its document."""
    text = run_quietly(*words, "--json")
    return dict(json.loads(text[text.index("\n{") if "\n{" in text else 0 :]))


def draw_run_keys(draws: random.Random) -> list[str]:
    """Return keys that decide how steps are computed and read."""
    return [
        *draws.choice(SCHEDULES),
        f"seed={draws.randrange(1000)}",
        draws.choice(("optimizer=momentum", "optimizer=adam", "optimizer=adamw")),
        draws.choice(("train.precision=O0", "train.precision=bf16", "train.precision=O2")),
        draws.choice(("train.feed=stream", "train.feed=resident")),
        f"train.accumulate_steps={draws.choice((1, 2))}",
        f"train.sink_size={draws.choice((1, 7, -1))}",
        f"checkpoint.every_steps={draws.choice(('null', 40))}",
    ]


def check_steps(draws: random.Random, folder: Path) -> tuple[str, bool | None]:
    """Compute steps of one run again."""
    run_dir = folder / "run"
    keys = draw_run_keys(draws)
    length = draws.randrange(60, 160)
    run_quietly(*SMALL, *keys, f"train.steps={length}", f"hydra.run.dir={run_dir}")
    losses = {line["step"]: line["loss"] for line in read_log(run_dir)}
    before = _read_all(run_dir)
    same = 0
    with make_silent_reporter() as reporter, open_replay(run_dir, reporter) as replay:
        for _ in range(STEPS_OF_A_RUN):
            step = draws.randrange(1, length + 1)
            loss = replay.compute_step(step).columns["loss"][0]
            same += np.float32(loss) == np.float32(losses[step])
    is_unchanged = _read_all(run_dir) == before
    text = f"{same} of {STEPS_OF_A_RUN} steps have the run's bits"
    return text + ("" if is_unchanged else "; files of the run changed"), (
        same == STEPS_OF_A_RUN and is_unchanged
    )


def _read_all(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_sample(draws: random.Random, folder: Path) -> tuple[str, bool | None]:
    """Change one sample, and look at a step that reads it."""
    raw = read_selected(load_recipe("lenet5_digits"))
    arrays: dict[str, Any] = {
        f"{letter}_{name}": np.asarray(split.columns[column])
        for name, split in (("train", raw.train), ("test", raw.eval))
        for letter, column in (("x", "image"), ("y", "label"))
    }
    images = arrays["x_train"].reshape(len(arrays["x_train"]), -1).astype(np.float32) / 16
    labels = arrays["y_train"].copy()
    kind = draws.choice(KINDS)
    row = draws.randrange(len(images))
    if kind == "label":
        labels[row] = (labels[row] + draws.randrange(1, 10)) % 10
    elif kind == "blank":
        images[row] = 0
    elif kind == "outlier":
        images[row] *= -20
    elif kind == "another class":
        others = np.flatnonzero(labels != labels[row])
        images[row] = images[others[draws.randrange(len(others))]]
    else:
        images[row, draws.randrange(images.shape[1])] = 1e38
    test = arrays["x_test"].reshape(len(arrays["x_test"]), -1).astype(np.float32) / 16
    clean_images = arrays["x_train"].reshape(images.shape).astype(np.float32) / 16
    clean = {"x_train": clean_images, "y_train": arrays["y_train"], "x_test": test}
    np.savez(folder / "clean.npz", y_test=arrays["y_test"], **clean)
    planted = {"x_train": images, "y_train": labels, "x_test": test}
    np.savez(folder / "planted.npz", y_test=arrays["y_test"], **planted)
    keys = ["dataset=numpy", "dataset.train.ops=[]", "dataset.eval.ops=[]", "train.on_nan=skip"]
    keys += ["optimizer=adam", f"seed={draws.randrange(1000)}", "train.optimizer.lr=0.003"]
    keys += ["model=mlp", "model.hidden=[32]", "train.batch_size=32", "train.sink_size=-1"]
    keys += ["train.epochs=30", "monitor.tensorboard=false", "monitor.sample_images=0"]
    for name in ("clean", "planted"):
        data = f"dataset.root={folder / name}.npz"
        run_quietly(*keys, data, f"hydra.run.dir={folder / name}")
    run_dir = folder / "planted"
    step = _find_harm(run_dir, folder / "clean", row, first=20 * (len(images) // 32) + 1)
    if step is None:
        return f"{kind}: harmless", None
    facts = run_with_json("step", str(run_dir), str(step))
    rows = [sample["sample"] for sample in facts["samples"]]
    largest_loss = max(facts["samples"], key=lambda sample: _as_number(sample["loss"]))
    place = rows.index(row) + 1
    text = f"{kind}: rank {place} of {len(rows)}"
    if place > 1 and largest_loss["sample"] == row:
        text += ", first by its loss"
    return text, place == 1 or largest_loss["sample"] == row


def _as_number(loss: float | None) -> float:
    """Return a loss of JSON, in which None isn't finite."""
    return math.inf if loss is None else loss


def _find_harm(run_dir: Path, clean_dir: Path, row: int, first: int) -> int | None:
    """Return the step from `first` on that reads a row and whose loss exceeds the same step of a
    run without the change by most, or isn't finite; None if it isn't harmful in any."""
    losses, clean_losses = (
        np.array([np.nan if line["loss"] is None else line["loss"] for line in read_log(folder)])
        for folder in (run_dir, clean_dir)
    )
    harms: dict[int, float] = {}
    with make_silent_reporter() as reporter, open_replay(run_dir, reporter) as replay:
        for step in range(first, len(losses) + 1):
            samples = np.asarray(replay.opened.batch(step - 1).sample).tolist()
            if row in samples:
                harm = (losses[step - 1] - clean_losses[step - 1]) * len(samples)
                harms[step] = harm if np.isfinite(harm) else np.inf
    step = max(harms, key=lambda step: harms[step])
    return step if harms[step] >= HARM else None


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of steps of metrics.jsonl."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def check_keys(draws: random.Random, folder: Path) -> tuple[str, bool | None]:
    """Train two runs and search the keys by which their first steps differ."""
    planted = draws.sample(PLANTED, draws.choice((1, 2)))
    later = draws.sample(LATER, draws.randrange(1, len(LATER) + 1))
    shared = [*SMALL, "schedule=piecewise", "train.steps=50", f"seed={draws.randrange(1000)}"]
    shared += ["train.schedule.milestones=[20,35]", "train.schedule.factors=[0.5,0.1]"]
    good, bad, plain = folder / "good", folder / "bad", folder / "plain"
    run_quietly(*shared, f"hydra.run.dir={good}")
    run_quietly(*shared, *planted, *later, f"hydra.run.dir={bad}")
    run_quietly(*shared, *later, f"hydra.run.dir={plain}")
    first_lines = [(run / "metrics.jsonl").read_text().splitlines()[0] for run in (good, plain)]
    if first_lines[0] != first_lines[1]:
        raise RuntimeError(f"one of {later} acts at step 1")
    facts = run_with_json("bisect", str(good), str(bad))
    named = [key.split(" = ")[0] for key in facts["keys"]]
    expected = [key.split("=")[0] for key in planted]
    limit = 2 * math.log2(facts["changes"]) + 6
    is_smallest = sorted(named) == sorted(expected)
    text = f"{len(planted)} of {facts['changes']} changes, {facts['runs']} runs"
    if not is_smallest:
        text += f"; named {named}, planted {expected}"
    return text, is_smallest and facts["runs"] <= limit


def check_cooldowns(draws: random.Random, folder: Path) -> tuple[str, bool | None]:
    """Train eight lengths of a schedule whose last fifth cools down, as one sweep."""
    lengths = [25 * number for number in range(9, 17)]
    keys = ["schedule=warmup_stable_decay", "train.schedule.cooldown_share=0.2"]
    keys += ["-m", f"train.steps={','.join(map(str, lengths))}", "hydra.sweeper.share=true"]
    text = run_quietly(*SMALL, *keys, f"seed={draws.randrange(1000)}", f"hydra.sweep.dir={folder}")
    match = TRAINED.search(text)
    trained = int(match[1].replace(",", "")) if match else sum(lengths)
    ratio = trained / max(lengths)
    return f"8 cooldowns of up to {max(lengths)} steps take {ratio:.2f} of the longest run", (
        ratio <= 2.6
    )


CHECKS: dict[str, Callable[[random.Random, Path], tuple[str, bool | None]]] = {
    "steps": check_steps,
    "samples": check_sample,
    "keys": check_keys,
    "cooldowns": check_cooldowns,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each case; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("figure", choices=tuple(CHECKS))
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    counts: Counter[bool | None] = Counter()
    number = 0
    while counts[True] + counts[False] < options.count:
        draws = random.Random(f"{options.figure} {options.seed} {number}")
        with tempfile.TemporaryDirectory() as folder:
            text, is_right = CHECKS[options.figure](draws, Path(folder))
        counts[is_right] += 1
        print(f"{number}: {text}{' FAILED' if is_right is False else ''}", flush=True)
        number += 1
    print(f"{options.figure}: {counts[True]} of {options.count} as they should be, {number} drawn")
    return 1 if counts[False] else 0


if __name__ == "__main__":
    sys.exit(main())
