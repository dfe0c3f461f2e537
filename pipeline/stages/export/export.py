"""Export of a trained network to a folder that needs no recipe: program, weights, description.

model.bin            the program, serialised by jax.export
model.mlir           the program as StableHLO text, for other compilers
weights.safetensors  the program's first argument, by name
tokenizer.json       the tokenizer of texts
next_token.bin       the program that continues a text by one token, if the layers have a cache
model.json           inputs, outputs, classes and origin

An export to ONNX adds model.onnx, model_int8.onnx, model_weights.onnx and predict.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from pipeline.core.errors import DataError, RecipeError, RunError, first_line
from pipeline.core.files.atomic_write import convert_write_errors, format_json, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.host.array_values import explain_value_read, is_value_read
from pipeline.data.text.file_names import TOKENIZER
from pipeline.data.text.text_format import write_tokenizer
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.models.weights.files.weight_files import read_weights, write_weights
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.export.text_generation import make_cached_decoder
from pipeline.stages.record.trained_run import Samples, TrainedRun, parse_samples

PROGRAM = "model.bin"
STABLEHLO = "model.mlir"
WEIGHTS = "weights.safetensors"
DESCRIPTION = "model.json"
NEXT_TOKEN = "next_token.bin"
ONNX_FILES = ("model.onnx", "model_int8.onnx", "model_weights.onnx", "predict.py")
"""Additional files of an export to ONNX."""
PLATFORMS = ("cpu", "cuda")
FORMAT = 1
"""Version of model.json."""
MAX_PROGRAM_BYTES = 2**30
"""Size of the largest program that is read. It doesn't include the weights."""


@dataclass(frozen=True)
class ExportedNetwork:
    """An exported network that was read from its folder."""

    program: export.Exported
    """(weights, samples before map ops) -> logits float32 (batch, classes)."""
    arrays: Arrays
    samples: Samples
    next_token: export.Exported | None = None
    """(weights, cache, token, position) -> (logits of the next token, cache)."""


def export_run(run: TrainedRun, folder: Path, onnx_entries: Mapping[str, Any] | None) -> None:
    """Write the prediction of a run as a program for any batch size, on CPU and GPU.

    `onnx_entries` are added to model.json. This file is removed first and written last, so that an
    incomplete folder has none. Without `onnx_entries`, the files of an earlier export to ONNX are
    removed: they may have other weights. Raises RunError if a file can't be written, or if an op
    needs a certain batch size, and RecipeError if one reads the values of a sample.
    """
    (batch,) = export.symbolic_shape("batch")
    samples = run.samples.pack(
        lambda spec: jax.ShapeDtypeStruct((batch, *spec.shape), np.dtype(spec.dtype))
    )
    predict = export.export(jax.jit(make_predict(run)), platforms=PLATFORMS)
    try:
        program = predict(run.arrays, samples)
    except (TypeError, ValueError, NotImplementedError) as error:
        if is_value_read(error):
            raise RecipeError(explain_value_read(error)) from error
        problem = f"can't be exported for batches of any size: {first_line(error)}"
        raise RunError(f"{run.recipe.name}: {problem}") from error
    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        outdated = (DESCRIPTION,) if onnx_entries else (DESCRIPTION, *ONNX_FILES)
        for name in outdated:
            (folder / name).unlink(missing_ok=True)
        (folder / PROGRAM).write_bytes(program.serialize())
        (folder / STABLEHLO).write_text(program.mlir_module(), encoding="utf-8")
        write_weights(folder / WEIGHTS, run.arrays)
        _write_text_files(run, folder)
        description = {**_describe(run, program), **(onnx_entries or {})}
        write_whole(folder / DESCRIPTION, format_json(description, indent=2) + "\n")


def is_export(folder: Path) -> bool:
    """Return whether `export_run` has written this folder completely."""
    return (folder / DESCRIPTION).is_file()


