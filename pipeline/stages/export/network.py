"""The arrays of a network: names, shapes, and the layers after which images are flattened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.host.tree_paths import leaves_by_path
from pipeline.data.columns import ColumnSpec
from pipeline.data.tables.encode_table import encoded_features, encoding_ops
from pipeline.data.transform import column_specs
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import LayerSpec, ModelSpec
from pipeline.models.layers.standard import (
    Activation,
    Dense,
    Dropout,
    Flatten,
    GlobalAvgPool,
    scope_names,
)
from pipeline.models.modules.standard import Network

COLLECTIONS = ("params", "batch_stats")
_NUMBERED = re.compile(r"[a-z_]+_\d+/\w+")


@dataclass(frozen=True)
class NetworkArrays:
    """Names and shapes of a network's arrays.

    Names are those of flax with the collection first: `params/conv_0/kernel`,
    `batch_stats/batch_norm_0/mean`.
    """

    model: str
    """The name of the model's part, `resnet` for all ResNets."""
    shapes: Mapping[str, tuple[int, ...]]
    flattened: Mapping[str, int]
    """Number of channels of the flattened images that dense layers read, by layer: frameworks with
    channels first have these inputs in another order."""
    unconverted: str = ""
    """Why `flattened` is unknown for this network, which then takes only weights of its own layout;
    empty where it is known."""

    def resolve(self, name: str) -> str | None:
        """The full name for `name`, given with or without its collection; None if unknown."""
        if name in self.shapes:
            return name
        full = [f"{collection}/{name}" for collection in COLLECTIONS]
        found = [name for name in full if name in self.shapes]
        return found[0] if len(found) == 1 else None

    @property
    def has_blocks(self) -> bool:
        """Whether some arrays are nested deeper than in layers numbered by kind."""
        names = (name.partition("/")[2] for name in self.shapes)
        return not all(_NUMBERED.fullmatch(name) for name in names)


def arrays_of_model(model: ModelSpec, classes: int, image: ColumnSpec) -> NetworkArrays:
    """The arrays of a model for images as the map ops produce them.

    Raises RecipeError if it can't be built for them.
    """
    shape = image.shape if image.layout == "hwc" else (*image.shape[1:], image.shape[0])
    images = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    try:
        variables = _variables(model.build(classes, "float32"), images)
    except ValueError as error:
        raise RecipeError(f"model {model.name}: {error}") from error
    shapes = shapes_of(variables)
    try:
        return NetworkArrays(model.name, shapes, _flattened(model, classes, images))
    except ValueError as error:
        return NetworkArrays(model.name, shapes, {}, str(error))


