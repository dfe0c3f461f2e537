"""`python -m pipeline convert model NETWORK TARGET ...`: write a network as a recipe.

The network is a PyTorch module or an ONNX file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from flax import linen as nn
from flax.traverse_util import unflatten_dict

from pipeline.cli.commands.command import CommandResult
from pipeline.config.files import make_recipe_name
from pipeline.core.errors import RecipeError, RunError, UsageError, printable
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.plugins.loading import find_object
from pipeline.core.registry import load_all
from pipeline.models.layers.model_spec import InitSpec, LayerSpec
from pipeline.models.modules.network import Network
from pipeline.models.torch_graph.computation.graph_file import (
    SUFFIX,
    read_graph,
    weights_beside,
    write_graph,
)
from pipeline.models.torch_graph.computation.torch_network import TorchNetwork, initial_variables_of
from pipeline.models.torch_graph.conversion.export_module import export_module, make_module
from pipeline.models.torch_graph.conversion.known_layers import UnknownLayerError
from pipeline.models.torch_graph.conversion.layer_list import (
    choose_tensor,
    list_layers,
    set_class_features,
)
from pipeline.models.torch_graph.graph import SampleSpec, TorchGraph
from pipeline.models.torch_graph.onnx.import_onnx import find_sample_shape, import_onnx
from pipeline.models.torch_graph.onnx.onnx_file import SUFFIX as ONNX
from pipeline.models.torch_graph.onnx.onnx_file import read_onnx
from pipeline.models.weights.files.weight_files import write_weights

DEFAULT_SHAPE = (3, 224, 224)
"""Default shape of a sample: channels, height and width."""
INIT = {"conv": {"name": "he_normal", "mode": "fan_out"}, "dense": "he_uniform", "bias": "zeros"}
"""Initializers that a network needs to be built; their values aren't used."""
TOLERANCE = 1e-4
"""Largest difference from the reference's logits, relative to the largest logit."""


@dataclass(frozen=True)
class ReferenceLogits:
    """Logits that a converted network must compute."""

    name: str
    """The program that computed them, for messages."""
    inputs: np.ndarray
    """Samples (batch, channels, height, width)."""
    logits: np.ndarray


def main(
    module: str, target: Path, sizes: Sequence[int] = (), arguments: Sequence[str] = ()
) -> CommandResult:
    """Write a PyTorch module, or the network of an ONNX file, as a recipe.

    `module` is `module:name` or an ONNX file, `sizes` the shape of a sample (channels, height,
    width), and `arguments` the module's arguments, as NAME=VALUE. The weights are written beside
    the recipe. Raises UsageError for wrong arguments, RecipeError if the network can't be
    converted, and RunError if the converted one computes other logits.
    """
    if not target.name.endswith((".yaml", SUFFIX)):
        raise UsageError([str(target)], f"must end in .yaml or {SUFFIX}")
    options = dict(_parse_argument(argument) for argument in arguments)
    load_all()
    try:
        if module.endswith(ONNX):
            # The name of a tensor may be a number.
            texts = dict(argument.split("=", 1) for argument in arguments)
            _convert_onnx(Path(module), target, tuple(sizes), texts)
        else:
            _convert_module(module, target, tuple(sizes) or DEFAULT_SHAPE, options)
    except ValueError as error:
        raise RecipeError([f"convert model {module}: {error}"]) from error
    return CommandResult({"file": str(target)})


def _convert_module(
    name: str, target: Path, shape: tuple[int, ...], options: Mapping[str, Any]
) -> None:
    module = make_module(name, find_object(name), options, seed=0)
    graph = export_module(module, shape, origin=name)
    import torch  # not before: only here it is certain to be installed

    inputs = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    module.eval()
    with torch.no_grad():
        logits = choose_tensor(torch, module(torch.from_numpy(inputs))).numpy()
    _write_network(graph, target, ReferenceLogits("PyTorch", inputs, logits))


def _convert_onnx(
    file: Path, target: Path, shape: tuple[int, ...], options: Mapping[str, str]
) -> None:
    """Convert an ONNX file; the only option is `output`, the name of the tensor of logits."""
    if options.keys() - {"output"}:
        raise ValueError("an ONNX file takes no --argument but output=NAME")
    if len(shape) > 3:
        raise ValueError(f"an ONNX file takes at most 3 SIZEs, not {len(shape)}")
    shape = shape or find_sample_shape(read_onnx(file), options.get("output"))
    # Height and width are 1 if they are left out.
    channels, height, width = (*shape, 1, 1)[:3]
    graph = import_onnx(file, [SampleSpec((height, width, channels))], options.get("output"))
    inputs = np.random.default_rng(0).normal(size=(2, channels, height, width)).astype(np.float32)
    variables = initial_variables_of(graph)
    images = inputs.transpose(0, 2, 3, 1)
    logits = np.asarray(TorchNetwork(graph, "float32").apply(variables, images, train=False))
    _write_network(graph, target, ReferenceLogits("the file", inputs, logits))


