"""`python -m pipeline export RUN_DIR FOLDER`: write a trained network that needs no recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.cli._usage import asks_for_help, show_usage
from pipeline.errors import DataError, UsageError, printable
from pipeline.weights.export import export_run, holds_other_files
from pipeline.weights.trained_run import read_trained_run

MODEL_FILES = frozenset(
    {
        *(".safetensors", ".npz", ".pt", ".pth", ".pkl", ".zip", ".bin", ".mlir"),
        *(".onnx", ".h5", ".keras", ".tflite", ".pb", ".gguf", ".mlmodel", ".engine"),
        *(".ckpt", ".mindir", ".air", ".om"),
    }
)
"""Suffixes of model files: whoever names one expects a file, and a folder is written."""
USAGE = "export takes RUN_DIR FOLDER"
NO_FILE = (
    "export writes a folder of StableHLO, weights and what they are of, and no such file; name a "
    "folder, or for the weights alone: convert weights RUN_DIR FILE.safetensors, .ckpt or .npz"
)
HELP = """usage: python -m pipeline export RUN_DIR FOLDER

Write the network of a run, with its newest weights, so that it needs no recipe any more: model.bin
and model.mlir (StableHLO, for any batch size), weights.safetensors and model.json.

  RUN_DIR   a run that has saved a checkpoint, or one of its checkpoints
  FOLDER    the folder to write; one that holds something else is left alone

example: python -m pipeline export outputs/2026-11-21/14-46-29_lenet5_digits digits_network
"""


def main(args: Sequence[str]) -> int:
    """Write the network of a run, with its newest weights; the exit status is 0.

    Raises UsageError for other arguments, RecipeError and DataError where the run can't be read,
    RunError where the folder can't be written. One that holds something else is left alone.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    if len(args) != 2 or any(arg.startswith("-") for arg in args):
        raise UsageError(args, USAGE)
    source, folder = map(Path, args)
    if folder.suffix.lower() in MODEL_FILES and not args[1].endswith("/") and not folder.is_dir():
        raise UsageError(args[1:], NO_FILE)
    run = read_trained_run(source)
    if holds_other_files(folder):
        raise DataError(f"{folder}: holds something else than an export; name another folder")
    export_run(run, folder)
    what = f"{run.recipe.model.name} of step {run.step}, {len(run.samples.classes)} classes"
    print(printable(f"{folder}: {what}"))
    return 0
