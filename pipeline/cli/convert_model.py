"""`python -m pipeline convert model MODULE TARGET ...`: write a PyTorch module as a recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.core.errors import RecipeError, RunError, UsageError, printable
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.plugins.loading import find_object
from pipeline.core.registry import load_all
from pipeline.models.layers.model_spec import InitSpec, LayerSpec

if TYPE_CHECKING:
    import numpy as np
    from flax import linen as nn

    from pipeline.models.torch_graph.graph import TorchGraph

IMAGE = (3, 224, 224)
"""Shape of a sample where the arguments give none: channels, height and width."""
INIT = {"conv": {"name": "he_normal", "mode": "fan_out"}, "dense": "he_uniform", "bias": "zeros"}
"""Distribution of fresh weights, which those of the module then replace."""
TOLERANCE = 1e-4
"""Limit of the difference of logits to PyTorch's, relative to the largest."""
USAGE = (
    "convert model takes MODULE TARGET.yaml, the shape of a sample and KEY=VALUE, as in: "
    "--plugin my_nets.py convert model my_nets:MyNet my_net.yaml 3 32 32 num_classes=10"
)
HELP = """usage: python -m pipeline --plugin FILE convert model MODULE TARGET [SIZE ...]
           [KEY=VALUE ...]

Write a torch.nn.Module as a recipe that needs no torch, with its weights. Where every module of it
is a layer of this project, the recipe lists layers, so that lowerings, THOR, types by layer and the
emulator apply to them. Else it names a graph file, and the first module that is no known layer is
reported. Nothing is written unless the logits are those of PyTorch.

  MODULE      a class, a function or a module of a plug-in, as my_nets:MyNet
  TARGET      my_net.yaml; the weights are written to my_net.safetensors beside it.
              my_net.torch.json writes the graph in any case
  SIZE ...    shape of a sample: channels, height and width; 3 224 224 without it
  KEY=VALUE   arguments of MODULE, as num_classes=10

example: python -m pipeline --plugin torchvision.models convert model torchvision.models:resnet18 \\
             resnet18.yaml 3 32 32 num_classes=10
"""
_ENDING = ".yaml"


def main(args: Sequence[str]) -> int:
    """Write a PyTorch module as a recipe and return the exit status.

    Raises UsageError and RecipeError; nothing is written then.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    words = [arg for arg in args if "=" not in arg]
    options = dict(_option(arg) for arg in args if "=" in arg)
    if len(words) < 2 or any(not _is_size(word) for word in words[2:]):
        raise UsageError(words, USAGE)
    from pipeline.models.torch_graph.computation.graph_file import SUFFIX

    reference, target = words[0], Path(words[1])
    if not target.name.endswith((_ENDING, SUFFIX)):
        raise UsageError(words[:2], f"{target} must end in {_ENDING} or {SUFFIX}")
    shape = tuple(map(int, words[2:])) or IMAGE
    load_all()
    try:
        return _convert(reference, target, shape, options)
    except ValueError as error:
        raise RecipeError([f"convert model {reference}: {error}"]) from error


def _convert(
    reference: str, target: Path, shape: tuple[int, ...], options: Mapping[str, Any]
) -> int:
    from pipeline.models.torch_graph.computation.graph_file import SUFFIX
    from pipeline.models.torch_graph.conversion.export_module import export_module, make_module
    from pipeline.models.torch_graph.conversion.known_layers import UnknownLayerError

    module = make_module(reference, find_object(reference), options, seed=0)
    graph = export_module(module, shape, origin=reference)
    inputs, logits = _logits_of_torch(module, shape)
    if target.name.endswith(SUFFIX):
        return _write_graph(graph, target, inputs, logits)
    try:
        return _write_layers(graph, target, inputs, logits)
    except UnknownLayerError as error:
        print(f"layers     {error}; written as a graph instead")
    file = target.with_name(target.stem + SUFFIX)
    _write_graph(graph, file, inputs, logits)
    write_whole(target, _recipe_text(target, graph, "torch", {"model": {"graph": str(file)}}))
    _say(target, "recipe that names the graph")
    return 0


def _write_layers(graph: TorchGraph, target: Path, inputs: np.ndarray, logits: np.ndarray) -> int:
    from flax.traverse_util import unflatten_dict

    from pipeline.models.modules.standard import Network
    from pipeline.models.torch_graph.conversion.layer_list import layers_of, open_to_classes
    from pipeline.models.weights.files.weight_files import write_weights

    found = layers_of(graph)
    opened = open_to_classes(found.layers)
    init = InitSpec.model_validate(INIT)
    network = Network(found.layers, initializers=init, dtype="float32")
    _require_equal(network, unflatten_dict(dict(found.arrays), sep="/"), inputs, logits)
    weights = target.with_suffix(".safetensors")
    write_weights(weights, found.arrays)
    layers = [_layer_to_yaml(layer) for layer in opened]
    body = {"model": {"layers": layers}, "checkpoint": {"restore": str(weights)}}
    write_whole(target, _recipe_text(target, graph, "layers", body))
    _say(target, f"recipe of {len(layers):,} layers, its weights in {weights.name}")
    return 0


def _write_graph(graph: TorchGraph, file: Path, inputs: np.ndarray, logits: np.ndarray) -> int:
    from pipeline.models.torch_graph.computation.graph_file import (
        read_graph,
        weights_beside,
        write_graph,
    )
    from pipeline.models.torch_graph.computation.torch_network import (
        TorchNetwork,
        initial_variables_of,
    )
    from pipeline.models.torch_graph.conversion.sources import HeldGraph

    network = TorchNetwork(HeldGraph(graph), "float32")
    _require_equal(network, initial_variables_of(graph), inputs, logits)
    write_graph(file, graph)
    read_graph(file)
    _say(
        file,
        f"graph of {len(graph.train.nodes):,} nodes, its weights in {weights_beside(file).name}",
    )
    return 0


def _logits_of_torch(module: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return random inputs (2, ...) and the logits of the module in evaluation."""
    import numpy as np
    import torch

    inputs = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    was_training = module.training
    module.eval()
    with torch.no_grad():
        logits = module(torch.from_numpy(inputs)).numpy()
    module.train(was_training)
    return inputs, logits


