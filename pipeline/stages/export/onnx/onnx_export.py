"""Export of a trained network to ONNX: written from its list of layers, checked in ONNX Runtime.

model.onnx        images as the dataset has them (batch, height, width, channels) -> logits float32
model_int8.onnx   the same with convolutions and dense layers in int8, with --int8
predict.py        a script that runs either with onnxruntime, numpy and pillow alone
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from pipeline.config.precision import level_of
from pipeline.core.errors import RecipeError, RunError, first_line
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.reporter import Reporter
from pipeline.data.columns import Split
from pipeline.data.dataset import Dataset
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.stages.data import load_data
from pipeline.stages.export.export import ABOUT, OF_ONNX
from pipeline.stages.export.onnx.graph_builder import (
    BATCH,
    IR_VERSION,
    OPSET,
    GraphBuilder,
    NodeOutput,
)
from pipeline.stages.export.onnx.layer_nodes import add_layers
from pipeline.stages.export.onnx.op_nodes import Images, add_ops
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.export.trained_run import TrainedRun

MODEL, INT8, SCRIPT = OF_ONNX
INPUT = "images"
OUTPUT = "logits"
CHECKED = 64
"""Samples that both programs compute, to compare them."""
EVALUATED_BATCH = 128
TOLERANCE = 1e-3
"""The greatest difference of float32 logits that is rounding, in units of the largest logit."""
INSTALL = "needs onnx and onnxruntime: pip install 'recipe-pipeline[onnx]'"
MAX_BYTES = 2**31 - 1
"""Most bytes of a protocol buffer."""


@dataclass(frozen=True)
class OnnxExport:
    """An export to ONNX, and its difference from the run."""

    difference: float
    """The greatest difference of a logit from the run's, over `CHECKED` evaluation samples."""
    accuracy: float | None
    """On the evaluation split, by ONNX Runtime; None if samples have no class."""
    int8_accuracy: float | None = None
    calibration_samples: int = 0
    """Training samples that calibrated int8; 0 without it."""

    def about(self) -> Mapping[str, Any]:
        """The entries of model.json."""
        files = {"program": MODEL, "script": SCRIPT, "input": INPUT, "output": OUTPUT}
        return {**files, "opset": OPSET, **({"int8": INT8} if self.calibration_samples else {})}


