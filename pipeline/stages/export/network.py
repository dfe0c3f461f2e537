"""The arrays of a network: names, shapes, and the dense layers that read flattened images."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.data.columns import Targets
from pipeline.data.dataset_spec import MapOp, find_table_layout
from pipeline.data.host_ops import compute_host_specs
from pipeline.data.inputs import NetworkInputs
from pipeline.data.padding.buckets import sort_buckets
from pipeline.data.tables.encode_table import make_encoding_ops
from pipeline.data.transform import compute_column_specs, replace_targets
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import LayerSpec, ModelSpec, walk_layers
from pipeline.models.layers.standard import (
    Activation,
    BatchNorm,
    Dense,
    Dropout,
    Flatten,
    GroupNorm,
    Residual,
)
from pipeline.models.layers.tokens import Conv1d, Lookup, Pool1d, Recurrent, SelfAttention
from pipeline.models.modules.apply_layers import name_scopes
from pipeline.models.modules.network import Network
from pipeline.models.weights.rules.syntax import Framework
from pipeline.stages.key_errors import prefixing_problems
from pipeline.stages.sample_sizes import add_padding_mask, choose_inputs, fit_specs_to_bucket
from pipeline.training.update import shape_inputs

COLLECTIONS = ("params", "batch_stats")
_FEATURES_LAST = (Dense, Lookup, Recurrent, SelfAttention)
"""Layers of tokens that return (batch, tokens, features) in other frameworks too."""
_KEEPS_AXES = (Activation, BatchNorm, Conv1d, Dropout, GroupNorm, Pool1d)
"""Layers of tokens: convolutions, and layers whose values have the order of the layer before."""
_NUMBERED_LAYER = re.compile(r"[a-z_]+_\d+/\w+")


@dataclass(frozen=True)
class NetworkArrays:
    """Names and shapes of a network's arrays.

    Names begin with flax's collection: `params/conv_0/kernel`, `batch_stats/batch_norm_0/mean`.
    """

    model: str
    """The name of the model component, such as `resnet` for all ResNets."""
    shapes: Mapping[str, tuple[int, ...]]
    flattened: Mapping[str, int]
    """Channels of the flattened images, volumes or tokens that a dense layer reads, by the name of
    the layer. Frameworks with channels first order the inputs of such a layer differently."""
    unconverted: str = ""
    """Why `flattened` is unknown, so that only the layouts of this package and of TensorFlow can be
    loaded; "" if known."""
    inputs: str = ""
    """Names and shapes of what the network reads, after the map ops; "" if unknown."""

    def resolve(self, name: str) -> str | None:
        """Return the full name of an array, for a name with or without its collection.

        Returns None if the name is unknown, or if several collections have it.
        """
        if name in self.shapes:
            return name
        full_names = [f"{collection}/{name}" for collection in COLLECTIONS]
        matches = [full_name for full_name in full_names if full_name in self.shapes]
        return matches[0] if len(matches) == 1 else None

    @property
    def has_blocks(self) -> bool:
        """Whether some arrays are in blocks, not in a numbered layer such as `conv_0`."""
        names = (name.partition("/")[2] for name in self.shapes)
        return not all(_NUMBERED_LAYER.fullmatch(name) for name in names)


def trace_model_arrays(model: ModelSpec, classes: int, inputs: NetworkInputs) -> NetworkArrays:
    """Return the arrays of a model that reads `inputs`.

    Raises RecipeError if the model can't be built for such inputs.
    """
    shapes_read = shape_inputs(inputs, 1)
    with prefixing_problems(f"model {model.name}: "):
        module: Any = model.build(classes, "float32")
        init = partial(module.init, train=False)
        variables = jax.eval_shape(init, jax.random.key(0), shapes_read)
    collections = {name: variables[name] for name in COLLECTIONS if name in variables}
    shapes = {name: tuple(leaf.shape) for name, leaf in flatten_by_path(collections).items()}
    try:
        flattened = _find_flattened_channels(model, classes, shapes_read)
        return NetworkArrays(model.name, shapes, flattened, inputs=str(inputs))
    except ValueError as error:
        return NetworkArrays(model.name, shapes, {}, str(error), inputs=str(inputs))


def _find_flattened_channels(model: ModelSpec, classes: int, inputs: Any) -> dict[str, int]:
    """Return the channels that are flattened, by dense layer. Raises ValueError if unknown."""
    if not isinstance(model, LayeredModelSpec):
        return {}
    layers = model.layers_for(classes)
    channels_by_layer = {}
    for position, layer in enumerate(layers):
        if isinstance(layer, Flatten):
            channels, positions = _measure_flattened(model, layers[:position], inputs)
            # With one channel or one position, all frameworks have the same order.
            if channels > 1 and positions > 1:
                channels_by_layer[_find_reader(layers, position)] = channels
        elif _holds_flatten(layer):
            raise ValueError(
                f"{layer.name} has a flatten inside; the order of values in other frameworks is "
                "known only for a flatten outside of blocks"
            )
    return channels_by_layer


def _measure_flattened(
    model: ModelSpec, layers: Sequence[LayerSpec], inputs: Any
) -> tuple[int, int]:
    """Return the numbers of channels and positions in what a flatten after `layers` reads; (1, 1)
    if other frameworks have channels last too. Raises ValueError if that is unknown."""
    network: Any = Network(tuple(layers), initializers=model.init, dtype="float32")
    init = partial(network.init_with_output, train=False)
    _, *positions, channels = jax.eval_shape(init, jax.random.key(0), inputs)[0].shape
    if len(positions) > 1 or (positions and _puts_channels_first(layers)):
        return channels, math.prod(positions)
    return 1, 1


def _puts_channels_first(layers: Sequence[LayerSpec]) -> bool:
    """Return whether the tokens that `layers` return are (batch, channels, tokens) in PyTorch and
    MindSpore: a convolution has made them, and no dense layer or attention since.

    Raises ValueError if a layer after the convolution reads either order.
    """
    unsure = None
    for layer in reversed(list(_list_steps(layers))):
        if isinstance(layer, _FEATURES_LAST):
            return False
        if not isinstance(layer, _KEEPS_AXES):
            unsure = layer
        if any(isinstance(inner, Conv1d) for inner in walk_layers((layer,))):
            if unsure is not None:
                raise ValueError(
                    f"{unsure.name} is before a flatten of tokens; the order of values in other "
                    "frameworks is known only after conv1d, pools, activations and batch_norm"
                )
            return True
    return False


def _list_steps(layers: Sequence[LayerSpec]) -> Iterator[LayerSpec]:
    """Yield the layers in order, in place of sequences and residual blocks their layers."""
    for layer in layers:
        if isinstance(layer, standard.Sequence | Residual):
            yield from _list_steps(layer.body)
        else:
            yield layer


def _find_reader(layers: tuple[LayerSpec, ...], index: int) -> str:
    """Return the name of the dense layer that reads the output of the flatten at `index`."""
    names = name_scopes(layers)
    for name, layer in list(zip(names, layers, strict=True))[index + 1 :]:
        if isinstance(layer, Dense):
            return name
        if not isinstance(layer, Activation | Dropout):
            break
    raise ValueError(f"{names[index]} must be followed by a dense layer to convert its weights")


def _holds_flatten(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_holds_flatten, value))
    if not isinstance(value, LayerSpec):
        return False
    return isinstance(value, Flatten) or any(_holds_flatten(inner) for _, inner in value)


def trace_network_arrays(recipe: Recipe) -> NetworkArrays:
    """Return the arrays of a recipe's network. Reads the dataset unless its sizes are known.

    Raises RecipeError if model, ops and dataset don't fit, DataError for unreadable data.
    """
    dataset = recipe.dataset
    facts = dataset.facts()
    encode: tuple[MapOp, ...] = ()
    if facts is not None:
        columns = facts.specs()
        default: tuple[str, ...] = ("image",)
        targets = Targets(tuple(map(str, range(facts.classes))))
    else:
        raw = dataset.load(cache_root(recipe.cache))
        targets = raw.targets
        encode = make_encoding_ops(raw.table, recipe.model.table_input, raw.scale)
        columns = raw.eval.specs()
        default = raw.inputs
    with prefixing_problems("dataset.eval."):
        columns = compute_host_specs(dataset.eval.host_ops, columns)
    buckets = sort_buckets(dataset.buckets or ())
    if buckets:
        columns = fit_specs_to_bucket(buckets[-1], columns, default[0])
    columns = compute_column_specs(encode, columns)
    targets = replace_targets(dataset.eval.ops, targets)
    with prefixing_problems(f"model {recipe.model.name}: "):
        model = recipe.model.fit(find_table_layout(encode), targets)
    with prefixing_problems("dataset.eval."):
        columns = compute_column_specs(dataset.eval.ops, columns)
    if dataset.padding_mask:
        columns = add_padding_mask(columns, default[0], buckets[-1])
    return trace_model_arrays(model, len(targets), choose_inputs(recipe, columns, default))


def convert_layout(
    array: np.ndarray, target: str, network: NetworkArrays, framework: Framework = "torch"
) -> np.ndarray:
    """Convert an array of a framework to the layout of the network's array `target`.

    Layouts, of PyTorch and MindSpore -> of this package:

        convolution             (out, in, height, width) -> (height, width, in, out), in 1-D and 3-D
                                likewise; MindSpore's in 1-D have a height of 1
        transposed convolution  (in, out, height, width) -> (height, width, in, out), rotated by
                                180; with groups, out and in are a group's
        dense layer, LSTM, GRU  (out, in) -> (in, out)
        flattened images        channel by channel -> pixel by pixel; volumes, and tokens of a
                                convolution, likewise

    The frameworks' transposed convolution has the kernel of the convolution that is transposed.
    This package's kernel slides over the image with zeros between its pixels. TensorFlow's kernels
    have their output features last, and its flattened images are pixel by pixel. Arrays of an
    unknown layout are returned unchanged; the caller checks the shape.
    """
    is_tensorflow = framework == "tensorflow"
    ndim = len(network.shapes[target])
    path, _, leaf = target.partition("/")[2].rpartition("/")
    if is_tensorflow and leaf == "kernel":
        if array.ndim == 4 and ndim == 2:
            # A convolution over a whole image is a dense layer, which reads pixel by pixel too.
            return array.reshape(-1, array.shape[-1])
        array = _to_output_first(array, network.shapes[target])
    if not leaf.endswith("kernel"):
        while array.ndim > ndim and array.shape[0] == 1:
            array = array[0]
        return array
    if path.rpartition("/")[2].startswith("conv_transpose"):
        return array if array.ndim != 4 else _rotate_groups(array, network.shapes[target][2])
    if array.ndim == 4 and ndim == 2:
        array = array.reshape(len(array), -1)  # a convolution over a whole image is a dense layer
    elif array.ndim == 2 and ndim == 4:
        array = array[:, :, None, None]
    elif array.ndim == 4 and ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim > 2 and array.ndim == ndim:
        return array.transpose(*range(2, ndim), 1, 0)
    if array.ndim != 2:
        return array
    channels = None if is_tensorflow else network.flattened.get(path)
    if channels is not None and array.shape[1] % channels == 0:
        outputs, inputs = array.shape
        by_channel = array.reshape(outputs, channels, inputs // channels)
        array = by_channel.swapaxes(1, 2).reshape(outputs, inputs)
    return array.T


def _to_output_first(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a kernel of TensorFlow, whose output features are last, in PyTorch's layout.

    `shape` is the network's kernel shape. A depthwise kernel of TensorFlow is (height, width, in,
    multiplier).
    """
    if array.ndim == len(shape) == 4 and shape[2] == 1 and array.shape[2] > 1:
        array = array.reshape((*array.shape[:2], 1, -1))
    return array if array.ndim < 2 else array.transpose(-1, -2, *range(array.ndim - 2))


def _rotate_groups(array: np.ndarray, group_inputs: int) -> np.ndarray:
    """Return a transposed convolution's kernel as (height, width, group_inputs, out), rotated.

    `array` is (in, out of a group, height, width); the rotation is by 180 degrees.
    """
    inputs, outputs, *window = array.shape
    if inputs % group_inputs:
        return array
    grouped = array.reshape((-1, group_inputs, outputs, *window)).transpose(3, 4, 1, 0, 2)
    return grouped.reshape((*window, group_inputs, -1))[::-1, ::-1]
