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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from pipeline.core.errors import DataError, RecipeError, RunError, first_line
from pipeline.core.files.atomic_write import convert_write_errors, format_json, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.value_text import show
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
    with _convert_trace_errors(run, "can't be exported for batches of any size"):
        program = _export_program(make_predict(run), run.arrays, samples)
    # Programs are made before an earlier export is removed.
    next_token = _export_next_token(run)
    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        outdated = (DESCRIPTION,) if onnx_entries else (DESCRIPTION, *ONNX_FILES)
        for name in outdated:
            (folder / name).unlink(missing_ok=True)
        (folder / PROGRAM).write_bytes(program.serialize())
        (folder / STABLEHLO).write_text(program.mlir_module(), encoding="utf-8")
        write_weights(folder / WEIGHTS, run.arrays)
        _write_text_files(run, next_token, folder)
        description = {**_describe(run, program), **(onnx_entries or {})}
        write_whole(folder / DESCRIPTION, format_json(description, indent=2) + "\n")


@contextmanager
def _convert_trace_errors(run: TrainedRun, problem: str) -> Iterator[None]:
    """Raise RunError, with `problem`, if a program of the block can't be traced, and RecipeError if
    code of the run reads the values of a sample."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        if is_value_read(error):
            raise RecipeError(explain_value_read(error)) from error
        raise RunError(f"{run.recipe.name}: {problem}: {first_line(error)}") from error


def _export_program(compute: Callable[..., Any], *arguments: Any) -> export.Exported:
    return export.export(jax.jit(compute), platforms=PLATFORMS)(*arguments)


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
        record = read_json(folder / DESCRIPTION)
        _require_format(record)
        samples = parse_samples(record, folder)
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


def _require_format(record: Any) -> None:
    """Raise ValueError unless model.json has the version that is written here."""
    version = record.get("format") if isinstance(record, Mapping) else None
    if version != FORMAT:
        raise ValueError(
            f"format = {show(version)}: must be {FORMAT}; export the run again, or use a version "
            "of this package that writes it"
        )


def _read_program(path: Path) -> export.Exported:
    try:
        if path.stat().st_size > MAX_PROGRAM_BYTES:
            raise ValueError(f"it has more than {MAX_PROGRAM_BYTES:,} bytes")
        return export.deserialize(bytearray(path.read_bytes()))
    except Exception as error:  # flatbuffers raises errors of any type for other bytes
        raise DataError(f"{path}: must be an exported program: {error}") from error


def _export_next_token(run: TrainedRun) -> export.Exported | None:
    """Return the program for the next token of a text; None if the layers have no cache. Raises as
    `export_run` does."""
    if run.samples.text is None:
        return None
    with _convert_trace_errors(run, "its next token can't be exported"):
        decoder = make_cached_decoder(run)
        if decoder is None:
            return None
        number = jax.ShapeDtypeStruct((), np.int32)
        return _export_program(decoder.step, run.arrays, decoder.shapes, number, number)


def _write_text_files(run: TrainedRun, next_token: export.Exported | None, folder: Path) -> None:
    """Write the tokenizer of a network that reads texts, and its program for the next token."""
    (folder / NEXT_TOKEN).unlink(missing_ok=True)
    if run.samples.text is not None:
        write_tokenizer(folder, run.samples.text)
    if next_token is not None:
        (folder / NEXT_TOKEN).write_bytes(next_token.serialize())


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
