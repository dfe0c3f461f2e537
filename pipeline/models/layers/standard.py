"""Specs of the standard layers, with MindSpore's defaults. `modules` has their computations."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from pipeline.core.registry import Seq, component
from pipeline.models.layers.model_spec import (
    CLASSES,
    AdaptiveSize,
    Count,
    Features,
    Initializer,
    Layers,
    LayerSpec,
    Padding,
    Size,
    VolumeSize,
    pair,
)


def require_even_groups(layer: Any) -> Any:
    """Return a convolution. Raises ValueError if `groups` doesn't divide its `features`."""
    if layer.features != CLASSES and layer.features % layer.groups:
        raise ValueError(
            f"features {layer.features} is not a multiple of groups {layer.groups}; "
            "every group must have the same number of features"
        )
    return layer


@component("layer")
class Conv(LayerSpec):
    """Two-dimensional convolution of images (batch, height, width, channels)."""

    name: Literal["conv"] = "conv"
    features: Features
    kernel: Size
    stride: Size = 1
    padding: Padding = "same"
    dilation: Size = 1
    groups: PositiveInt = 1
    bias: bool = False
    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None

    _check_groups = model_validator(mode="after")(require_even_groups)


@component("layer")
class Conv3d(LayerSpec):
    """Three-dimensional convolution of volumes (batch, depth, height, width, channels)."""

    name: Literal["conv3d"] = "conv3d"
    features: Features
    kernel: VolumeSize
    stride: VolumeSize = 1
    padding: Literal["same", "valid", "symmetric"] | NonNegativeInt = "same"
    dilation: VolumeSize = 1
    groups: PositiveInt = 1
    bias: bool = False
    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None

    _check_groups = model_validator(mode="after")(require_even_groups)


@component("layer")
class ConvTranspose(LayerSpec):
    """The transpose of a convolution, which adds each pixel times the kernel to an output window.
    The output has size * stride positions; with `valid` max(0, kernel - stride) more."""

    name: Literal["conv_transpose"] = "conv_transpose"
    features: Features
    kernel: Size
    stride: Size = 1
    padding: Literal["same", "valid"] = "same"
    groups: PositiveInt = 1
    bias: bool = False
    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None

    _check_groups = model_validator(mode="after")(require_even_groups)


@component("layer")
class Dense(LayerSpec):
    """Linear map of (batch, features), or of each token of (batch, tokens, features)."""

    name: Literal["dense"] = "dense"
    features: Features
    bias: bool = True
    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None


@component("layer")
class BatchNorm(LayerSpec):
    """Normalise each channel over the batch; `momentum` is the weight of old running statistics."""

    name: Literal["batch_norm"] = "batch_norm"
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.9
    epsilon: PositiveFloat = 1e-5
    scale_init: float = 1.0
    """Initial value of the scale. 0 at the end of a residual body makes a new block the identity
    (Goyal et al. 2017, sec. 5.1)."""


@component("layer")
class LayerNorm(LayerSpec):
    """Normalise each sample over its channels."""

    name: Literal["layer_norm"] = "layer_norm"
    epsilon: PositiveFloat = 1e-7


@component("layer")
class RmsNorm(LayerSpec):
    """Divide each sample by the root mean square of its channels, and scale each channel (Zhang
    and Sennrich 2019). The mean of squares is float32; a 16-bit result is rounded once."""

    name: Literal["rms_norm"] = "rms_norm"
    epsilon: PositiveFloat = 1e-5


@component("layer")
class GroupNorm(LayerSpec):
    """Normalise each sample over its positions and each group of channels."""

    name: Literal["group_norm"] = "group_norm"
    groups: PositiveInt
    epsilon: PositiveFloat = 1e-5


class Activation(LayerSpec):
    """Base of layers that map each value independently."""


@component("layer")
class Relu(Activation):
    """max(x, 0)."""

    name: Literal["relu"] = "relu"


@component("layer")
class SquaredRelu(Activation):
    """max(x, 0)^2 (So et al. 2021)."""

    name: Literal["squared_relu"] = "squared_relu"


@component("layer")
class Relu6(Activation):
    """min(max(x, 0), 6)."""

    name: Literal["relu6"] = "relu6"


@component("layer")
class LeakyRelu(Activation):
    """x for x >= 0, `slope` times x below."""

    name: Literal["leaky_relu"] = "leaky_relu"
    slope: NonNegativeFloat = 0.2


