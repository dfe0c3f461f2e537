"""Table of the layers of a recipe's network (parameters, shapes, when they are trained), and the
network's graph for TensorBoard: its operations by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax.extend import core

from pipeline.config.checks import make_batching
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import find_known_facts
from pipeline.core.files.value_text import align_columns
from pipeline.core.host.array_values import allow_reads, find_shapes
from pipeline.core.host.jaxpr import find_called_jaxpr, interpret_jaxpr, join_scope
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.core.reporter import Reporter
from pipeline.data.columns import Targets
from pipeline.data.random import seed_words
from pipeline.data.tables.encode_table import make_encoding_ops
from pipeline.data.transform import compute_column_specs, replace_targets
from pipeline.engine.monitors.tensorboard import BoardNode
from pipeline.models.layers.path_patterns import LayerPath, is_frozen
from pipeline.models.modules.apply_layers import record_layers
from pipeline.models.modules.jit_layers import observe_modules
from pipeline.models.modules.name_stack import find_layer
from pipeline.models.modules.network import Network
from pipeline.stages.build import count_trained, make_step_config
from pipeline.stages.data import load_data
from pipeline.stages.fine_tuning import plan_fine_tuning
from pipeline.stages.key_errors import blaming_key
from pipeline.stages.sample_sizes import choose_inputs
from pipeline.stages.step_features import NO_INPUTS
from pipeline.training.features.freezing import Freezing, get_freezing
from pipeline.training.features.parameter_rates import LayerRates
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig
from pipeline.training.update import init_with_output, shape_inputs


@dataclass(frozen=True)
class LayerRow:
    """A layer, without the parameters of layers inside it, as in JSON."""

    path: str
    kind: str
    """The name of the layer in recipes, or the class of a module; empty if unknown."""
    output: tuple[int, ...] | None
    """Shape of the layer's output for one sample; None if unknown."""
    parameters: int
    """Number of values in the parameters of the layer."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the parameters by name."""
    dtype: str
    """Dtypes of the parameters, joined by commas; empty without parameters."""
    trained: str
    """`yes`, `no` or `from step N`, for each parameter if they differ; empty without parameters."""
    rate: float
    """Factor on the learning rate by `train.lr_decay_by_layer`."""


