"""Map ops that change values: scale, dtype, encoding, order of axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from pipeline.core.registry import Seq, component
from pipeline.data.columns import ColumnSpec, Targets
from pipeline.data.dataset_spec import Op
from pipeline.data.ops.image import ImageOp, Probability, require_image


@component("op")
class Rescale(ImageOp):
    """value * factor + shift, in float32."""

    name: Literal["rescale"] = "rescale"
    factor: float
    shift: float

    def output(self, value: ColumnSpec) -> ColumnSpec:
        return replace(value, dtype="float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        return values.astype(np.float32) * self.factor + self.shift


@component("op")
class Normalize(ImageOp):
    """(image - mean) / std in float32, with a mean and a std for each channel."""

    name: Literal["normalize"] = "normalize"
    mean: Seq[float]
    std: Seq[PositiveFloat]

    @model_validator(mode="after")
    def _require_equal_lengths(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"mean has {len(self.mean)} values and std has {len(self.std)}; "
                "must have one of each for each channel"
            )
        return self

    def output(self, value: ColumnSpec) -> ColumnSpec:
        *_, channels = require_image(value)
        if len(self.mean) != channels:
            raise ValueError(
                f"mean and std have {len(self.mean)} values for images of {channels} channels; "
                "must have one for each channel"
            )
        return replace(value, dtype="float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        mean = np.array(self.mean, np.float32)
        std = np.array(self.std, np.float32)
        # XLA replaces division by a constant with this product, but numpy doesn't.
        return (values.astype(np.float32) - mean) * (1 / std)


@component("op")
class Hwc2Chw(ImageOp):
    """Move the channels of an image to the front, the layout of MindSpore's networks."""

    name: Literal["hwc2chw"] = "hwc2chw"

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = require_image(value)
        return replace(value, shape=(channels, height, width), layout="chw")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        return xp.moveaxis(values, -1, 1)


@component("op")
class TypeCast(Op):
    """Convert to a dtype of at most 32 bits, which numpy and JAX share."""

    name: Literal["type_cast"] = "type_cast"
    column: str = "label"
    dtype: Literal[
        "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"
    ]

    def output(self, value: ColumnSpec) -> ColumnSpec:
        return replace(value, dtype=self.dtype)

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        return values.astype(self.dtype)


@component("op")
class OneHot(Op):
    """Convert integer labels to one-hot, float32 (..., classes). Labels outside 0..classes - 1
    become zeros.

    With `smoothing` s a one is 1 - s + s / classes and a zero s / classes, as in MindSpore's op.
    MindSpore's loss smooths in another way.
    """

    name: Literal["one_hot"] = "one_hot"
    column: str = "label"
    classes: PositiveInt
    smoothing: Probability = 0.0

    def output(self, value: ColumnSpec) -> ColumnSpec:
        if not np.issubdtype(np.dtype(value.dtype), np.integer):
            raise ValueError(
                f"needs integer labels, not {value.dtype}; list a type_cast to int32 before it"
            )
        return replace(value, shape=(*value.shape, self.classes), dtype="float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        is_class = values[..., None] == np.arange(self.classes)
        if self.smoothing == 0:
            return is_class.astype(np.float32)
        has_class = is_class.any(axis=-1, keepdims=True)
        off = np.float32(self.smoothing / self.classes)
        on = np.float32(1 - self.smoothing + self.smoothing / self.classes)
        return xp.where(is_class, on, xp.where(has_class, off, np.float32(0)))


@component("op")
class Whiten(ImageOp):
    """(image - m) / max(s, 1 / sqrt(n)), with the mean m and deviation s of the image's n values.

    The bound prevents a division by 0 for an image of one colour. TensorFlow called the op
    `per_image_whitening`, and now calls it `per_image_standardization`, since pixels stay
    correlated. Computed in float32. Last digits depend on the device.
    """

    name: Literal["whiten"] = "whiten"

    def output(self, value: ColumnSpec) -> ColumnSpec:
        require_image(value)
        return replace(value, dtype="float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        values = values.astype(np.float32)
        count = float(np.prod(values.shape[1:]))
        centred = values - values.mean(axis=(1, 2, 3), keepdims=True)
        variance = (centred * centred).mean(axis=(1, 2, 3), keepdims=True)
        return centred / xp.maximum(xp.sqrt(variance), np.float32(count**-0.5))


@component("op")
class ConstantLabels(Op):
    """Replace the dataset's labels by labels that are the same for all samples, float32 (labels,).

    They are the targets of the scores that the layer `adversarial` returns.
    """

    has_constant_labels: ClassVar[bool] = True
    name: Literal["constant_labels"] = "constant_labels"
    column: Literal["label"] = "label"
    values: Annotated[dict[str, Probability], Field(min_length=1)]
    """The value of each label, from 0 to 1, by the label's name."""

    def replace_targets(self, targets: Targets) -> Targets:
        return Targets(tuple(self.values), "multi_label")

    def output(self, value: ColumnSpec) -> ColumnSpec:
        return ColumnSpec((len(self.values),), "float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        row = xp.asarray(list(self.values.values()), np.float32)
        return xp.broadcast_to(row, (values.shape[0], len(self.values)))
