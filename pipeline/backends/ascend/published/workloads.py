"""Published step times, and the same steps of this package's networks, whose time is modelled."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.errors import FlaxError
from omegaconf import OmegaConf
from pydantic import BeforeValidator, Field, ValidationError
from pydantic.dataclasses import dataclass

from pipeline.backends.ascend.chip.hardware import PricedChip
from pipeline.backends.ascend.chip.options import ExecutionConfig, Mode, Precision, load_stacks
from pipeline.backends.ascend.cost.efficiency import GROUPS, Calibration, calibrate_with
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.pricing.traced_step import (
    TracedStep,
    get_params,
    pause_garbage_collection,
    trace_step,
)
from pipeline.backends.ascend.published.networks.parts import Net
from pipeline.backends.ascend.published.networks.workload_table import WORKLOADS
from pipeline.backends.ascend.published.vision_networks import ConvNeXt, Swin, dbnet
from pipeline.backends.ascend.report.priced_step import PricedStep
from pipeline.core.errors import RunError, first_line
from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.name_text import find_nearest
from pipeline.core.files.paths import CONF
from pipeline.core.files.value_text import show
from pipeline.core.registry import list_components
from pipeline.data.columns import ColumnSpec, Targets
from pipeline.data.inputs import NetworkInput, NetworkInputs
from pipeline.data.tables.encode_table import FIELD_COLUMNS
from pipeline.models.layers.model_spec import ModelSpec
from pipeline.training.component_specs import OptimizerSpec
from pipeline.training.estimated_step import make_estimated_step
from pipeline.training.features.loss_scales import Fixed, ScaledLoss
from pipeline.training.losses import CrossEntropy, TrainingObjective
from pipeline.training.optimizers.first_order import Adam, AdamW, Momentum
from pipeline.training.step import make_train_step
from pipeline.training.step_config import StepConfig

PUBLISHED = Path(__file__).with_name("published.csv")
DESCRIBED = Path(__file__).with_name("described.csv")
"""Steps of the parts `fit` and `look` (scores.py) that the calibration doesn't read."""
DESCRIBED_LATER = Path(__file__).with_name("described_later.csv")
"""Steps of these parts that were described after the populations were fitted, which read none."""
SEALED = Path(__file__).with_name("sealed.csv")
"""Steps of the part `seal`, which `validate --seal` alone prices."""
ATLAS_A2 = Path(__file__).with_name("atlas_a2.csv")
"""Steps on an Atlas A2, which no fit reads."""

MINDCV = "MindSpore 2.x / mindcv"
"""`framework` of MindCV's rows, which have batch normalisation in float32 under O2."""

VERSION = re.compile(r"(?:MindSpore |PyTorch |branch r)(\d+\.(?:\d+|x))")
"""The version in a row's framework; 2.x is 2.0."""

Quality = Literal["device", "at_most", "pair"]
"""Meaning of a row's time. `device`: the device's time. `at_most`: an upper bound of it, as the
host may have been slower. `pair`: one of two modes, eager and graph, of a training with work that
isn't modelled (DBNet mines its negatives by a sort); only their ratio is compared."""
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A number in a shape, which is counted in 32 bits."""
Duration = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LEFT_OUT_FILE = Path(__file__).with_name("left_out.csv")
"""Calibrations for each family, fitted to the rows of all other families."""


def _parse_fusion(points: Any) -> Any:
    return (points.split() or None) if isinstance(points, str) else points


@dataclass(frozen=True)
class Published:
    """A published step time, and how to price the same step.

    `batch` is the batch size of one device, `ms` the time of a step. `pixels` is the height and
    width of an image, the number of fields of Wide & Deep or of tokens of ERNIE. A network of
    `WORKLOADS` with samples of one shape has these, whatever `pixels` is. `fusion` has the
    parameters' indices at which gradients are split into all-reduces. `op_launch_us` is the host's
    time to launch an op; None: the chip's figure. `suspicion` is the reason why the host may have
    been slower than the device, or empty.
    """

    id: str
    model: str
    family: str
    batch: Count
    pixels: Count
    classes: Count
    devices: Count
    precision: Precision
    mode: Mode
    fusion: Annotated[tuple[int, ...] | None, BeforeValidator(_parse_fusion)]
    op_launch_us: Annotated[Duration | None, BeforeValidator(lambda text: text or None)]
    ms: Duration
    quality: Quality
    framework: str
    source: str
    suspicion: str = ""

    @property
    def is_mindcv(self) -> bool:
        """Whether the row is MindCV's."""
        return self.framework.startswith(MINDCV)


