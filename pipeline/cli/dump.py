"""`python -m pipeline dump RUN_DIR step=N`: the tensors of every layer in one step of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.config.dump_spec import Content, What, parse_steps
from pipeline.core.errors import DataError, UsageError
from pipeline.core.files.error_text import no_such
from pipeline.core.files.real_files import require_real_trees
from pipeline.core.reporter import Reporter
from pipeline.inspect.dumps.dump_step import DumpRequest, dump_step, loss_check
from pipeline.inspect.dumps.layer_programs import Weights, layer_kinds
from pipeline.inspect.dumps.opened_recipe import (
    kept_state,
    logged_loss,
    open_recipe,
    require_checkpoints,
)
from pipeline.inspect.dumps.tensor_names import require_layers
from pipeline.stages.export.trained_run import read_run_recipe
from pipeline.stages.record.run_directory import DUMP, RECIPE

USAGE = (
    "dump takes RUN_DIR and step=N, layers=PATTERN,..., what=input|output|all, "
    "as=statistics|tensors, path=FOLDER and max_mib=N"
)
HELP = """usage: python -m pipeline dump RUN_DIR step=N [layers=PATTERN,...] [what=WHAT] [as=WHOLE]

Compute a step of a run again from its saved state, and write what every layer reads and gives, in
the forward and in the backward pass. The run is not changed. The loss is compared with the run's.

  RUN_DIR               a run that has saved checkpoints
  step=N                steps done: the tensors are those of the next one; also 0|5|10 and 5-10.
                        Without a checkpoint of N, the steps after the one before are trained again
  layers=PATTERN,...    layers by glob pattern, such as conv_*; all unless it is given
  what=input            what reaches layers: input, output, or all, which it is unless it is given
  as=tensors            whole arrays as .npy files, which it is unless it is given, or statistics
  path=FOLDER           where to; RUN_DIR/dump unless it is given
  max_mib=N             limit of the arrays of a step, 4096 unless it is given

Exit status: 0 written, 1 it stops early, as on a full disk, 2 the run or an argument is wrong.

example: python -m pipeline dump outputs/again step=500 'layers=conv_*'
"""
KEYS = ("step", "layers", "what", "as", "path", "max_mib")
MAX_MIB = 4096


@dataclass(frozen=True)
class DumpArguments:
    """The parsed arguments."""

    run_dir: Path
    steps: tuple[int, ...]
    layers: tuple[str, ...]
    what: What
    content: Content
    path: Path | None
    max_mib: int


def main(args: Sequence[str]) -> int:
    """Write the dumps; the exit status is 1 where one stops early.

    Raises UsageError for other arguments, DataError where the run or its checkpoints can't be read,
    RecipeError for a pattern that no layer matches.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    given = _parse(args)
    if not (given.run_dir / RECIPE).is_file():
        raise DataError(f"{given.run_dir}: is no run directory, there is no {RECIPE} in it")
    require_checkpoints(given.run_dir)
    if given.path is None:
        require_real_trees(given.run_dir, (DUMP,))
    elif not given.path.is_dir():
        raise DataError(f"path={given.path}: must be a folder that exists")
    root = given.path or given.run_dir / DUMP
    with Reporter() as reporter:
        opened = open_recipe(read_run_recipe(given.run_dir), given.run_dir)
        request = DumpRequest(
            root,
            DumpRequest.now(),
            given.layers,
            given.what,
            given.content,
            given.max_mib << 20,
        )
        parts = opened.built.parts
        opened.programs(given.steps[0])
        require_layers(given.layers, list(layer_kinds(parts, opened.built.seed)), "layers")
        for step in given.steps:
            kept = kept_state(opened, given.run_dir, step, reporter)
            if kept.replayed:
                first = step - kept.replayed
                reporter.stage("state", f"of step {first}; {kept.replayed:,} steps trained again")
            loss = logged_loss(given.run_dir, step)
            with reporter.clock(f"dumping step {step}"):
                written = dump_step(
                    request,
                    opened.recipe,
                    opened.programs(step),
                    Weights.of(kept.state),
                    opened.batch(step),
                    step,
                    device=opened.device_name,
                    run=str(given.run_dir),
                    run_loss=loss,
                )
            reporter.stage("dump", f"step {step}: {written.report}")
            reporter.stage("dump", f"step {step}: {loss_check(written.loss, loss)}")
            if written.report.stopped is not None:
                return 1
    return 0


def _parse(args: Sequence[str]) -> DumpArguments:
    words = [arg for arg in args if arg.partition("=")[0] not in KEYS or "=" not in arg]
    keys = dict(arg.split("=", 1) for arg in args if arg not in words)
    if len(words) != 1 or words[0].startswith("-") or "=" in words[0]:
        wrong = [word for word in words if "=" in word]
        if wrong:
            key = wrong[0].partition("=")[0]
            raise UsageError(wrong[:1], f"{no_such('key', key, KEYS)}; {USAGE}")
        raise UsageError(args, USAGE)
    if "step" not in keys:
        raise UsageError(args, f"step is missing, as in step=500; {USAGE}")
    try:
        steps = parse_steps(keys["step"])
    except ValueError as error:
        raise UsageError([f"step={keys['step']}"], str(error)) from error
    whats: tuple[What, ...] = get_args(What)
    contents: tuple[Content, ...] = get_args(Content)
    return DumpArguments(
        Path(words[0]),
        steps,
        split_patterns(keys),
        whats[_choice("what", keys.get("what", "all"), whats)],
        contents[_choice("as", keys.get("as", "tensors"), contents)],
        Path(keys["path"]) if "path" in keys else None,
        _positive("max_mib", keys.get("max_mib", str(MAX_MIB))),
    )


def split_patterns(keys: Mapping[str, str]) -> tuple[str, ...]:
    """Return the patterns of `layers=conv_*,dense_0`; none where it is not given."""
    return tuple(filter(None, keys.get("layers", "").split(",")))


def _choice(key: str, value: str, known: Sequence[str]) -> int:
    if value not in known:
        raise UsageError([f"{key}={value}"], f"must be one of {', '.join(known)}")
    return list(known).index(value)


def _positive(key: str, value: str) -> int:
    if not value.isdecimal() or len(value) > 7 or not 0 < int(value) <= 1_000_000:
        raise UsageError([f"{key}={value}"], "must be a whole number from 1 to 1,000,000")
    return int(value)
