"""Import of an ONNX network as a graph, whose weights can be trained.

Outputs of classifiers are the logits before the probabilities that a file computes from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from pipeline.core.errors import first_line
from pipeline.core.files.name_text import show_name
from pipeline.models.torch_graph.conversion.export_module import MAX_CONSTANT_BYTES, place_array
from pipeline.models.torch_graph.conversion.functional_form import find_array_uses, prune_form
from pipeline.models.torch_graph.graph import (
    ArrayOf,
    ArraySpec,
    Form,
    GraphNode,
    Role,
    SampleSpec,
    TensorSpec,
    TorchGraph,
    ValueOf,
    fits_sizes,
    refer_to_inputs,
)
from pipeline.models.torch_graph.onnx import layer_nodes as layer_nodes
from pipeline.models.torch_graph.onnx import shape_nodes as shape_nodes
from pipeline.models.torch_graph.onnx import value_nodes as value_nodes
from pipeline.models.torch_graph.onnx.estimator_nodes import replace_estimators
from pipeline.models.torch_graph.onnx.graph_builder import (
    BATCH,
    ONNX_OPERATORS,
    TRAINING,
    OnnxNodeReader,
    OnnxValue,
    TorchGraphBuilder,
)
from pipeline.models.torch_graph.onnx.network_weights import NetworkWeights, make_names_distinct
from pipeline.models.torch_graph.onnx.onnx_file import OnnxModel, OnnxNode, OnnxTensor, read_onnx
from pipeline.models.torch_graph.operator_table import ARGUMENT_ERRORS
from pipeline.models.torch_graph.operators.known_operators import require_computable

BATCHES = (2, 3)
"""Batch sizes at which shapes are computed."""
OTHER_BATCHES = (5, 7)
"""Batch sizes at which a size must have the same coefficients; n * n isn't linear."""
MAP = "ai.onnx.ml.ZipMap"
COPIES = ("Identity", "Cast", MAP)
"""Operators that pass scores on. Each reads one tensor."""
SUFFIX = "@logits"
"""End of the names of tensors that replace probabilities."""


def import_onnx(path: Path, samples: Sequence[SampleSpec], output: str | None = None) -> TorchGraph:
    """Import a file as a graph for samples: of an only input, or of each input by its name.

    `output` is the name of the tensor of logits, or None for the file's first output without its
    softmax, and with logits in place of the probabilities of two classes. The graph accepts any
    batch size, or only the file's if the network can't be computed for others. Raises ValueError,
    with file and node, if the file can't be imported.
    """
    model = replace_estimators(_drop_copies(read_onnx(path)), None if output else COPIES)
    network = _Network(model if output else replace_class_pair(model), tuple(samples), output)
    batch = network.inputs[0].shape[0]
    try:
        graph = network.build(BATCHES)
    except ValueError:
        if batch is None:
            raise
        graph = network.build((batch, batch))
    require_computable(graph)
    return graph


def find_sample_shape(model: OnnxModel, output: str | None = None) -> tuple[int, ...]:
    """Return channels, height and width of the samples that the file describes, of the only input
    that the output of `import_onnx` depends on.

    A row of features is one pixel. Raises ValueError if a size is open, or for other shapes.
    """
    inputs = _find_inputs(model, output)
    if len(inputs) > 1:
        names = ", ".join(show_name(value.name) for value in inputs)
        raise ValueError(
            f"{model.file}: has inputs {names}; must have one: model=onnx trains others"
        )
    sizes = inputs[0].shape[1:]
    if not all(sizes) or len(sizes) not in (1, 3):
        raise ValueError(
            f"{model.file}: reads samples of shape {_format_sizes(sizes)}; channels, height and "
            "width must be given"
        )
    shape = tuple(size or 0 for size in sizes)
    is_channels_last = len(shape) == 3 and shape[2] in (1, 3) and shape[0] not in (1, 3)
    if is_channels_last:
        return shape[2], shape[0], shape[1]
    return shape if len(shape) == 3 else (shape[0], 1, 1)


def list_onnx_inputs(path: Path, output: str | None = None) -> tuple[str, ...]:
    """Return the names of the inputs that the output of `import_onnx` depends on. Raises ValueError
    if the file can't be read."""
    return tuple(value.name for value in _find_inputs(read_onnx(path), output))


def _find_inputs(model: OnnxModel, output: str | None) -> tuple[OnnxTensor, ...]:
    replaced = replace_estimators(_drop_copies(model), None if output else COPIES)
    return _Network(replaced, (), output).inputs