@component("layer")
class Gelu(Activation):
    """Gaussian error linear unit, in the tanh form with 0.044715."""

    name: Literal["gelu"] = "gelu"


@component("layer")
class Tanh(Activation):
    """Hyperbolic tangent."""

    name: Literal["tanh"] = "tanh"


@component("layer")
class Sigmoid(Activation):
    """1 / (1 + exp(-x))."""

    name: Literal["sigmoid"] = "sigmoid"


@component("layer")
class Swish(Activation):
    """x * sigmoid(x)."""

    name: Literal["swish"] = "swish"


@component("layer")
class HardSigmoid(Activation):
    """min(max(x + 3, 0), 6) / 6 (Howard et al. 2019, sec. 5.2)."""

    name: Literal["hard_sigmoid"] = "hard_sigmoid"


@component("layer")
class HardSwish(Activation):
    """x * hard_sigmoid(x)."""

    name: Literal["hard_swish"] = "hard_swish"


class Pool(LayerSpec):
    """Base of layers that reduce a sliding window of the image."""

    kernel: Size
    stride: Size | None = None
    """Step of the window; null: the size of the window."""
    padding: Padding = "valid"

    @model_validator(mode="after")
    def _check_padding(self) -> Self:
        if isinstance(self.padding, str):
            return self
        sides = self.padding if isinstance(self.padding, tuple) else ((self.padding,),) * 2
        for window, widths in zip(pair(self.kernel), sides, strict=True):
            if max(widths) >= window:
                raise ValueError(
                    f"padding {max(widths)} must be less than kernel {window}, or a window would "
                    "have no pixel"
                )
        return self


@component("layer")
class MaxPool(Pool):
    """Largest value of every window. Padding is left out."""

    name: Literal["max_pool"] = "max_pool"


@component("layer")
class AvgPool(Pool):
    """Mean of every window. Padding is left out."""

    name: Literal["avg_pool"] = "avg_pool"


@component("layer")
class GlobalAvgPool(LayerSpec):
    """Mean over all positions: (batch, height, width, channels) -> (batch, channels)."""

    name: Literal["global_avg_pool"] = "global_avg_pool"


class AdaptivePool(LayerSpec):
    """Base of layers that reduce an image to `size` windows. Of n pixels, window i of k has those
    from floor(i n / k) up to, not including, ceil((i + 1) n / k), as in PyTorch."""

    size: AdaptiveSize
    """Height and width of the result."""


@component("layer")
class AdaptiveAvgPool(AdaptivePool):
    """Mean of every window, with windows that cover an image of any size."""

    name: Literal["adaptive_avg_pool"] = "adaptive_avg_pool"


@component("layer")
class AdaptiveMaxPool(AdaptivePool):
    """Largest value of every window, with windows that cover an image of any size."""

    name: Literal["adaptive_max_pool"] = "adaptive_max_pool"


@component("layer")
class Upsample(LayerSpec):
    """Repeat every pixel `factor` times in height and in width (nearest neighbour)."""

    name: Literal["upsample"] = "upsample"
    factor: PositiveInt = 2


@component("layer")
class ChannelShuffle(LayerSpec):
    """Interleave the channels of `groups` groups (Zhang et al. 2018, fig. 1)."""

    name: Literal["channel_shuffle"] = "channel_shuffle"
    groups: PositiveInt


@component("layer")
class Flatten(LayerSpec):
    """Flatten each sample: (batch, ...) -> (batch, features)."""

    name: Literal["flatten"] = "flatten"


@component("layer")
class Reshape(LayerSpec):
    """Arrange the values of each sample in another shape: (batch, ...) -> (batch, *shape)."""

    name: Literal["reshape"] = "reshape"
    shape: Annotated[Seq[PositiveInt], Field(min_length=1, max_length=4)]
    """Such as [tokens, features], [height, width, channels] or [depth, height, width, channels]."""


@component("layer")
class Dropout(LayerSpec):
    """Zero a share `rate` of the values in training, and scale the others by 1 / (1 - rate)."""

    name: Literal["dropout"] = "dropout"
    rate: Annotated[float, Field(ge=0, lt=1)] = 0.5
    per_sample: bool = False
    """Whether whole samples are zeroed. At the end of a residual body it is stochastic depth (Huang
    et al. 2016)."""


