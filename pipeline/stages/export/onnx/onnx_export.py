"""Export of a trained network of layers to ONNX, whose logits are compared with the run's.

model.onnx        columns of samples before map ops, such as images (batch, height, width, channels)
                  -> logits float32
model_int8.onnx   the same with convolutions and dense layers in int8, for --int8
model_weights.onnx  model.onnx with weights in int8 or int4, for --weights
predict.py        a script that runs any of them with onnxruntime, numpy and pillow alone
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.config.resolved_settings import resolve_level
from pipeline.core.errors import RecipeError, RunError, first_line
from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.data.columns import ColumnSpec, Split, Task
from pipeline.data.dataset_spec import find_table_layout
from pipeline.data.inputs import Dataset
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.modules.network import separate_masks
from pipeline.stages.data import load_data
from pipeline.stages.export.export import DESCRIPTION, ONNX_FILES
from pipeline.stages.export.onnx.composite_nodes import Average, add_average
from pipeline.stages.export.onnx.graph_builder import (
    BATCH,
    IR_VERSION,
    OPSET,
    GraphBuilder,
    NodeOutput,
)
from pipeline.stages.export.onnx.layer_nodes import add_layers
from pipeline.stages.export.onnx.op_nodes import add_ops, add_scale
from pipeline.stages.export.onnx.weight_quantization import WeightType, quantize_weights
from pipeline.stages.export.prediction import make_predict, map_inputs, require_equal_shapes
from pipeline.stages.record.trained_run import TrainedRun
from pipeline.stages.sample_sizes import choose_inputs

MODEL, INT8, WEIGHTS, SCRIPT = ONNX_FILES
OUTPUT = "logits"
NUM_COMPARED = 64
"""Samples whose logits are compared."""
EVALUATED_BATCH = 128
LOG_WARNINGS, LOG_ERRORS = 2, 3
"""ONNX Runtime's severities of warnings, its default, and errors."""
TOLERANCE = 1e-3
"""Largest difference of float32 logits, as a share of the larger of 1 and the largest logit."""
INSTALL = "needs onnx and onnxruntime: pip install 'recipe-pipeline[onnx]'"
MAX_BYTES = 2**31 - 1
"""Most bytes of a protocol buffer."""


@dataclass(frozen=True)
class QuantizedWeights:
    """model_weights.onnx, and its difference from the run."""

    kind: WeightType
    share: float
    """Its bytes, as a share of the bytes of model.onnx."""
    difference: float
    """As in `OnnxExport`."""
    accuracy: float | None


@dataclass(frozen=True)
class OnnxExport:
    """An export to ONNX, and its difference from the run."""

    inputs: tuple[str, ...]
    """Names of the graph's inputs, the samples' columns."""
    difference: float
    """Largest difference of a logit from the run's, over `NUM_COMPARED` evaluation samples."""
    accuracy: float | None
    """Accuracy on the evaluation split in ONNX Runtime; None if samples have no class."""
    int8_accuracy: float | None = None
    calibration_samples: int = 0
    """Training samples that calibrated int8; 0 without it."""
    weights: QuantizedWeights | None = None

    def describe(self) -> Mapping[str, Any]:
        """Return the entries of model.json."""
        files = {
            "program": MODEL,
            "script": SCRIPT,
            **({"inputs": self.inputs} if len(self.inputs) > 1 else {"input": self.inputs[0]}),
            "output": _name_output(self.inputs),
        }
        int8_file = {"int8": INT8} if self.calibration_samples else {}
        weights_file = {"weights": WEIGHTS} if self.weights is not None else {}
        return {**files, "opset": OPSET, **int8_file, **weights_file}