def _require_equal(
    network: nn.Module, variables: Mapping[str, Any], inputs: np.ndarray, logits: np.ndarray
) -> None:
    """Print how far the logits are from PyTorch's. Raises RunError above the tolerance."""
    import numpy as np

    own = np.asarray(network.apply(variables, inputs.transpose(0, 2, 3, 1), train=False))
    largest = max(float(np.abs(logits).max()), 1e-6)
    difference = float(np.abs(own - logits).max()) / largest
    if not (math.isfinite(difference) and difference <= TOLERANCE):
        raise RunError(
            f"the logits differ by {difference:.1e} of the largest from PyTorch's, more than "
            f"{TOLERANCE:.0e}; nothing is written"
        )
    print(f"logits     within {difference:.1e} of PyTorch's, of the largest")


def _recipe_text(target: Path, graph: TorchGraph, group: str, body: Mapping[str, Any]) -> str:
    """Return a recipe as YAML, to be completed on the command line."""
    head = (
        f"# @package _global_\n# {graph.origin}, converted with torch {graph.torch}\n"
        f"# python -m pipeline +recipe={printable(str(target))} dataset=NAME train.passes=10\n"
        f"defaults:\n  - override /model: {group}\n"
    )
    named = {"name": re.sub(r"[^\w.+-]", "_", target.stem)[:100].lstrip(".+-") or "converted"}
    return head + yaml.safe_dump(
        {**named, **body}, default_flow_style=None, sort_keys=False, width=100
    )


def _layer_to_yaml(layer: LayerSpec) -> Any:
    """Return a layer as a recipe writes it: its name, or a section of what is not the default."""
    fields = {
        key: _value_to_yaml(value)
        for key, value in layer
        if key != "name" and value != type(layer).model_fields[key].default
    }
    return {"name": layer.name, **fields} if fields else layer.name


def _value_to_yaml(value: Any) -> Any:
    if isinstance(value, LayerSpec):
        return _layer_to_yaml(value)
    return [_value_to_yaml(item) for item in value] if isinstance(value, tuple) else value


def _option(argument: str) -> tuple[str, Any]:
    key, _, text = argument.partition("=")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError([argument], "is no KEY=VALUE, as num_classes=10") from error


def _is_size(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def _say(path: Path, what: str) -> None:
    print(f"written    {printable(str(path))}: {what}")
