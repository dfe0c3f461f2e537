"""`python -m pipeline export RUN_DIR FOLDER`: write a trained network that needs no recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.core.errors import DataError, UsageError, printable
from pipeline.stages.export.export import export_run, holds_other_files
from pipeline.stages.export.trained_run import TrainedRun, read_trained_run
from pipeline.stages.record.descendants import note_descendant
from pipeline.stages.record.run_directory import run_of

MODEL_FILES = frozenset(
    {
        *(".safetensors", ".npz", ".pt", ".pth", ".pkl", ".zip", ".bin", ".mlir"),
        *(".onnx", ".h5", ".keras", ".tflite", ".pb", ".gguf", ".mlmodel", ".engine"),
        *(".ckpt", ".mindir", ".air", ".om"),
    }
)
"""Suffixes of model files: whoever names one expects a file, and a folder is written."""
USAGE = "export takes RUN_DIR FOLDER, to=onnx|ckpt and their options"
NO_FILE = (
    "export writes a folder of StableHLO, weights and what they are of, and no such file; name a "
    "folder, or for the weights alone: convert weights RUN_DIR FILE.safetensors, .ckpt or .npz"
)
HELP = """usage: python -m pipeline export RUN_DIR FOLDER [to=onnx [int8=true] [samples=N]]
       python -m pipeline export RUN_DIR FOLDER to=ckpt [optimizer=true] [prefix=NAME]

Write the network of a run, with its newest weights, so that it needs no recipe any more: model.bin
and model.mlir (StableHLO, for any batch size), weights.safetensors and model.json.

  RUN_DIR          a run that has saved a checkpoint, or one of its checkpoints
  FOLDER           the folder to write; one that holds something else is left alone
  to=onnx          also model.onnx, compared with the run in ONNX Runtime, and predict.py, which
                   needs onnxruntime, numpy and pillow alone (pip install 'recipe-pipeline[onnx]')
  int8=true        also model_int8.onnx, calibrated with training samples
  samples=N        the number of them, 512 unless it is given
  to=ckpt          instead every checkpoint as MindSpore's PREFIX-EPOCH_STEP.ckpt; FOLDER may hold
                   other files
  optimizer=true   the optimizer's state in them, too
  prefix=NAME      the name of the network unless it is given

example: python -m pipeline export outputs/2026-11-21/14-46-29_lenet5_digits digits_network
"""
OPTIONS = {"onnx": ("int8", "samples"), "ckpt": ("optimizer", "prefix")}
"""The options of each target, besides `to`."""
CALIBRATE = 512
MAX_DIGITS = 9


@dataclass(frozen=True)
class ExportArguments:
    """The parsed arguments."""

    source: Path
    folder: Path
    to: str | None
    options: Mapping[str, str]

    def is_on(self, name: str) -> bool:
        """Whether an option is `true`. Raises UsageError for anything but true and false."""
        value = self.options.get(name, "false").lower()
        if value not in ("true", "false"):
            raise UsageError([f"{name}={self.options[name]}"], "must be true or false")
        return value == "true"


def main(args: Sequence[str]) -> int:
    """Write the network of a run, with its newest weights; the exit status is 0.

    Raises UsageError for other arguments, RecipeError and DataError where the run can't be read,
    RunError where the folder can't be written. One that holds something else is left alone.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    given = _parse(args)
    if given.to == "ckpt":
        return _write_ckpt(given)
    int8 = given.is_on("int8")
    samples = _samples(given) if int8 or "samples" in given.options else 0
    run = read_trained_run(given.source)
    if holds_other_files(given.folder):
        raise DataError(f"{given.folder}: holds something else than an export; name another folder")
    more = _write_onnx(run, given.folder, samples if int8 else 0) if given.to == "onnx" else {}
    export_run(run, given.folder, more)
    _note(given)
    what = f"{run.recipe.model.name} of step {run.step}, {run.samples.targets}"
    print(printable(f"{given.folder}: {what}"))
    return 0


def _parse(args: Sequence[str]) -> ExportArguments:
    words = [arg for arg in args if "=" not in arg]
    options = dict(arg.split("=", 1) for arg in args if "=" in arg)
    to = options.pop("to", None)
    if len(words) != 2 or any(word.startswith("-") for word in (*words, *options)):
        raise UsageError(args, USAGE)
    if to is not None and to not in OPTIONS:
        raise UsageError([f"to={to}"], f"must be one of {', '.join(OPTIONS)}, or left out")
    unknown = [
        f"{name}={value}"
        for name, value in options.items()
        if name not in OPTIONS.get(to or "", ())
    ]
    if unknown:
        raise UsageError(unknown, USAGE)
    source, folder = map(Path, words)
    if folder.suffix.lower() in MODEL_FILES and not words[1].endswith("/") and not folder.is_dir():
        raise UsageError(words[1:], NO_FILE)
    return ExportArguments(source, folder, to, options)


def _samples(given: ExportArguments) -> int:
    text = given.options.get("samples", str(CALIBRATE))
    if not text.isdecimal() or len(text) > MAX_DIGITS or int(text) < 1:
        raise UsageError([f"samples={text}"], "must be a whole number above 0")
    return int(text)


def _write_onnx(run: TrainedRun, folder: Path, calibrate: int) -> dict[str, Any]:
    """Write the ONNX files, print how near they are, and return the entries of model.json."""
    from pipeline.stages.export.onnx.onnx_export import MODEL, write_onnx

    export = write_onnx(run, folder, calibrate=calibrate)
    said = f"logits differ from the run's by {export.difference:.2g} at most"
    if export.accuracy is not None:
        said += f", accuracy {export.accuracy:.4f}"
    if export.int8_accuracy is not None:
        said += f", in int8 {export.int8_accuracy:.4f} ({calibrate} samples to calibrate)"
    print(printable(f"{folder / MODEL}: {said}"))
    return {"onnx": export.about()}


def _write_ckpt(given: ExportArguments) -> int:
    from pipeline.stages.export.mindspore_checkpoints import write_checkpoints

    prefix = given.options.get("prefix")
    if prefix is not None and (not prefix or Path(prefix).name != prefix):
        raise UsageError([f"prefix={prefix}"], "must be a name without folders")
    optimizer = given.is_on("optimizer")
    for file in write_checkpoints(given.source, given.folder, prefix, optimizer=optimizer):
        print(printable(str(file)))
    _note(given)
    return 0


def _note(given: ExportArguments) -> None:
    """Note the export in the run's directory, for its lineage."""
    run_dir = run_of(given.source)
    if run_dir is not None:
        note_descendant(run_dir, "exported", given.folder)
