"""A graph as a flax module, with PyTorch's initial weights: from a graph file, an ONNX file, or a
PyTorch module that a plug-in defines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.core.plugins.loading import find_object
from pipeline.data.columns import Split
from pipeline.data.inputs import MASK, NetworkInputs
from pipeline.models.layers.precision import TypeRule
from pipeline.models.lowerings.problem import DEFAULTS, Layout, LoweringPolicy
from pipeline.models.torch_graph.computation.apply_graph import apply_form, make_input
from pipeline.models.torch_graph.computation.table_lookups import require_rows
from pipeline.models.torch_graph.graph import (
    INPUT,
    GraphNode,
    Role,
    SampleSpec,
    TensorSpec,
    TorchGraph,
)
from pipeline.models.torch_graph.operator_table import OperatorContext, TorchTensor
from pipeline.models.torch_graph.operators.convolution_ops import Convolution


@dataclass(frozen=True)
class GraphFile:
    """A graph file, which is read without torch."""

    path: Path

    def graph_for(self, *samples: SampleSpec) -> TorchGraph:
        """Read the file, whatever the samples. Raises ValueError if it isn't valid."""
        return _read(self.path, _file_version(self.path))


@dataclass(frozen=True)
class OnnxFile:
    """The network of an ONNX file, which is imported when the shape of samples is known."""

    path: Path
    output: str | None
    """Name of the tensor of logits, or None for the file's output."""

    def graph_for(self, *samples: SampleSpec) -> TorchGraph:
        """Import the file for samples. Raises ValueError if it can't be read or translated."""
        return _import(self, samples, _file_version(self.path))


@dataclass(frozen=True)
class ImportedModule:
    """A module of PyTorch that is made and exported when the shape of samples is known."""

    reference: str
    """Reference of the module, such as `my_nets:MyNet`."""
    arguments: str
    """Arguments of the constructor as JSON; the number of classes is one of them."""
    seed: int
    """Seed of the initial weights."""
    shape: tuple[int, ...] | None
    """Shape of an input sample, or None for (channels, height, width) of the images."""
    input_dtype: str | None
    """Type of an input sample, or None for int64 of whole numbers, else float32."""
    batch: int | None
    """The only batch size that the module accepts, or None for any."""
    output: str | None = None
    """Name of the logits among several outputs, or None for `logits` or the only tensor."""
    order: tuple[str, ...] = ()
    """Names of several inputs in their order, as `model.inputs` has them; () for the dataset's."""

    def graph_for(self, *samples: SampleSpec) -> TorchGraph:
        """Make the module, and export it for samples.

        Raises ValueError if `--plugin` or torch is missing, or if the module can't be exported.
        """
        if len(samples) > 1 and (self.shape or self.input_dtype):
            names = ", ".join(sample.name for sample in samples)
            raise ValueError(
                f"input_shape and input_dtype are of an only input, and the network reads {names}; "
                "must be null"
            )
        ordered = order_samples(samples, self.order)
        return _export(self, tuple(map(self._describe_tensor, ordered)))

    def _describe_tensor(self, sample: SampleSpec) -> tuple[str, TensorSpec]:
        """Return an input's name, and its sample as the module reads it."""
        shape = sample.shape
        is_whole = sample.dtype.startswith("int")
        # PyTorch's images have channels first.
        first = (shape[-1], *shape[:-1]) if len(shape) == 3 else shape
        dtype = self.input_dtype or ("int64" if is_whole else "float32")
        return sample.name, TensorSpec(self.shape or first, dtype)


def order_samples(samples: Iterable[SampleSpec], order: Sequence[str]) -> list[SampleSpec]:
    """Return samples in an order of their names. Others come after them, a mask last.

    jax sorts a dictionary by its keys, and a module may read its inputs by position.
    """
    places = {name: place for place, name in enumerate(order)}
    return sorted(samples, key=lambda x: (places.get(x.name, len(places)), x.name == MASK))


GraphSource = TorchGraph | GraphFile | OnnxFile | ImportedModule
"""The source of a network's graph. `graph_for` returns the graph for samples of its inputs, or
raises ValueError."""


def _file_version(path: Path) -> tuple[int, int] | None:
    """Return a file's time of change in nanoseconds and size in bytes; None if it is missing."""
    stat = path.stat() if path.exists() else None
    return (stat.st_mtime_ns, stat.st_size) if stat else None


# Cached, since a run builds its network several times. `version` makes a changed file be read.
@lru_cache(maxsize=2)
def _read(path: Path, version: tuple[int, int] | None) -> TorchGraph:
    from pipeline.models.torch_graph.computation.graph_file import read_graph

    return read_graph(path)


@lru_cache(maxsize=2)
def _import(
    source: OnnxFile, samples: tuple[SampleSpec, ...], version: tuple[int, int] | None
) -> TorchGraph:
    from pipeline.models.torch_graph.onnx.import_onnx import import_onnx

    return import_onnx(source.path, samples, source.output)