def require_onnx() -> None:
    """Raise RunError unless onnx and onnxruntime are installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise RunError(f"--to onnx {INSTALL}") from error


def write_onnx(run: TrainedRun, folder: Path, *, calibrate: int = 0) -> OnnxExport:
    """Write model.onnx and predict.py, and int8 calibrated with `calibrate` training samples, or as
    many as there are.

    Raises RecipeError for a layer or an op without a translation, RunError if ONNX Runtime computes
    something else than the run, or the disk refuses.
    """
    require_onnx()
    model = onnx_model(run)
    content = model.SerializeToString()
    session = _session(content)
    dataset = load_data(run.recipe, Reporter(console=Console(file=io.StringIO())))
    difference = _compare(run, session, dataset)
    ignored = run.recipe.dataset.ignore_index
    accuracy = _accuracy(session, dataset, ignored)
    script = Path(__file__).with_name("predict_script.py").read_text(encoding="utf-8")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Half an export doesn't count as one.
        for name in (ABOUT, INT8):
            (folder / name).unlink(missing_ok=True)
        write_whole(folder / MODEL, content)
        write_whole(folder / SCRIPT, script)
        if not calibrate:
            return OnnxExport(difference, accuracy)
        images = _sample_images(dataset.train, calibrate)
        small = _quantize(content, images)
        write_whole(folder / INT8, small)
    except OSError as error:
        raise RunError(f"{folder}: can't be written: {error.strerror}") from error
    int8_accuracy = _accuracy(_session(small), dataset, ignored)
    return OnnxExport(difference, accuracy, int8_accuracy, len(images))


def onnx_model(run: TrainedRun) -> Any:
    """Return a run's evaluation ops and network, as an `onnx.ModelProto` for any batch.

    Raises RecipeError for a network that isn't a list of layers, and for a layer or an op without a
    translation.
    """
    from onnx import TensorProto, checker, helper, numpy_helper

    recipe = run.recipe
    samples = run.samples
    if not isinstance(recipe.model, LayeredModelSpec):
        raise RecipeError(
            f"model = {recipe.model.name}: is no list of layers, of which --to onnx is "
            "written; export without it, as StableHLO"
        )
    if samples.table is not None:
        raise RecipeError(
            f"dataset = {recipe.dataset.name}: the encoding of a table has no translation to "
            "ONNX; export without --to onnx, as StableHLO"
        )
    if recipe.dataset.padding_mask:
        raise RecipeError("dataset.padding_mask = true: has no translation to ONNX; must be false")
    graph = GraphBuilder(run.arrays)
    images = Images(NodeOutput(INPUT, samples.shape), samples.dtype)
    value = add_ops(recipe.dataset.eval.ops, images, graph)
    layers = recipe.model.layers_for(len(samples.classes))
    result = graph.to_order(add_layers(layers, value, graph), "nhwc")
    graph.nodes.append(helper.make_node("Identity", [result.name], [OUTPUT]))
    if sum(array.nbytes for array in graph.constants.values()) > MAX_BYTES:
        raise RunError(f"{recipe.name}: has more than {MAX_BYTES:,} bytes, the most of model.onnx")
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(samples.dtype))
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            recipe.model.name,
            [helper.make_tensor_value_info(INPUT, kind, [BATCH, *samples.shape])],
            [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, [BATCH, *result.shape])],
            [numpy_helper.from_array(array, name) for name, array in graph.constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    checker.check_model(model)
    return model


def _session(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base
        raise RunError(f"ONNX Runtime refuses the model: {first_line(error)}") from error


def _compare(run: TrainedRun, session: Any, dataset: Dataset) -> float:
    """Return the greatest difference of a logit. Raises RunError if it is more than rounding."""
    images = _sample_images(dataset.eval, CHECKED)
    expected = np.asarray(jax.jit(make_predict(run))(run.arrays, images), np.float64)
    logits = session.run([OUTPUT], {INPUT: images})[0]
    if logits.shape != expected.shape:
        raise RunError(f"ONNX Runtime gives shape {logits.shape}, the run {expected.shape}")
    difference = float(np.abs(logits - expected).max())
    limit = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if level_of(run.recipe) == "O0" and not difference <= limit:
        raise RunError(
            f"ONNX Runtime's logits differ from the run's by {difference:.3g}, more than "
            f"{limit:.3g}; nothing was written"
        )
    return difference


def _accuracy(session: Any, dataset: Dataset, ignore_index: int | None) -> float | None:
    """Return the share of evaluation samples whose class is right; None if they have none."""
    labels = dataset.eval.columns["label"]
    if dataset.targets.task != "classification" or len(labels.shape) != 1:
        return None
    right = counted = 0
    for start in range(0, len(dataset.eval), EVALUATED_BATCH):
        rows = np.arange(start, min(start + EVALUATED_BATCH, len(dataset.eval)))
        images = np.asarray(dataset.eval.columns["image"][rows])
        truth = np.asarray(labels[rows])
        valid = np.ones(len(truth), bool) if ignore_index is None else truth != ignore_index
        predicted = session.run([OUTPUT], {INPUT: images})[0].argmax(axis=-1)
        right += int(((predicted == truth) & valid).sum())
        counted += int(valid.sum())
    return right / counted if counted else None


def _sample_images(split: Split, count: int) -> np.ndarray:
    """Return images of samples spread evenly over a split: it may be sorted by class."""
    rows = np.linspace(0, len(split) - 1, min(count, len(split))).astype(np.int64)
    return np.asarray(split.columns["image"][rows])


def _quantize(content: bytes, images: np.ndarray) -> bytes:
    """Return the model with int8 products, calibrated on `images` (n, H, W, C).

    Batch norm is folded into convolutions first. Weights have a scale for each channel (QDQ
    format, symmetric int8), activations one for each tensor, from the least to the greatest value.
    """
    import onnxruntime
    from onnxruntime import quantization

    batches = (
        {INPUT: images[start : start + EVALUATED_BATCH]}
        for start in range(0, len(images), EVALUATED_BATCH)
    )

    class _Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(batches, None)

    # Its advice to preprocess the model, which is done here.
    logging.getLogger().addFilter(_is_no_advice)
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, folded, target = (
                Path(folder) / file for file in ("source.onnx", "folded.onnx", "int8.onnx")
            )
            source.write_bytes(content)
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            options.optimized_model_filepath = str(folded)
            onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
            quantization.quantize_static(
                folded,
                target,
                _Reader(),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=["Conv", "ConvTranspose", "Gemm", "MatMul"],
                per_channel=True,
                activation_type=quantization.QuantType.QInt8,
                weight_type=quantization.QuantType.QInt8,
            )
            return target.read_bytes()
    finally:
        logging.getLogger().removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "pre-processing" not in record.getMessage()