@cache
def load_published_steps(file: Path = PUBLISHED) -> tuple[Published, ...]:
    """Return the rows of a table, in its order. Raises OSError, and ValueError for an invalid row
    or another file."""
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            return tuple(parse_row(row) for row in csv.DictReader(lines))
    except csv.Error as error:
        raise ValueError(str(error)) from error


def parse_row(row: Mapping[str, str]) -> Published:
    """Return a row of a table, by column. Raises ValueError for an invalid row."""
    names = [field.name for field in fields(Published) if field.name != "suspicion"]
    if missing := [name for name in names if name not in row]:
        raise ValueError(f"has no column {', '.join(missing)}")
    columns: Any = {name: row[name] for name in names}
    try:
        return Published(**columns, suspicion=row.get("suspicion") or "")
    except ValidationError as error:
        raise ValueError("; ".join(describe_problems(error, columns))) from error


MOMENTUM = Momentum(lr=0.1, weight_decay=1e-4, decay_rules=(), momentum=0.9, nesterov=False)
ADAM = Adam(lr=1e-4, weight_decay=0.0, decay_rules=(), b1=0.9, b2=0.999, eps=1e-8)
ADAMW = AdamW(lr=1e-3, weight_decay=0.05, decay_rules=(), b1=0.9, b2=0.999, eps=1e-8)

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "vit_s_16": ("vit_b_16", {"features": 384, "hidden": 1536, "heads": 6}),
    "efficientnet_b2": ("efficientnet_b0", {"width": 1.1, "depth": 1.2}),
    "efficientnet_b3": ("efficientnet_b0", {"width": 1.2, "depth": 1.4}),
    "efficientnet_b4": ("efficientnet_b0", {"width": 1.4, "depth": 1.8}),
    "efficientnet_b5": ("efficientnet_b0", {"width": 1.6, "depth": 2.2}),
    "regnet_x_1600mf": (
        "regnet_x_800mf",
        {"blocks": [2, 4, 10, 2], "widths": [72, 168, 408, 912], "group_width": 24},
    ),
}
"""Published networks without a file in conf/model: another network's file, and changed settings."""


def load_model_spec(name: str) -> ModelSpec:
    """Return a network by the name of its file in conf/model.

    Raises RunError for an unknown one, and for one that needs settings which a row doesn't have.
    """
    file_name, changes = VARIANTS.get(name, (name, {}))
    files = {file.stem: file for file in sorted((CONF / "model").glob("*.yaml"))}
    if file_name not in files:
        guess = find_nearest(name, (*files, *VARIANTS, *TRACERS))
        question = f"; did you mean {guess}?" if guess else ""
        raise RunError(
            f"network {show(name)}: must be a file of conf/model, such as resnet50, or be in "
            f"published/workloads.py or published/networks/workload_table.py{question}"
        )
    settings: Any = OmegaConf.to_container(OmegaConf.load(files[file_name]))
    settings |= changes
    try:
        return cast(ModelSpec, list_components("model")[settings["name"]].model_validate(settings))
    except ValidationError as error:
        rule = "needs settings, which a table of steps doesn't have; must be another network"
        raise RunError(f"network {show(name)}: {rule}") from error


@cache
def trace_image_step(
    model: str, batch: int, pixels: int, classes: int, optimizer: OptimizerSpec = MOMENTUM
) -> TracedStep:
    """Return a step on square images, of 1 channel for LeNet, else of 3."""
    images = describe_input((pixels, pixels, 1 if model.startswith("lenet") else 3))
    return trace_network(load_model_spec(model), batch, images, classes, optimizer)


def describe_input(shape: tuple[int, ...], dtype: str = "float32") -> NetworkInputs:
    """Return the only input of a network: images, or tokens of the type int32."""
    return NetworkInputs((NetworkInput("image", "image", ColumnSpec(shape, dtype)),))


def describe_fields(count: int) -> NetworkInputs:
    """Return the inputs of Wide & Deep: the indices and the values of a number of fields."""
    return NetworkInputs(
        tuple(
            NetworkInput(name, name, ColumnSpec((count,), dtype))
            for name, dtype in zip(FIELD_COLUMNS, ("int32", "float32"), strict=True)
        ),
        is_named=True,
    )