@dataclass(frozen=True)
class LayerTable:
    """Layers of a network in the order of their computation."""

    model: str
    inputs: Mapping[str, tuple[int, ...]]
    """Shape of each input, by the network's name; an input without a name has its column's."""
    layers: tuple[LayerRow, ...]
    statistics: int
    """Number of values in batch statistics."""
    trained: Mapping[int, int]
    """Number of trained parameters in each phase, by the number of steps before the phase."""

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return sum(row.parameters for row in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON."""
        return {
            "model": self.model,
            "inputs": dict(self.inputs),
            "layers": [asdict(row) for row in self.layers],
            "parameters": self.parameters,
            "bytes": 4 * self.parameters,
            "batch_statistics": self.statistics,
            "trained": [
                {"from_step": start + 1, "parameters": count}
                for start, count in self.trained.items()
            ],
        }

    def __str__(self) -> str:
        shows_rates = any(row.rate != 1 for row in self.layers)
        header = ["layer", "kind", "output", "parameters", "shapes", "dtype", "trained"]
        table = [[*header, "rate"] if shows_rates else header]
        for row in self.layers:
            shapes = " ".join(
                f"{name} {_format_shape(shape)}" for name, shape in row.shapes.items()
            )
            count = f"{row.parameters:,}" if row.shapes else ""
            output = "" if row.output is None else _format_shape(row.output)
            cells = [row.path, row.kind, output, count, shapes, row.dtype, row.trained]
            rate = f"x{row.rate:.4g}" if row.shapes else ""
            table.append([*cells, rate] if shows_rates else cells)
        total = self.parameters
        totals = [f"parameters  {total:,}, {4 * total / 1e6:,.1f} MB in float32"]
        for start, trained in self.trained.items():
            since = f" from step {start + 1}" if start else ""
            totals.append(f"trained     {trained:,}{since}; {total - trained:,} frozen")
        if self.statistics:
            totals.append(f"statistics  {self.statistics:,} of batch norm, not trained")
        return "\n".join([*align_columns(table, right=(3,)), "", *totals])


def make_layer_table(recipe: Recipe, reporter: Reporter) -> LayerTable:
    """Return the layers of a recipe's network, traced from shapes.

    The dataset is read only if its sizes are unknown. Raises RecipeError if network, data or
    patterns of parameters don't fit.
    """
    step_config, steps_per_epoch = _make_config(recipe, reporter)
    seed = seed_words(recipe.seed)
    traced = _TracedLayers()
    with blaming_key(f"model {recipe.model.name}"), record_layers(traced.note_layer):
        is_list = isinstance(step_config.network, Network)
        observing = nullcontext() if is_list else observe_modules(on_result=traced.note_module)
        with observing, allow_reads(recipe.train.mode == "eager"):
            variables = find_shapes(lambda words: init_with_output(step_config, words)[1], seed)
    tuning = plan_fine_tuning(recipe, step_config, variables, steps_per_epoch, seed)
    step_config = tuning.apply(recipe, step_config, NO_INPUTS)
    frozen = tuple(pattern for feature in recipe.train.features for pattern in feature.frozen)
    if frozen:
        freezing = Freezing(frozen)
        step_config = replace(step_config, features=(*step_config.features, freezing))
    params = flatten_dict(dict(variables["params"]))
    statistics = [
        leaf
        for name, tree in variables.items()
        if name != "params"
        for leaf in jax.tree.leaves(tree)
    ]
    starts = (0, *(phase.start for phase in get_freezing(step_config).phases))
    return LayerTable(
        recipe.model.name,
        {array.name: array.shape for array in step_config.inputs.arrays},
        traced.make_rows(params, step_config),
        sum(leaf.size for leaf in statistics),
        {start: count_trained(variables["params"], step_config, start) for start in starts},
    )


def _make_config(recipe: Recipe, reporter: Reporter) -> tuple[StepConfig, int]:
    """Return the step's configuration without the recipe's map ops, and the steps of an epoch."""
    facts = find_known_facts(recipe)
    if facts is None:
        dataset = load_data(recipe, reporter)
        encoding = make_encoding_ops(dataset.table, recipe.model.table_input, dataset.scale)
        step_config = make_step_config(recipe, dataset.targets, dataset.inputs, encoding, ())
        return step_config, dataset.train_order.steps_per_epoch
    specs = compute_column_specs(recipe.dataset.eval.ops, facts.specs())
    inputs = choose_inputs(recipe, specs, ("image",))
    # A loss that weighs classes needs counts. Layers don't depend on them.
    counts = (1,) * facts.classes
    targets = Targets(tuple(map(str, range(facts.classes))), counts=counts)
    targets = replace_targets(recipe.dataset.eval.ops, targets)
    steps_per_epoch = make_batching(recipe, facts.train_size).steps_per_epoch
    return make_step_config(recipe, targets, inputs, (), ()), steps_per_epoch


class _TracedLayers:
    """Kinds and output shapes of layers and modules, by path, in the order of tracing."""

    def __init__(self) -> None:
        self._layers: dict[LayerPath, tuple[str, tuple[int, ...] | None]] = {}

    def note_layer(self, path: LayerPath, kind: str, result: Any) -> None:
        self._layers.setdefault(path, (kind, tuple(result.shape[1:])))

    def note_module(self, module: nn.Module, result: Any) -> None:
        if module.path:
            shape = tuple(result.shape[1:]) if isinstance(result, jax.Array) else None
            self._layers.setdefault(module.path, (type(module).__name__, shape))

    def make_rows(
        self, params: Mapping[LayerPath, Any], step_config: StepConfig
    ) -> tuple[LayerRow, ...]:
        """Return a row for each layer that has parameters or no inner layers.

        Scopes that hold parameters but weren't traced as layers come last.
        """
        leaves: dict[LayerPath, dict[str, Any]] = {}
        for path, leaf in params.items():
            # A parameter belongs to the innermost traced layer around it, or else to its scope.
            scopes = [path[:depth] for depth in range(len(path) - 1, 0, -1)]
            layer = next((scope for scope in scopes if scope in self._layers), path[:-1])
            leaves.setdefault(layer, {})["/".join(path)] = leaf
        outer_paths = {path[:depth] for path in self._layers for depth in range(1, len(path))}
        paths = [path for path in self._layers if path in leaves or path not in outer_paths]
        paths += [path for path in leaves if path not in self._layers]
        return tuple(self._make_row(path, leaves.get(path, {}), step_config) for path in paths)

    def _make_row(
        self, path: LayerPath, leaves: Mapping[str, Any], step_config: StepConfig
    ) -> LayerRow:
        kind, output = self._layers.get(path, ("", None))
        layer_rates = step_config.find(LayerRates)
        rate = layer_rates.factors.get(path[0], 1.0) if path and layer_rates else 1.0
        depth = len(path)
        shapes = {"/".join(name.split("/")[depth:]): leaf.shape for name, leaf in leaves.items()}
        phases = {name: _describe_training(tuple(name.split("/")), step_config) for name in leaves}
        trained = next(iter(phases.values()), "")
        if len(set(phases.values())) > 1:
            texts = [f"{name.rpartition('/')[2]} {phase}" for name, phase in phases.items()]
            trained = ", ".join(texts)
        dtypes = ", ".join(dict.fromkeys(str(leaf.dtype) for leaf in leaves.values()))
        count = sum(map(prod, shapes.values()))
        return LayerRow("/".join(path), kind, output, count, shapes, dtypes, trained, rate)


def _describe_training(path: LayerPath, step_config: StepConfig) -> str:
    """Return whether a parameter is trained, and from which step, as text."""
    if not is_frozen(step_config.frozen, path):
        return "yes"
    starts = [
        phase.start
        for phase in get_freezing(step_config).phases
        if not is_frozen(phase.frozen, path)
    ]
    return f"from step {starts[0] + 1}" if starts else "no"


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"


def trace_network_graph(config: StepConfig, state: TrainState) -> list[BoardNode]:
    """Return the operations of a network's inference on one sample, in the order of computation.

    Names begin with the path of the layer: `conv_0/conv_general_dilated`. `state` may have shapes
    in place of arrays.
    """
    sample = shape_inputs(config.inputs, 1)
    variables = state.variables
    closed = jax.make_jaxpr(partial(config.network.apply, train=False))(variables, sample)
    trace = _Trace()
    # Paths such as `conv_0/kernel`, without the collection, in the order of the jaxpr's inputs.
    paths = [path.partition("/")[2] for path in flatten_by_path(variables)]
    weights = closed.jaxpr.invars[: len(paths)]
    pairs = zip(paths, weights, strict=True)
    inputs = [trace.add(path, "parameter", (), var) for path, var in pairs]
    # Dictionaries have their leaves in the order of the keys.
    names = sorted(array.name for array in config.inputs.arrays)
    names = names if config.inputs.is_named else ["input"]
    for name, var in zip(names, closed.jaxpr.invars[len(paths) :], strict=True):
        inputs.append(trace.add(name, "placeholder", (), var))
    (result,) = trace.add_equations(closed, inputs, "")
    trace.add("output", "identity", (result,) if result else (), closed.jaxpr.outvars[0])
    return trace.nodes


class _Trace:
    """The nodes of a graph so far, in the order of computation."""

    def __init__(self) -> None:
        self.nodes: list[BoardNode] = []
        self._name_counts: Counter[str] = Counter()

    def add(self, name: str, op: str, inputs: Sequence[str], result: Any) -> str:
        """Add a node that computes `result`; return its name, with a number if `name` is taken."""
        number = self._name_counts[name]
        self._name_counts[name] += 1
        unique = f"{name}_{number}" if number else name
        shape = tuple(getattr(result.aval, "shape", ()))
        unique_inputs = tuple(dict.fromkeys(inputs))
        self.nodes.append(BoardNode(unique, op, unique_inputs, shape, str(result.aval.dtype)))
        return unique

    def add_equations(
        self, jaxpr: core.ClosedJaxpr, inputs: Sequence[str], scope: str
    ) -> list[str]:
        """Add the operations of a jaxpr below the layer `scope`.

        Returns the names of the nodes that compute its results, "" for constants. Called functions
        are inlined. A loop or a conditional is one node.
        """
        return interpret_jaxpr(jaxpr, inputs, partial(self._add_equation, scope), lambda *_: "")

    def _add_equation(self, outer: str, equation: Any, inputs: list[str]) -> list[str]:
        """Add an equation below the layer `outer`; return the node of each of its results."""
        kind = equation.primitive.name
        scope = join_scope(equation, outer)
        called = find_called_jaxpr(equation)
        if called is not None:
            return self.add_equations(called, inputs, scope)
        name = "/".join(filter(None, (find_layer(scope), kind)))
        nodes = [node for node in inputs if node]  # without constants
        node = self.add(name, kind, nodes, equation.outvars[0])
        return [node] * len(equation.outvars)