def _write_network(graph: TorchGraph, target: Path, reference: ReferenceLogits) -> None:
    """Write a graph file if `target` has its suffix. Otherwise write a recipe that lists layers,
    or if a module isn't a supported layer, a recipe and a graph file beside it."""
    if target.name.endswith(SUFFIX):
        _write_graph(graph, target, reference)
        return
    try:
        _write_layers(graph, target, reference)
        return
    except UnknownLayerError as error:
        print(f"layers     {error}; written as a graph instead")
    file = target.with_name(target.stem + SUFFIX)
    _write_graph(graph, file, reference)
    write_whole(target, _make_recipe(target, graph, "torch", {"model": {"graph": str(file)}}))
    _report_file(target, "recipe that names the graph")


def _write_layers(graph: TorchGraph, target: Path, reference: ReferenceLogits) -> None:
    """Write a recipe that lists layers. Raises UnknownLayerError for a module that isn't one."""
    converted = list_layers(graph)
    # The recipe's last layer has a feature for each of the dataset's classes.
    recipe_layers = set_class_features(converted.layers)
    init = InitSpec.model_validate(INIT)
    network = Network(converted.layers, initializers=init, dtype="float32")
    _require_equal(network, unflatten_dict(dict(converted.arrays), sep="/"), reference)
    weights = target.with_suffix(".safetensors")
    write_weights(weights, converted.arrays)
    layers = [_value_to_yaml(layer) for layer in recipe_layers]
    body = {"model": {"layers": layers}, "checkpoint": {"restore": str(weights)}}
    write_whole(target, _make_recipe(target, graph, "layers", body))
    _report_file(target, f"recipe of {len(layers):,} layers, its weights in {weights.name}")


def _write_graph(graph: TorchGraph, file: Path, reference: ReferenceLogits) -> None:
    network = TorchNetwork(graph, "float32")
    _require_equal(network, initial_variables_of(graph), reference)
    write_graph(file, graph)
    read_graph(file)
    weights = weights_beside(file).name
    _report_file(file, f"graph of {len(graph.training.nodes):,} nodes, its weights in {weights}")


def _require_equal(
    network: nn.Module, variables: Mapping[str, Any], reference: ReferenceLogits
) -> None:
    """Print the logits' difference from the reference's. Raises RunError above the tolerance."""
    images = reference.inputs.transpose(0, 2, 3, 1)
    logits = np.asarray(network.apply(variables, images, train=False))
    largest = max(float(np.abs(reference.logits).max()), 1e-6)
    difference = float(np.abs(logits - reference.logits).max()) / largest
    if not (math.isfinite(difference) and difference <= TOLERANCE):
        raise RunError(
            f"the logits differ from {reference.name}'s by {difference:.1e} of the largest, more "
            f"than {TOLERANCE:.0e}; nothing is written"
        )
    print(f"logits     differ from {reference.name}'s by {difference:.1e} of the largest")


def _make_recipe(target: Path, graph: TorchGraph, model: str, body: Mapping[str, Any]) -> str:
    """Return a recipe as YAML, without a dataset and a length of training."""
    exporter = f" with torch {graph.torch_version}" if graph.torch_version else ""
    head = (
        f"# @package _global_\n# {graph.origin}, converted{exporter}\n"
        f"# python -m pipeline +recipe={printable(str(target))} dataset=NAME train.epochs=10\n"
        f"defaults:\n  - override /model: {model}\n"
    )
    tree = {"name": make_recipe_name(target, "converted"), **body}
    return head + yaml.safe_dump(tree, default_flow_style=None, sort_keys=False, width=100)


def _value_to_yaml(value: Any) -> Any:
    """Return a value for YAML. A layer becomes its name, or its name and non-default fields."""
    if isinstance(value, tuple):
        return [_value_to_yaml(item) for item in value]
    if not isinstance(value, LayerSpec):
        return value
    fields = {
        key: _value_to_yaml(item)
        for key, item in value
        if key != "name" and item != type(value).model_fields[key].default
    }
    return {"name": value.name, **fields} if fields else value.name


def _parse_argument(argument: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE. Raises UsageError for another form."""
    name, equals, text = argument.partition("=")
    try:
        if equals:
            return name, yaml.safe_load(text)
    except yaml.YAMLError:
        pass
    raise UsageError([f"--argument {argument}"], "must be NAME=VALUE, such as num_classes=10")


def _report_file(path: Path, content: str) -> None:
    print(f"written    {printable(str(path))}: {content}")