def require_onnx() -> None:
    """Raise RunError unless onnx and onnxruntime are installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise RunError(f"--to onnx {INSTALL}") from error


def write_onnx(
    run: TrainedRun, folder: Path, *, calibration_samples: int, weights: WeightType | None = None
) -> OnnxExport:
    """Write model.onnx and predict.py, model_int8.onnx unless `calibration_samples` is 0, and with
    a type of weights model_weights.onnx.

    At most that many training samples calibrate int8. Raises RecipeError for a layer or an op
    without a translation, RunError if at level O0 the logits of ONNX Runtime differ from the run's
    by more than `TOLERANCE`, or if a file can't be written.
    """
    require_onnx()
    model = make_onnx_model(run)
    columns = tuple(value.name for value in model.graph.input)
    content = model.SerializeToString()
    session = _open_session(content)
    dataset = load_data(run.recipe)
    difference = _measure_difference(run, session, dataset, columns)
    ignored = run.recipe.dataset.ignore_index
    accuracy = _measure_accuracy(session, dataset, columns, ignored)
    script = Path(__file__).with_name("predict_script.py").read_text(encoding="utf-8")
    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # An incomplete export has no description.
        for name in (DESCRIPTION, INT8, WEIGHTS):
            (folder / name).unlink(missing_ok=True)
        write_whole(folder / MODEL, content)
        write_whole(folder / SCRIPT, script)
        export = OnnxExport(columns, difference, accuracy)
        if weights is not None:
            changed = quantize_weights(content, weights)
            write_whole(folder / WEIGHTS, changed)
            session = _open_session(changed)
            gap = _measure_difference(run, session, dataset, columns, is_exact=False)
            accuracy = _measure_accuracy(session, dataset, columns, ignored)
            quantized = QuantizedWeights(weights, len(changed) / len(content), gap, accuracy)
            export = replace(export, weights=quantized)
        if not calibration_samples:
            return export
        samples = _read_samples(dataset.train, columns, calibration_samples)
        int8_content = _quantize(content, samples)
        write_whole(folder / INT8, int8_content)
    int8_accuracy = _measure_accuracy(_open_session(int8_content), dataset, columns, ignored)
    calibrated = len(samples[columns[0]])
    return replace(export, int8_accuracy=int8_accuracy, calibration_samples=calibrated)


def make_onnx_model(run: TrainedRun) -> Any:
    """Return a run's evaluation ops and network as an `onnx.ModelProto` for any batch size.

    The inputs have the names of the samples' columns. Raises RecipeError without a list of layers,
    and for a layer or op without a translation; RunError for weights of more than `MAX_BYTES`.
    """
    from onnx import TensorProto, checker, helper, numpy_helper

    samples = run.samples
    output = _name_output(samples.columns)
    graph = GraphBuilder(run.arrays, taken=(*samples.columns, output))
    if run.members:
        results = [_add_network(member, graph) for member in run.members]
        result = _add_average(results, samples.targets.task, graph)
    else:
        result = _add_network(run, graph)
    graph.nodes.append(helper.make_node("Identity", [result.name], [output]))
    if sum(array.nbytes for array in graph.constants.values()) > MAX_BYTES:
        raise RunError(
            f"{run.recipe.name}: has more than {MAX_BYTES:,} bytes, the most of model.onnx"
        )
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), [BATCH, *spec.shape]
        )
        for name, spec in samples.columns.items()
    ]
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            run.recipe.model.name,
            inputs,
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, [BATCH, *result.shape])],
            [numpy_helper.from_array(array, name) for name, array in graph.constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    checker.check_model(model)
    return model


def _name_output(columns: Collection[str]) -> str:
    """Return the name of the graph's output, which differs from its inputs' names."""
    name = OUTPUT
    while name in columns:
        name = f"predicted_{name}"
    return name


def _add_network(run: TrainedRun, graph: GraphBuilder) -> NodeOutput:
    """Add the evaluation ops and the network of a run; return its output, channels last."""
    recipe = run.recipe
    samples = run.samples
    if not isinstance(recipe.model, LayeredModelSpec):
        raise RecipeError(
            f"model = {recipe.model.name}: must be a list of layers for --to onnx; export without "
            "it, as StableHLO"
        )
    if samples.table is not None and recipe.model.table_input != "rows":
        raise RecipeError(
            f"dataset = {recipe.dataset.name}: the encoding of a table has no translation to "
            "ONNX but for model=table; export without --to onnx, as StableHLO"
        )
    if recipe.dataset.padding_mask:
        raise RecipeError(
            "dataset.padding_mask = true: the padding mask of this run has no translation to ONNX; "
            "export without --to onnx, as StableHLO"
        )
    # The copy has the weights of this run, and adds to the same lists of nodes and constants.
    graph = replace(graph, weights=run.arrays)
    columns = {
        name: NodeOutput(name, spec.shape, dtype=spec.dtype)
        for name, spec in samples.columns.items()
    }
    scale = samples.scale
    if scale is not None:
        columns[scale.column] = add_scale(scale, columns[scale.column], graph)
    if samples.text is not None and samples.text.predicts == "class":
        # Padding is below 0.
        zero = graph.add_constant("whole", np.array(0, np.int32))
        (name,) = columns
        tokens = graph.add_node("Max", [name, zero])
        columns[name] = replace(columns[name], name=tokens)
    mapped = add_ops(recipe.dataset.eval.ops, columns, graph)
    specs = {name: ColumnSpec(value.shape, value.dtype) for name, value in mapped.items()}
    inputs = choose_inputs(recipe, specs, tuple(specs))
    values = inputs.pack(lambda array: graph.cast(mapped[array.column], array.dtype))
    layout = find_table_layout(map_inputs(recipe, samples).ops)
    model = recipe.model.fit(layout, samples.targets)
    assert isinstance(model, LayeredModelSpec), "a fitted model keeps its class"
    layers = model.layers_for(len(samples.classes))
    value, mask, masks = separate_masks(layers, values)
    graph = replace(
        graph,
        token_mask=None if mask is None else mask.name,
        input_masks={name: mask.name for name, mask in masks.items()},
    )
    logits = graph.to_order(add_layers(layers, value, graph), "nhwc")
    if run.temperature == 1:
        return logits
    temperature = graph.add_scalar(run.temperature)
    return replace(logits, name=graph.add_node("Div", [logits.name, temperature]))


def _add_average(outputs: Sequence[NodeOutput], task: Task, graph: GraphBuilder) -> NodeOutput:
    """Add the average of an ensemble by the formulas of `average_outputs`.

    Raises DataError for outputs of different shapes.
    """
    require_equal_shapes([output.shape for output in outputs])
    rows = [graph.add_node("Unsqueeze", [output.name, graph.add_axis(0)]) for output in outputs]
    stacked = graph.add_node("Concat", rows, axis=0)
    averages: dict[Task, Average] = {"regression": "numbers", "multi_label": "labels"}
    average = averages.get(task, "probabilities")
    return NodeOutput(add_average(average, stacked, 0, len(rows), graph), outputs[0].shape)


def _open_session(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = LOG_ERRORS
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base
        raise RunError(f"ONNX Runtime refuses the model: {first_line(error)}") from error


def _measure_difference(
    run: TrainedRun,
    session: Any,
    dataset: Dataset,
    columns: Sequence[str],
    *,
    is_exact: bool = True,
) -> float:
    """Return the largest difference of a logit. If the session is of the same weights, raises
    RunError above `TOLERANCE` if all layers compute in float32."""
    samples = _read_samples(dataset.eval, columns, NUM_COMPARED)
    expected = np.asarray(jax.jit(make_predict(run))(run.arrays, samples), np.float64)
    logits = session.run([_name_output(columns)], samples)[0]
    if logits.shape != expected.shape:
        raise RunError(f"ONNX Runtime returns shape {logits.shape}, the run {expected.shape}")
    difference = float(np.abs(logits - expected).max())
    limit = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    recipes = [member.recipe for member in run.members or (run,)]
    is_exact &= all(resolve_level(item) == "O0" and not item.train.to_float for item in recipes)
    if is_exact and (math.isnan(difference) or difference > limit):
        raise RunError(
            f"ONNX Runtime's logits differ from the run's by {difference:.3g}, more than "
            f"{limit:.3g}; nothing was written"
        )
    return difference


def _measure_accuracy(
    session: Any, dataset: Dataset, columns: Sequence[str], ignore_index: int | None
) -> float | None:
    """Return the share of evaluation samples with the right class; None without classes."""
    labels = dataset.eval.columns["label"]
    if dataset.targets.task != "classification" or len(labels.shape) != 1:
        return None
    num_right = 0
    num_counted = 0
    for start in range(0, len(dataset.eval), EVALUATED_BATCH):
        rows = np.arange(start, min(start + EVALUATED_BATCH, len(dataset.eval)))
        samples = {name: np.asarray(dataset.eval.columns[name][rows]) for name in columns}
        truth = np.asarray(labels[rows])
        valid = np.ones(len(truth), bool) if ignore_index is None else truth != ignore_index
        predicted = session.run([_name_output(columns)], samples)[0].argmax(axis=-1)
        num_right += int(((predicted == truth) & valid).sum())
        num_counted += int(valid.sum())
    return num_right / num_counted if num_counted else None


def _read_samples(split: Split, columns: Sequence[str], count: int) -> dict[str, np.ndarray]:
    """Return columns of at most `count` samples, spread evenly over a split."""
    rows = np.linspace(0, len(split) - 1, min(count, len(split))).astype(np.int64)
    return {name: np.asarray(split.columns[name][rows]) for name in columns}


def _quantize(content: bytes, samples: Mapping[str, np.ndarray]) -> bytes:
    """Return the model with int8 products, calibrated on samples (n, ...) by its inputs.

    Batch norm is folded into convolutions first. The format is QDQ. Weights are symmetric, with a
    scale for each channel. Activations have a scale for each tensor, by its minimum and maximum.
    """
    import onnxruntime
    from onnxruntime import quantization

    count = len(next(iter(samples.values())))
    batches = (
        {name: array[start : start + EVALUATED_BATCH] for name, array in samples.items()}
        for start in range(0, count, EVALUATED_BATCH)
    )

    class _Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(batches, None)

    # Sessions of the quantization have no options.
    onnxruntime.set_default_logger_severity(LOG_ERRORS)
    # onnxruntime advises to preprocess the model. The folding below does that.
    logging.getLogger().addFilter(_isnt_advice)
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "source.onnx")
            folded = Path(folder, "folded.onnx")
            target = Path(folder, "int8.onnx")
            source.write_bytes(content)
            options = onnxruntime.SessionOptions()
            options.log_severity_level = LOG_ERRORS
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            options.optimized_model_filepath = str(folded)
            # Making the session writes the folded model.
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
        logging.getLogger().removeFilter(_isnt_advice)
        onnxruntime.set_default_logger_severity(LOG_WARNINGS)


def _isnt_advice(record: logging.LogRecord) -> bool:
    return "pre-processing" not in record.getMessage()