def trace_network(
    spec: ModelSpec,
    batch: int,
    inputs: NetworkInputs,
    classes: int,
    optimizer: OptimizerSpec = MOMENTUM,
) -> TracedStep:
    """Return a step of a classifier."""
    loss = CrossEntropy(reduction="mean", smoothing=0.0, smoothing_convention="uniform").build()
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    network = spec.build(classes, "float32")
    return trace_module(network, loss, inputs, labels, classes, optimizer)


def trace_module(
    network: nn.Module,
    loss: Callable[[Any, Any], Any],
    inputs: NetworkInputs,
    labels: jax.ShapeDtypeStruct,
    classes: int,
    optimizer: OptimizerSpec = MOMENTUM,
) -> TracedStep:
    """Return a step. `loss` returns a loss for each sample of a batch."""
    step_config = StepConfig(
        network=network,
        inputs=inputs,
        targets=Targets(tuple(map(str, range(classes)))),
        train_ops=(),
        eval_ops=(),
        objective=TrainingObjective(loss),
        optimizer=optimizer.build(),
        features=(ScaledLoss(Fixed(scale=1.0, drop_overflow_update=False)),),
    )
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    with pause_garbage_collection():
        state = jax.eval_shape(make_train_step(step_config).init, seed)
    size = labels.shape[0]
    arrays = inputs.pack(lambda array: jax.ShapeDtypeStruct((size, *array.shape), array.dtype))
    return trace_step(make_estimated_step(step_config, 0.1), state, (arrays, labels), get_params)


def _trace_text_detector(row: Published) -> TracedStep:
    """Return a step of DBNet with one loss, which has the traffic of DBNet's three losses."""
    shape = (row.batch, row.pixels, row.pixels, 3)

    def loss(maps: jax.Array, truth: jax.Array) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(maps, truth).mean((1, 2, 3))

    network = dbnet(cast(Any, load_model_spec(row.model.removeprefix("dbnet_"))))
    # The network returns 3 maps of the images' size.
    labels = jax.ShapeDtypeStruct(shape, jnp.float32)
    return trace_module(network, loss, describe_input(shape[1:]), labels, row.classes)


def _trace_swin_or_convnext(row: Published) -> TracedStep:
    """Return a step of Swin or ConvNeXt with smoothed labels and their authors' AdamW."""
    loss = CrossEntropy(reduction="mean", smoothing=0.1, smoothing_convention="uniform").build()
    images = describe_input((row.pixels, row.pixels, 3))
    labels = jax.ShapeDtypeStruct((row.batch,), jnp.int32)
    network: nn.Module = ConvNeXt(row.classes)
    if row.model == "swin_t":
        network = Swin(row.classes, mindcv=row.is_mindcv)
    return trace_module(network, loss, images, labels, row.classes, ADAMW)


def _trace_workload(row: Published) -> TracedStep:
    """Return a step of a network of `WORKLOADS`."""
    workload = WORKLOADS[row.model]
    shape = workload.sample or (row.pixels, row.pixels, 3)
    network = Net(partial(workload.body, classes=row.classes))
    integers = workload.labels is not None
    label_shape = workload.labels
    if label_shape is None:
        keys = {name: jax.random.key(0) for name in ("params", "dropout")}
        images = jax.ShapeDtypeStruct((row.batch, *shape), jnp.float32)
        outputs, _ = jax.eval_shape(lambda x: network.init_with_output(keys, x, True), images)
        label_shape = outputs.shape[1:]
    labels = jax.ShapeDtypeStruct((row.batch, *label_shape), jnp.int32 if integers else jnp.float32)
    optimizer = {"momentum": MOMENTUM, "adam": ADAM, "adamw": ADAMW}[workload.optimizer]
    inputs = describe_input(shape)
    return trace_module(network, workload.loss, inputs, labels, row.classes, optimizer)


def _trace_ernie(row: Published) -> TracedStep:
    """Return a step of BERT base with ERNIE's 18,000 tokens; `pixels` is the number of tokens."""
    spec = load_model_spec("bert_base").model_copy(update={"vocabulary": 18_000})
    tokens = describe_input((row.pixels,), "int32")
    return trace_network(spec, row.batch, tokens, row.classes, ADAMW)


def _trace_wide_deep(row: Published) -> TracedStep:
    """Return a step of Wide & Deep; `pixels` is the number of fields, which have an index and a
    value each."""
    spec = load_model_spec(row.model)
    return trace_network(spec, row.batch, describe_fields(row.pixels), row.classes, ADAM)