@component("layer")
class Sequence(LayerSpec):
    """Layers in a separate scope, repeated `repeat` times with different weights."""

    name: Literal["sequence"] = "sequence"
    body: Layers
    repeat: Count = 1

    def count_repetitions(self) -> int:
        return self.repeat


@component("layer")
class Residual(LayerSpec):
    """body(x) + shortcut(x) (He et al. 2016); an empty shortcut is the identity."""

    name: Literal["residual"] = "residual"
    body: Layers
    shortcut: Layers = ()


@component("layer")
class Branches(LayerSpec):
    """Concatenate the channels of several branches of x; an empty branch is the identity.

    By default each branch reads all of x, with `split` an equal share of the channels. As the first
    layer with `inputs` each branch reads the input of that name, such as an image and a row; one
    branch reads all of them, with the same weights. With `join: film` the second of two branches
    modulates the first.
    """

    name: Literal["branches"] = "branches"
    branches: Annotated[Seq[Layers], Field(min_length=1)]
    split: bool = False
    inputs: Seq[Annotated[str, Field(pattern=r"^\w+$")]] = ()
    """The network's input that each branch reads, such as [image, features]."""
    join: Literal["channels", "film"] = "channels"
    """channels: all are concatenated; film: the first branch's result, times 1 plus the first half
    of the second's (batch, 2 * channels), plus the other half (Perez et al. 2018)."""

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if self.join == "film" and len(self.inputs or self.branches) != 2:
            count = len(self.inputs or self.branches)
            raise ValueError(f"join film needs 2 branches, of which one modulates; it has {count}")
        fits = len(self.branches) in (1, len(self.inputs)) and not self.split
        if self.inputs and not fits:
            raise ValueError(
                f"inputs has {len(self.inputs)} names for {len(self.branches)} branches; must have "
                "one for each, or one branch for all, and split must be false"
            )
        return self


@component("layer")
class Gate(LayerSpec):
    """x * body(x). The body returns a factor for each channel, or for each value of x."""

    name: Literal["gate"] = "gate"
    body: Layers


@component("layer")
class GatedMlp(LayerSpec):
    """down(activation(gate(x)) * up(x)) with three dense layers: `gate` and `up` to `hidden`
    features, `down` to the features of x (Shazeer 2020)."""

    name: Literal["gated_mlp"] = "gated_mlp"
    hidden: PositiveInt
    activation: Literal["swish", "gelu", "relu", "sigmoid"] = "swish"
    """swish: SwiGLU; gelu: GeGLU; relu: ReGLU; sigmoid: GLU."""
    bias: bool = False


@component("layer")
class DualPath(LayerSpec):
    """Add the first `added` channels of body(x) and shortcut(x), and concatenate the others. Chen
    et al. 2017, sec. 4. An empty shortcut is the identity."""

    name: Literal["dual_path"] = "dual_path"
    body: Layers
    added: PositiveInt
    shortcut: Layers = ()


@component("layer")
class Views(LayerSpec):
    """body(x) in training; in evaluation its mean over views of the images x, which is more
    accurate and slower.

    Views are the images, and the images moved by `shift` pixels towards the top left and towards
    the bottom right. With `mirror` each of them is also seen mirrored. Pixels from outside are
    reflected.
    """

    name: Literal["views"] = "views"
    body: Annotated[Layers, Field(min_length=1)]
    mirror: bool = True
    shift: NonNegativeInt = 0
    """0: only unmoved images."""


@component("layer")
class Adversarial(LayerSpec):
    """A generator and the discriminator of its images (Goodfellow et al. 2014).

    Images like x are generated from `latent` normal numbers. The result is three scores, (batch,
    3): of x; of the generated images, without a gradient for the generator; of the generated
    images, without a gradient for the discriminator. In evaluation the normal numbers of a sample
    are drawn from a hash of x.
    """

    name: Literal["adversarial"] = "adversarial"
    latent: PositiveInt
    generator: Annotated[Layers, Field(min_length=1)]
    """Layers from (batch, latent) to the shape of x."""
    discriminator: Annotated[Layers, Field(min_length=1)]
    """Layers from x to a score, (batch, 1)."""
    scores: Features = "$classes"
    """Always 3, the number of labels of the map op `constant_labels`."""