@lru_cache(maxsize=2)
def _export(source: ImportedModule, samples: tuple[tuple[str, TensorSpec], ...]) -> TorchGraph:
    from pipeline.models.torch_graph.conversion.export_module import export_module, make_module

    maker = find_object(source.reference)
    module = make_module(source.reference, maker, json.loads(source.arguments), source.seed)
    return export_module(
        module,
        dict(samples),
        origin=source.reference,
        batch=source.batch,
        output=source.output,
    )


COLLECTIONS: Mapping[Role, str] = {"parameter": "params", "buffer": "batch_stats"}
CONVOLUTIONS = frozenset(("aten.conv2d.default", "aten.conv2d.padding"))
DRAWS = frozenset(("dropout", "feature_dropout", "native_dropout"))
RESHAPES = frozenset(("flatten", "reshape", "squeeze", "view"))

# fmt: off
BATCH_LAST = frozenset((
    # Elementwise.
    "add", "clone", "contiguous", "detach", "div", "elu", "gelu", "hardsigmoid", "hardswish",
    "hardtanh", "leaky_relu", "mish", "mul", "relu", "relu6", "selu", "sigmoid", "silu",
    "softplus", "sub", "tanh",
    # Of images.
    "_adaptive_avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "conv2d",
    "max_pool2d", "max_pool2d_with_indices", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "batch_norm",
    # Of any axes.
    "cat", "dropout", "feature_dropout", "flatten", "linear", "log_softmax", "mean",
    "native_dropout", "reshape", "squeeze", "sym_size", "view",
))
# fmt: on
"""Operators that compute images in CHWN without a transposition, except to flatten them."""