def shapes_of(variables: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every array of a network by its full name."""
    held = {name: variables[name] for name in COLLECTIONS if name in variables}
    return {name: tuple(leaf.shape) for name, leaf in leaves_by_path(held).items()}


def _variables(module: Any, images: jax.ShapeDtypeStruct) -> Any:
    def initialise(images: jax.Array) -> Any:
        return module.init(jax.random.key(0), images, train=False)

    return jax.eval_shape(initialise, images)


def _flattened(model: ModelSpec, classes: int, images: jax.ShapeDtypeStruct) -> dict[str, int]:
    """The dense layers that read flattened images of several channels and pixels."""
    if not isinstance(model, LayeredModelSpec):
        return {}
    layers = model.layers_for(classes)
    found = {}
    for at, layer in enumerate(layers):
        if isinstance(layer, Flatten):
            channels, pixels = _image_before(model, layers[:at], images)
            if channels > 1 and pixels > 1:
                found[_reader(layers, at)] = channels
        elif _holds_flatten(layer):
            raise ValueError(
                f"{layer.name} holds a flatten; how other frameworks order its values is only "
                "known for one that stands in no block"
            )
    return found


def _image_before(
    model: ModelSpec, layers: tuple[LayerSpec, ...], images: jax.ShapeDtypeStruct
) -> tuple[int, int]:
    """Channels and pixels of the layers' output; 1, 1 where it is no image."""
    try:
        channels = _width(model, (*layers, GlobalAvgPool()), images)
    except ValueError:
        return 1, 1
    return channels, _width(model, (*layers, Flatten()), images) // channels


def _width(model: ModelSpec, layers: tuple[LayerSpec, ...], images: jax.ShapeDtypeStruct) -> int:
    network = Network(layers, initializers=model.init, dtype="float32")

    def apply(images: jax.Array) -> jax.Array:
        return network.init_with_output(jax.random.key(0), images, train=False)[0]

    return jax.eval_shape(apply, images).shape[-1]


def _reader(layers: tuple[LayerSpec, ...], flatten: int) -> str:
    """The name of the dense layer that reads the output of a flatten."""
    names = scope_names(layers)
    for name, layer in list(zip(names, layers, strict=True))[flatten + 1 :]:
        if isinstance(layer, Dense):
            return name
        if not isinstance(layer, Activation | Dropout):
            break
    raise ValueError(f"{names[flatten]} must be followed by a dense layer to convert its weights")


def _holds_flatten(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_holds_flatten, value))
    if not isinstance(value, LayerSpec):
        return False
    return isinstance(value, Flatten) or any(_holds_flatten(inner) for _, inner in value)


def network_arrays(recipe: Recipe) -> NetworkArrays:
    """The arrays of a recipe's network; reads the dataset where its sizes are not known otherwise.

    Raises RecipeError where model, ops and dataset don't fit, DataError for unreadable data.
    """
    facts, model = recipe.dataset.facts(), recipe.model
    if facts is not None:
        columns = {"image": ColumnSpec(facts.image, "uint8"), "label": ColumnSpec((), "int32")}
        classes = facts.classes
    else:
        raw = recipe.dataset.read(cache_root(recipe.cache))
        columns, classes = raw.eval.specs(), len(raw.classes)
        encode = encoding_ops(raw.table, model.table_input)
        columns, model = column_specs(encode, columns), model.for_table(encoded_features(encode))
    try:
        image = column_specs(recipe.dataset.eval.ops, columns)["image"]
    except ValueError as error:
        raise RecipeError(f"dataset.eval.{error}") from error
    return arrays_of_model(model, classes, image)


_OIHW_TO_HWIO = (2, 3, 1, 0)
_IOHW_TO_HWIO = (2, 3, 0, 1)


def to_own_layout(array: np.ndarray, target: str, network: NetworkArrays) -> np.ndarray:
    """The array in the layout of the network's array `target`; unchanged where it is unknown.

    The caller checks the resulting shape.
    """
    wanted = len(network.shapes[target])
    path, _, leaf = target.partition("/")[2].rpartition("/")
    if leaf != "kernel":
        return _without_leading_ones(array, wanted)
    if path.rpartition("/")[2].startswith("conv_transpose"):
        return array.transpose(_IOHW_TO_HWIO)[::-1, ::-1] if array.ndim == 4 else array
    if array.ndim == 4 and wanted == 2:
        array = array.reshape(len(array), -1)  # a convolution over a whole image is a dense layer
    elif array.ndim == 2 and wanted == 4:
        array = array[:, :, None, None]
    if array.ndim == 4:
        return array.transpose(_OIHW_TO_HWIO)
    if array.ndim != 2:
        return array
    channels = network.flattened.get(path)
    if channels is not None and array.shape[1] % channels == 0:
        outputs, inputs = array.shape
        by_channel = array.reshape(outputs, channels, inputs // channels)
        array = by_channel.swapaxes(1, 2).reshape(outputs, inputs)
    return array.T


def _without_leading_ones(array: np.ndarray, axes: int) -> np.ndarray:
    """Drop leading axes of size 1, down to `axes` axes."""
    while array.ndim > axes and array.shape[0] == 1:
        array = array[0]
    return array