def _trace_classifier(row: Published) -> TracedStep:
    """Return a step of a network of conf/model, or of `VARIANTS`, on images."""
    # MindCV recommends AdamW for networks like ViT (optim_factory.py of 0.3.0).
    optimizer = ADAMW if row.is_mindcv and row.family == "transformer" else MOMENTUM
    return trace_image_step(row.model, row.batch, row.pixels, row.classes, optimizer)


TRACERS: Mapping[str, Callable[[Published], TracedStep]] = {
    **dict.fromkeys(WORKLOADS, _trace_workload),
    "ernie_base": _trace_ernie,
    "dbnet_resnet18": _trace_text_detector,
    "dbnet_resnet50": _trace_text_detector,
    "dbnet_mobilenet_v3_large": _trace_text_detector,
    "swin_t": _trace_swin_or_convnext,
    "convnext_tiny": _trace_swin_or_convnext,
    "wide_deep": _trace_wide_deep,
}
"""Functions of the networks that aren't classifiers of conf/model on images, by name."""


def trace_row(row: Published) -> TracedStep:
    """Return the step of a published row. Raises RunError for an unknown network, and for one that
    can't have the row's samples."""
    try:
        return TRACERS.get(row.model, _trace_classifier)(row)
    except (ValueError, TypeError, LookupError, AttributeError, FlaxError) as error:
        raise RunError(
            f"network {show(row.model)}: can't be priced with batch = {row.batch}, pixels = "
            f"{row.pixels}, classes = {row.classes}: {first_line(error)}"
        ) from error


def require_pixels(row: Published) -> None:
    """Raise ValueError if a row has other pixels than the samples of its network, which have one
    shape."""
    workload = WORKLOADS.get(row.model)
    sample = None if workload is None else workload.sample
    # The first number is the height, and a row may also have the width.
    if sample is not None and row.pixels not in sample[:2]:
        raise ValueError(
            f"pixels = {row.pixels}: must be {sample[0]} for {row.model}, whose samples "
            f"have the shape {sample}"
        )


def load_left_out() -> Mapping[str, Calibration]:
    """Return the calibrations of left_out.csv by the family that they leave out."""
    with LEFT_OUT_FILE.open(newline="", encoding="utf-8") as lines:
        return {
            row["family"]: calibrate_with(
                {group: float(row[group]) for group in GROUPS},
                float(row["task_us"]),
                float(row["log_sd"]),
                float(row["interval_scale"]),
            )
            for row in csv.DictReader(lines)
        }


def configure_row(row: Published) -> ExecutionConfig:
    """Return the options of a published row's run.

    TensorFlow's graphs are priced as MindSpore's, as both are compiled by the same engine. Graphs
    of MindSpore 2.x have the stack of 2.0. A version that chip/software.yaml doesn't have, such as
    0.5 or 1.1, has the newest stack: the passes that it lacked aren't known.
    """
    name = "mindcv_graph" if row.is_mindcv else "mindspore_graph"
    if row.mode == "op_by_op":
        name = "pytorch_eager" if row.framework.startswith("PyTorch") else "mindspore_eager"
    match = VERSION.search(row.framework)
    version = match[1].replace("x", "0") if match else ""
    if version.startswith("2.") and name == "mindspore_graph":
        version = "2.0"
    software = f"{name}@{version}" if version in load_stacks()[name] else name
    return ExecutionConfig(
        row.precision,
        row.mode,
        sink_size=1000,
        devices=row.devices,
        fusion=row.fusion,
        software=software,
        keep_batchnorm_fp32=row.is_mindcv and row.precision == "O2",
    )


def price_row(
    row: Published,
    calibration: Calibration,
    chip: PricedChip | None = None,
    without: frozenset[str] = frozenset(),
) -> PricedStep:
    """Return the modelled step of a row. `without` are passes that the compiler skips."""
    config = configure_row(row)
    pricing = open_row(row, calibration, chip)
    return pricing.price_step(replace(config, without=config.without | without))


def open_row(row: Published, calibration: Calibration, chip: PricedChip | None = None) -> Pricing:
    """Return the pricing of a row's step, with the time of a launch that the row has."""
    pricing = Pricing(trace_row(row), chip or chipset("ascend910"), calibration)
    if row.op_launch_us is None:
        return pricing
    return pricing.with_figures(
        op_launch_us=row.op_launch_us, pytorch_op_launch_us=row.op_launch_us
    )