@dataclass(frozen=True)
class _Network:
    """The network of a file, for samples of a shape. Its properties raise ValueError."""

    model: OnnxModel
    samples: tuple[SampleSpec, ...] = ()
    output_name: str | None = None

    @cached_property
    def producers(self) -> Mapping[str, OnnxNode]:
        """The node that computes a tensor, by the tensor's name."""
        return {name: node for node in self.model.nodes for name in filter(None, node.outputs)}

    @cached_property
    def output(self) -> str:
        """Name of the tensor of logits."""
        outputs = self.model.outputs
        # The first output of scikit-learn's classifiers is the class, an integer or its name.
        is_class = ("int", "str")
        candidates = [value for value in outputs if not value.dtype.startswith(is_class)] or outputs
        name = self.output_name or candidates[0].name
        if name not in self.producers:
            names = ", ".join(show_name(value.name) for value in outputs)
            raise ValueError(
                f"{self.model.file}: no node computes output {show_name(name)}; its outputs are "
                f"{names}"
            )
        return name if self.output_name else find_scores(self.producers, name)

    @cached_property
    def nodes(self) -> tuple[OnnxNode, ...]:
        """The nodes that the output depends on, in the order of computation."""
        names: set[str] = set()
        pending = [self.output]
        while pending:
            name = pending.pop()
            if name not in names and name in self.producers:
                names.add(name)
                pending += self.producers[name].inputs
        nodes = tuple(node for node in self.model.nodes if not names.isdisjoint(node.outputs))
        unknown = [node for node in nodes if node.op not in ONNX_OPERATORS]
        if unknown:
            more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ValueError(
                f"{self.model.describe(unknown[0])}{more}: the operator is not computed here; "
                "docs/bring-your-own.md lists those that are"
            )
        return nodes

    @cached_property
    def inputs(self) -> tuple[OnnxTensor, ...]:
        """The inputs that the output depends on."""
        names_read = {name for node in self.nodes for name in node.inputs}
        inputs = tuple(value for value in self.model.inputs if value.name in names_read)
        if not inputs:
            raise ValueError(f"{self.model.file}: has no input that its output depends on")
        for value in inputs:
            name = show_name(value.name)
            if value.dtype == "str":
                raise ValueError(f"{self.model.file}: its input {name} is texts; must be numbers")
            if len(value.shape) < 2:
                raise ValueError(
                    f"{self.model.file}: its input {name} has {len(value.shape)} axes; must have a "
                    "batch and at least one more"
                )
        return inputs

    @property
    def names(self) -> frozenset[str]:
        """Names of the inputs in the file."""
        return frozenset(value.name for value in self.inputs)

    def find_sample(self, tensor: OnnxTensor) -> SampleSpec:
        """Return the samples of an input. Raises ValueError if none have its name."""
        if len(self.samples) == len(self.inputs) == 1:
            return self.samples[0]
        by_name = {sample.name: sample for sample in self.samples}
        if by_name.keys() != self.names:
            names = ", ".join(show_name(value.name) for value in self.inputs)
            raise ValueError(
                f"{self.model.file}: has inputs {names}; model.inputs must name a column for each"
            )
        return by_name[tensor.name]

    def spec(self, tensor: OnnxTensor, batch: int | None) -> TensorSpec:
        """Return an input as the graph reads it: images are (batch, channels, height, width).

        Raises ValueError if it doesn't fit the samples.
        """
        sizes = tensor.shape[1:]
        sample = self.find_sample(tensor).shape
        dtype = "float32" if tensor.dtype.startswith(("float", "bfloat")) else "int64"
        if len(sizes) == len(sample) == 3:
            height, width, channels = sample
            if not _is_channels_last(sizes, sample) and not fits_sizes(
                (channels, height, width), sizes
            ):
                raise ValueError(
                    f"{self.model.file}: reads samples of shape {_format_sizes(sizes)}, and images "
                    f"{height}x{width}x{channels} (height, width, channels) came; resize them"
                )
            return TensorSpec((batch, channels, height, width), dtype)
        total = math.prod(sample)
        if sizes.count(None) == 1:
            product = math.prod(size for size in sizes if size)
            sizes = tuple(total // product if size is None else size for size in sizes)
        if not all(sizes) or math.prod(size or 0 for size in sizes) != total:
            raise ValueError(
                f"{self.model.file}: reads samples of shape {_format_sizes(tensor.shape[1:])}, "
                f"and {total:,} values came"
            )
        return TensorSpec((batch, *sizes), dtype)

    def build(self, batches: tuple[int, int]) -> TorchGraph:
        """Build the graph with shapes at two batch sizes; if they are equal, for that size only."""
        batch = batches[0] if batches[0] == batches[1] else None
        inputs = {self.find_sample(tensor).name: self.spec(tensor, batch) for tensor in self.inputs}
        weights = NetworkWeights(self.nodes, self.model.initializers, self.names)
        builder, output = self._trace(batches, inputs, weights)
        if builder.sizes - {BATCH}:
            other, _ = self._trace(OTHER_BATCHES, inputs, weights)
            if other.sizes != builder.sizes:
                raise ValueError(f"{self.model.file}: a size isn't linear in the batch size")
        if not isinstance(output, ValueOf):
            raise ValueError(f"{self.model.file}: its output does not depend on its input")
        form = prune_form(tuple(builder.nodes), output, {})
        specs = dict(_list_specs(builder, form, weights.statistics))
        return TorchGraph(
            f"{self.model.file} ({self.model.producer}, opset {self.model.opset})",
            "",
            inputs,
            tuple(specs),
            _with_training(form, True),
            _with_training(form, False),
            {spec.name: array for spec, array in specs.items()},
        )

    def _trace(
        self,
        batches: tuple[int, int],
        inputs: Mapping[str, TensorSpec],
        weights: NetworkWeights,
    ) -> tuple[TorchGraphBuilder, ValueOf | ArrayOf | None]:
        """Return the builder after all nodes, and its reference to the output."""
        arrays = {
            weights.names[tensor]: np.asarray(self.model.initializers[tensor.name], np.float32)
            for tensor in weights.tensors
        }
        first_input, *_ = refer_to_inputs(len(inputs))
        builder = TorchGraphBuilder(batches, arrays, first_input, self.inputs[0].shape[0])
        results: list[OnnxValue] = []

        def trace() -> None:
            results.append(self._read_nodes(builder, inputs, weights))

        # JAX computes the shapes of all values, but no values.
        jax.eval_shape(trace)
        return builder, results[0].reference

    def _read_nodes(
        self,
        builder: TorchGraphBuilder,
        inputs: Mapping[str, TensorSpec],
        weights: NetworkWeights,
    ) -> OnnxValue:
        values: dict[str, OnnxValue] = {}
        references = refer_to_inputs(len(inputs))
        for tensor, spec, reference in zip(self.inputs, inputs.values(), references, strict=True):
            x = builder.input(spec, reference)
            if _is_channels_last(tensor.shape[1:], self.find_sample(tensor).shape):
                x = builder.call("permute.default", x, (0, 2, 3, 1))
            values[tensor.name] = x

        def find_value(name: str) -> OnnxValue:
            if name not in values:
                raise ValueError(f"{self.model.file}: {show_name(name)} is not computed here")
            return values[name]

        for number, node in enumerate(self.nodes):
            operands: list[OnnxValue | None] = []
            for index, name in enumerate(node.inputs):
                weight = weights.by_input.get((number, index))
                if weight is not None:
                    operands.append(builder.weight(weights.names[weight]))
                    continue
                if name in self.model.initializers and name not in values:
                    values[name] = builder.constant(self.model.initializers[name])
                operands.append(find_value(name) if name else None)
            builder.module = weights.module(number)
            builder.kind = node.op
            builder.line = self.model.describe(node)
            reader = OnnxNodeReader(node, operands, builder, self.model.opset, weights.transposable)
            try:
                result = ONNX_OPERATORS[node.op](reader)
            except ARGUMENT_ERRORS as error:
                raise ValueError(f"{builder.line}: {first_line(error)}") from error
            outputs = result if isinstance(result, tuple) else (result,)
            values.update(zip(node.outputs, outputs, strict=False))
        return find_value(self.output)


def _is_channels_last(sizes: tuple[int | None, ...], sample: tuple[int, ...]) -> bool:
    """Return whether an input of these sizes is images (batch, height, width, channels), as
    TensorFlow's are."""
    if len(sample) != 3:
        return False
    height, width, channels = sample
    is_first = fits_sizes((channels, height, width), sizes)
    return not is_first and fits_sizes(sample, sizes)


def _drop_copies(model: OnnxModel) -> OnnxModel:
    """Return the model without nodes that only copy an initializer.

    PyTorch stores equal arrays once, and copies them by `Identity`. Here a copy of a vector becomes
    another initializer; nodes that read a copy of a larger array read the array itself.
    """
    initializers = dict(model.initializers)
    tied: dict[str, str] = {}
    nodes = []
    for node in model.nodes:
        node = replace(node, inputs=tuple(tied.get(name, name) for name in node.inputs))
        source = "".join(node.inputs)
        if node.op == "Identity" and source in initializers:
            for copy in filter(None, node.outputs):  # "" stands for an input that is left out
                if initializers[source].ndim < 2:
                    initializers[copy] = initializers[source]
                else:
                    tied[copy] = source
        else:
            nodes.append(node)
    return replace(model, nodes=tuple(nodes), initializers=initializers)


def _format_sizes(sizes: Iterable[int | None]) -> str:
    return "x".join("?" if size is None else str(size) for size in sizes)


def _with_training(form: Form, train: bool) -> Form:
    """Return a form with `train` in place of each `TRAINING`."""

    def fill(node: GraphNode) -> GraphNode:
        return replace(node, args=tuple(train if a is TRAINING else a for a in node.args))

    return replace(form, nodes=tuple(map(fill, form.nodes)))


def _list_specs(
    builder: TorchGraphBuilder, form: Form, statistics: Set[str]
) -> Iterator[tuple[ArraySpec, np.ndarray]]:
    """Yield the arrays that the nodes read: parameters, statistics and constants."""
    uses = find_array_uses(form)
    placed = [
        place_array(name, array, "buffer" if name in statistics else "parameter", uses[name])
        for name, array in builder.weights.items()
        if name in uses
    ]
    paths = make_names_distinct([spec.path for spec, _ in placed], "/")
    for (spec, array), path in zip(placed, paths, strict=True):
        yield replace(spec, path=path), array
    for name, array in builder.constants.items():
        if name in uses:
            is_large = array.dtype == np.float32 and array.nbytes > MAX_CONSTANT_BYTES
            path = f"constants@/{name}"
            role: Role = "buffer" if is_large else "constant"
            yield ArraySpec(name, path, role, "torch", array.shape, str(array.dtype)), array


def find_scores(producers: Mapping[str, OnnxNode], name: str) -> str:
    """Return the logits from which a softmax computes a tensor, or the tensor if none does.

    The tensor of a map from classes to probabilities is the one that the map is made of.
    """
    node = _find_source(producers, name)
    if node is not None and node.op == "Softmax":
        return "".join(node.inputs)
    is_map = name in producers and producers[name].op == MAP
    return "".join(producers[name].inputs) if is_map else name


def replace_class_pair(model: OnnxModel) -> OnnxModel:
    """Return a model with logits [0, z] in place of outputs [1 - p, p], p the sigmoid of z.

    scikit-learn writes these probabilities of two classes. Their softmax is the pair itself.
    """
    producers = {name: node for node in model.nodes for name in node.outputs}
    nodes = list(model.nodes)
    for output in model.outputs:
        pair = _find_source(producers, output.name)
        logits = None if pair is None else _find_pair(model, producers, pair)
        if pair is None or logits is None or pair not in nodes:
            continue
        (score,) = {name for name in logits if name}
        zero = f"{score}{SUFFIX}"
        inputs = tuple(name or zero for name in logits)
        place = nodes.index(pair)
        nodes[place : place + 1] = [
            OnnxNode("", "Sub", (score, score), (zero,), {}),
            replace(pair, inputs=inputs),
        ]
    return replace(model, nodes=tuple(nodes))


def _find_source(producers: Mapping[str, OnnxNode], name: str) -> OnnxNode | None:
    """Return the node that computes a tensor, before nodes that only pass it on."""
    node = producers.get(name)
    while node is not None and node.op in COPIES:
        node = producers.get("".join(node.inputs))
    return node


def _find_pair(
    model: OnnxModel, producers: Mapping[str, OnnxNode], pair: OnnxNode
) -> tuple[str, str] | None:
    """Return (z, "") for probabilities [p, 1 - p], ("", z) for [1 - p, p]; None for others."""
    if pair.op != "Concat" or len(pair.inputs) != 2:
        return None
    for number in (0, 1):
        probability = pair.inputs[1 - number]
        complement = producers.get(pair.inputs[number])
        sigmoid = producers.get(probability)
        if complement is None or sigmoid is None or sigmoid.op != "Sigmoid":
            continue
        one = model.initializers.get(complement.inputs[0])
        is_one = one is not None and bool(np.all(one == 1))
        if complement.op == "Sub" and complement.inputs[1] == probability and is_one:
            score = "".join(sigmoid.inputs)
            return ("", score) if number == 0 else (score, "")
    return None