class TorchNetwork(nn.Module):
    """A network of PyTorch, from samples to logits.

    Parameters and buffers are float32, in the collections `params` and `batch_stats`, under the
    paths of the PyTorch modules: `layer1/0/conv1/kernel`. Their initial values are the module's.
    Dropout draws from the stream `dropout`; each node has a separate key.
    """

    lowers_itself: ClassVar[bool] = True
    source: GraphSource
    dtype: str
    """Dtype of the activations."""
    policy: LoweringPolicy = DEFAULTS
    """Choice of the lowerings of convolutions, dense layers and max pooling."""
    layout: Layout = "nhwc"
    """Order of the axes of images. Parameters don't depend on it, results do in their last digits.
    In CHWN a convolution has only one formula, whatever the policy."""
    rules: tuple[TypeRule, ...] = ()
    """Rules for nodes with another dtype, by kind of layer and path of the module."""

    @nn.compact
    def __call__(self, inputs: Any, train: bool) -> Array:
        """Return logits, float32, of one array, such as images (batch, height, width, channels) or
        tokens int32 (batch, tokens), or of several by name.

        Raises ValueError with module and line if the network can't be exported or computed.
        """
        arrays = dict(inputs) if isinstance(inputs, Mapping) else {INPUT: inputs}
        graph = self.source.graph_for(
            *(SampleSpec(x.shape[1:], x.dtype.name, name) for name, x in arrays.items())
        )
        if len(graph.inputs) == len(arrays) == 1:
            arrays = dict(zip(graph.inputs, arrays.values(), strict=True))
        if set(graph.inputs) != set(arrays):
            raise ValueError(
                f"reads {', '.join(graph.inputs)}, and {', '.join(arrays)} came; model.inputs must "
                "name a column for each input"
            )
        weights = self._read_weights(graph, "parameter") | self._read_weights(graph, "buffer")

        @cache
        def make_key() -> Array:
            return self.make_rng("dropout")

        def make_sample(x: Array, spec: TensorSpec) -> TorchTensor:
            # With rules every node casts its inputs, and the first node may compute in float32.
            is_whole = jnp.issubdtype(x.dtype, jnp.integer)
            x = x if self.rules or is_whole else x.astype(self.dtype)
            return make_input(spec, x, self.layout)

        key = make_key if train else None
        context = OperatorContext(self.dtype, self.policy, self.layout, key, self.rules)
        form = graph.training if train else graph.evaluation

        def compute(batch: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
            samples = [make_sample(batch[name], spec) for name, spec in graph.inputs.items()]
            return apply_form(graph, form, samples, weights, context)

        if train or graph.input.shape[0] is None:
            logits, changed = compute(arrays)
        else:
            logits = _compute_in_batches(lambda x: compute(x)[0], arrays, graph.input.shape[0])
            changed = {}
        if train and not self.is_initializing() and self.is_mutable_collection("batch_stats"):
            self._write_buffers(graph, changed)
        return logits.astype(jnp.float32)

    def can_be_batch_last(self, image: tuple[int, ...]) -> bool:
        """Return whether the graph reads images, and can be computed in CHWN with NHWC's results.

        Dropout draws in the same order in both layouts for tensors of two axes, and for images
        unless a node reshapes to images, whose axes may then have another order in NHWC.
        """
        graph = self.source.graph_for(SampleSpec(image))
        all_nodes = (*graph.training.nodes, *graph.evaluation.nodes)
        nodes = [node for node in all_nodes if node.op.startswith("aten.")]
        if len(graph.input.shape) != 4 or not all(map(_computes_batch_last, nodes)):
            return False
        draw_ndims = {_count_axes(node) for node in nodes if _parse_name(node) in DRAWS}
        reshape_ndims = {_count_axes(node) for node in nodes if _parse_name(node) in RESHAPES}
        return draw_ndims <= ({2} if 4 in reshape_ndims else {2, 4})

    def require_rows(self, inputs: NetworkInputs, split: Split, vocabulary: int | None) -> None:
        """Raise ValueError for a token of a split without a row in a table of the graph.

        `vocabulary` is the number of tokens of texts; None for other samples.
        """
        by_name = {x.name if inputs.is_named else INPUT: x for x in inputs.arrays}
        graph = self.source.graph_for(
            *(SampleSpec(x.shape, x.dtype, name) for name, x in by_name.items())
        )
        arrays = inputs.arrays
        if len(arrays) > 1:
            arrays = tuple(by_name[name] for name in graph.inputs)
        require_rows(graph, arrays, split, vocabulary)

    def structure(self, image: tuple[int, ...]) -> str:
        """Return a text that is equal for equal networks, whatever the values of their arrays."""
        graph = self.source.graph_for(SampleSpec(image))
        nodes = [(node.op, node.args, node.kwargs) for node in graph.training.nodes]
        return repr((nodes, [(spec.name, spec.shape) for spec in graph.arrays], self.rules))

    def _read_weights(self, graph: TorchGraph, role: Role) -> dict[str, Array]:
        """Return parameters or buffers by PyTorch's names; each scope is a variable of flax."""
        specs = {spec.path: spec for spec in graph.arrays if spec.role == role}
        tree: dict[str, Any] = {}
        scopes = dict.fromkeys(path.partition("/")[0] for path in specs)
        for scope in scopes:
            names = {
                path: spec.name for path, spec in specs.items() if path.partition("/")[0] == scope
            }
            initialize = _make_initializer(graph, scope, names)
            if role == "parameter":
                tree[scope] = self.param(scope, initialize)
            else:
                tree[scope] = self.variable(COLLECTIONS[role], scope, initialize).value
        leaves = flatten_dict(tree, sep="/")
        return {spec.name: leaves[path] for path, spec in specs.items()}

    def _write_buffers(self, graph: TorchGraph, changed: Mapping[str, Array]) -> None:
        by_path = {graph.spec(name).path: array for name, array in changed.items()}
        leaves = flatten_dict(dict(self.variables.get("batch_stats", {})), sep="/") | by_path
        for scope, value in unflatten_dict(leaves, sep="/").items():
            self.put_variable("batch_stats", scope, value)


def _compute_in_batches(
    compute: Callable[[Mapping[str, Array]], Array], arrays: Mapping[str, Array], size: int
) -> Array:
    """Return the outputs of any number of samples, which are computed in batches of `size`.

    The last batch is filled with its last sample. A number that is unknown during an export isn't
    divided, and `compute` refuses it.
    """
    count = next(iter(arrays.values())).shape[0]
    if not isinstance(count, int) or count == size:
        return compute(arrays)
    filled = {
        name: jnp.concatenate([x, jnp.repeat(x[-1:], -count % size, axis=0)])
        for name, x in arrays.items()
    }
    if count < size:
        return compute(filled)[:count]
    batches = {name: x.reshape(-1, size, *x.shape[1:]) for name, x in filled.items()}
    outputs = jax.lax.map(compute, batches)
    return outputs.reshape(-1, *outputs.shape[2:])[:count]


def _computes_batch_last(node: GraphNode) -> bool:
    if node.op in CONVOLUTIONS:
        return Convolution(*node.args[3:], **dict(node.kwargs)).groups == 1
    return _parse_name(node) in BATCH_LAST


def _parse_name(node: GraphNode) -> str:
    return node.op.split(".")[1]


def _count_axes(node: GraphNode) -> int:
    return len(node.results[0].shape)


def _make_initializer(
    graph: TorchGraph, scope: str, names: Mapping[str, str]
) -> Callable[..., Any]:
    """Return a function that returns a scope's initial arrays, float32, as a tree.

    `names` are PyTorch's names by path. A callback passes the arrays when the program runs. As
    constants of the program they would lengthen its compilation by a second for every 16 million
    values.
    """
    shapes = {
        path: jax.ShapeDtypeStruct(graph.spec(name).shape, jnp.float32)
        for path, name in names.items()
    }

    def read_values() -> dict[str, np.ndarray]:
        return {path: np.asarray(graph.values[name], np.float32) for path, name in names.items()}

    def initialize(*_: Any) -> Any:
        leaves = jax.pure_callback(read_values, shapes)
        return unflatten_dict(leaves, sep="/")[scope]

    return initialize


def initial_variables_of(graph: TorchGraph) -> dict[str, Any]:
    """Return the initial variables of `TorchNetwork`, as numpy arrays by collection."""
    trees: dict[str, Any] = {}
    for role, collection in COLLECTIONS.items():
        specs = [spec for spec in graph.arrays if spec.role == role]
        leaves = {spec.path: graph.values[spec.name] for spec in specs}
        trees[collection] = unflatten_dict(leaves, sep="/")
    return trees