def holds_other_files(folder: Path) -> bool:
    """Return whether `folder` holds files that an export doesn't write."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        return True
    names = {file.name for file in folder.iterdir()}
    export_names = [PROGRAM, STABLEHLO, WEIGHTS, DESCRIPTION, TOKENIZER, NEXT_TOKEN]
    if names & {DESCRIPTION, PROGRAM, ONNX_FILES[0]}:
        # Without other files of an export, predict.py may be the user's script.
        export_names += ONNX_FILES
    # Temporary files of a killed export begin with the name of the file.
    return not all(name.startswith(tuple(export_names)) for name in names)


def read_export(folder: Path) -> ExportedNetwork:
    """Read an export. Raises DataError if a file is missing, damaged or of another export."""
    try:
        samples = parse_samples(read_json(folder / DESCRIPTION), folder)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / DESCRIPTION}: doesn't describe an export: {error}") from error
    arrays = read_weights(folder / WEIGHTS)
    program = _read_program(folder / PROGRAM)
    arguments, _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    weights = arguments[0] if len(arguments) == 2 and isinstance(arguments[0], Mapping) else {}
    shapes = {name: tuple(aval.shape) for name, aval in weights.items()}
    if shapes != {name: array.shape for name, array in arrays.items()}:
        raise DataError(f"{folder}: {WEIGHTS} doesn't fit {PROGRAM}; export the run again")
    has_next_token = (folder / NEXT_TOKEN).is_file() and samples.text is not None
    next_token = _read_program(folder / NEXT_TOKEN) if has_next_token else None
    return ExportedNetwork(program, arrays, samples, next_token)


def _read_program(path: Path) -> export.Exported:
    try:
        if path.stat().st_size > MAX_PROGRAM_BYTES:
            raise ValueError(f"it has more than {MAX_PROGRAM_BYTES:,} bytes")
        return export.deserialize(bytearray(path.read_bytes()))
    except Exception as error:  # flatbuffers raises errors of any type for other bytes
        raise DataError(f"{path}: must be an exported program: {error}") from error


def _write_text_files(run: TrainedRun, folder: Path) -> None:
    """Write the tokenizer of a network that reads texts, and its program for the next token."""
    (folder / NEXT_TOKEN).unlink(missing_ok=True)
    if run.samples.text is None:
        return
    write_tokenizer(folder, run.samples.text)
    decoder = make_cached_decoder(run)
    if decoder is not None:
        number = jax.ShapeDtypeStruct((), np.int32)
        exporter = export.export(jax.jit(decoder.step), platforms=PLATFORMS)
        step = exporter(run.arrays, decoder.shapes, number, number)
        (folder / NEXT_TOKEN).write_bytes(step.serialize())


def _describe(run: TrainedRun, program: export.Exported) -> Mapping[str, Any]:
    """Return the entries of model.json."""
    samples = run.samples
    (logits,) = program.out_avals
    shape = [size if isinstance(size, int) else str(size) for size in logits.shape]
    return {
        "format": FORMAT,
        "recipe": run.recipe.name,
        "model": run.recipe.model.name,
        "step": run.step,
        **({"members": list(map(str, run.members))} if run.members else {}),
        "program": PROGRAM,
        "stablehlo": STABLEHLO,
        "weights": WEIGHTS,
        "platforms": list(PLATFORMS),
        "columns": samples.to_dict(),
        "inputs": [
            {"name": name, "shape": list(array.shape), "dtype": array.dtype.name}
            for name, array in sorted(run.arrays.items())
        ]
        + [
            {"name": name, "shape": ["batch", *spec.shape], "dtype": spec.dtype}
            for name, spec in samples.columns.items()
        ],
        "outputs": [{"name": "logits", "shape": shape, "dtype": logits.dtype.name}],
        "classes": list(samples.classes),
        "targets": samples.targets.to_dict(),
        **({} if samples.table is None else {"table": samples.table.to_dict()}),
        **({} if samples.text is None else {"text": samples.text.to_dict()}),
        **({} if samples.audio is None else {"audio": samples.audio.to_dict()}),
        **({} if samples.scale is None else {"scale": samples.scale.model_dump(mode="json")}),
        **({} if samples.series is None else {"series": samples.series.model_dump(mode="json")}),
        **({} if samples.brightness is None else {"brightness": samples.brightness.to_dict()}),
    }
