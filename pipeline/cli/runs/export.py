"""`python -m pipeline export RUN_DIR ... FOLDER`: write a trained network that needs no recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import DataError, UsageError, printable
from pipeline.stages.export.export import export_run, holds_other_files
from pipeline.stages.export.mindspore_checkpoints import write_checkpoints
from pipeline.stages.export.prediction import read_network
from pipeline.stages.record.member_runs import list_members
from pipeline.stages.record.run_directory import find_run_dir, note_descendant
from pipeline.stages.record.trained_run import TrainedRun

if TYPE_CHECKING:
    from pipeline.stages.export.onnx.weight_quantization import WeightType

# fmt: off
MODEL_SUFFIXES = frozenset((
    ".safetensors", ".npz", ".pt", ".pth", ".pkl", ".zip", ".bin", ".mlir", ".onnx", ".h5",
    ".keras", ".tflite", ".pb", ".gguf", ".mlmodel", ".engine", ".ckpt", ".mindir", ".air", ".om",
))
# fmt: on
"""Suffixes of files: who types one doesn't expect that a folder is written."""
NO_FILE = (
    "export writes a folder, with StableHLO and weights; name a folder, or for the weights alone: "
    "convert weights RUN_DIR FILE.safetensors, .ckpt or .npz"
)
CALIBRATION_SAMPLES = 512
"""Default number of samples that calibrate int8."""
OPTIONS = {"onnx": ("int8", "samples", "weights"), "ckpt": ("optimizer", "prefix")}
"""The options of each format, a choice of `--to`."""


def main(
    run_dirs: Sequence[Path],
    folder: Path,
    to: str | None = None,
    *,
    int8: bool = False,
    samples: int | None = None,
    weights: str | None = None,
    optimizer: bool = False,
    prefix: str | None = None,
) -> CommandResult:
    """Write the network of a run, or the ensemble of several, with the newest weights.

    `to` is onnx, ckpt, or None for StableHLO alone. Raises UsageError for options of another
    format, RecipeError and DataError if the run can't be read, DataError if the folder has other
    files, RunError if it can't be written.
    """
    if folder.suffix.lower() in MODEL_SUFFIXES and not folder.is_dir():
        raise UsageError([str(folder)], NO_FILE)
    options = {
        "int8": int8,
        "samples": samples,
        "weights": weights,
        "optimizer": optimizer,
        "prefix": prefix,
    }
    for other_format, names in OPTIONS.items():
        for name in names:
            if options[name] and to != other_format:
                raise UsageError([f"--{name}"], f"needs --to {other_format}")
    if samples is not None and not int8:
        raise UsageError([f"--samples {samples}"], "needs --int8, which they calibrate")
    members = list_members(run_dirs)
    if to == "ckpt" and len(members) > 1:
        raise UsageError(["--to ckpt"], f"writes the files of one run, not of {len(members)}")
    if to == "ckpt":
        return _write_ckpt(members[0], folder, prefix, optimizer=optimizer)
    run = read_network(members)
    if holds_other_files(folder):
        raise DataError(f"{folder}: has other files than an export's; name another folder")
    calibration_samples = (samples or CALIBRATION_SAMPLES) if int8 else 0
    onnx_facts = _write_onnx(run, folder, calibration_samples, weights) if to == "onnx" else {}
    export_run(run, folder, onnx_facts)
    for member in members:
        _note_export(member, folder)
    print(printable(f"{folder}: {run}, {run.samples.targets}"))
    facts = {"folder": str(folder), "model": run.recipe.model.name, "step": run.step}
    return CommandResult({**facts, **onnx_facts})


def _write_onnx(
    run: TrainedRun, folder: Path, calibration_samples: int, weights: str | None
) -> dict[str, Any]:
    """Write the ONNX files, print their largest error, and return their entries of model.json."""
    from pipeline.stages.export.onnx.onnx_export import MODEL, WEIGHTS, write_onnx

    export = write_onnx(
        run,
        folder,
        calibration_samples=calibration_samples,
        weights=cast("WeightType | None", weights),
    )
    text = f"logits differ from the run's by {export.difference:.2g} at most"
    if export.accuracy is not None:
        text += f", accuracy {export.accuracy:.4f}"
    if export.int8_accuracy is not None:
        text += f", in int8 {export.int8_accuracy:.4f}"
        text += f" ({export.calibration_samples} samples to calibrate)"
    print(printable(f"{folder / MODEL}: {text}"))
    if export.weights is not None:
        quantized = export.weights
        text = f"{quantized.kind} weights, {quantized.share:.0%} of the bytes; logits differ by "
        text += f"{quantized.difference:.2g} at most"
        if quantized.accuracy is not None:
            text += f", accuracy {quantized.accuracy:.4f}"
        print(printable(f"{folder / WEIGHTS}: {text}"))
    return {"onnx": export.describe()}


def _write_ckpt(
    run_dir: Path, folder: Path, prefix: str | None, *, optimizer: bool
) -> CommandResult:
    if prefix is not None and (not prefix or Path(prefix).name != prefix):
        raise UsageError([f"--prefix {prefix}"], "must be a name without folders")
    files = []
    for file in write_checkpoints(run_dir, folder, prefix, optimizer=optimizer):
        print(printable(str(file)))
        files.append(str(file))
    _note_export(run_dir, folder)
    return CommandResult({"folder": str(folder), "files": files})


def _note_export(source: Path, folder: Path) -> None:
    """Record the export in the run that contains `source`, if a run does."""
    run_dir = find_run_dir(source)
    if run_dir is not None:
        note_descendant(run_dir, "exported", folder)
