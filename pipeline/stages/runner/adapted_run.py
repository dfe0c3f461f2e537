"""The frozen weights of a run with adapters (`lora`): where they come from, and their sum with the
adapters, which predictions and exports use.

Checkpoints have the adapters only, so each process that opens the run reads the frozen weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError
from pipeline.data.columns import Targets
from pipeline.data.dataset_spec import find_table_layout
from pipeline.data.inputs import Dataset, NetworkInputs
from pipeline.data.random import seed_words
from pipeline.data.tables.encode_table import TableLayout
from pipeline.models.modules.adapted_network import ADAPTER_NAMES
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.models.weights.files.weight_files import is_weight_file, read_weights
from pipeline.stages.build import build_network
from pipeline.stages.export.matching import match_weights
from pipeline.stages.export.network import trace_model_arrays
from pipeline.stages.export.prediction import map_inputs
from pipeline.stages.record.trained_run import TrainedRun, read_trained_run
from pipeline.stages.runner.context import BuiltRun, CompiledRun
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.features.components.lora import DIGEST_WORDS, Lora, LoraSpec
from pipeline.training.state import TrainState
from pipeline.training.update import make_key, reinitialize

KEY = "train.features: base of lora"


@dataclass(frozen=True)
class BaseNetwork:
    """The network of a recipe with `lora`, without adapters."""

    recipe: Recipe
    inputs: NetworkInputs
    targets: Targets
    layout: TableLayout | None
    """The encoded columns of a table; None for other samples."""

    @property
    def spec(self) -> LoraSpec:
        specs = (spec for spec in self.recipe.train.features if isinstance(spec, LoraSpec))
        return next(specs)

    def read_weights(self) -> Arrays:
        """Return the frozen weights by name, such as `params/dense_0/kernel`.

        Raises DataError if they can't be read or don't fit the network.
        """
        if self.spec.base is None:
            return self._initialise()
        base = Path(self.spec.base)
        if not base.exists():
            raise DataError(f"{KEY} = {base}: there is no such run or weight file")
        model = self.recipe.model.fit(self.layout, self.targets)
        network = trace_model_arrays(model, len(self.targets), self.inputs)
        if is_weight_file(base) or base.is_file():
            keys = self.recipe.checkpoint
            matching = match_weights(
                str(base), read_weights(base), network, keys.renames, keys.rules
            )
            matching.require(partial=False)
            return matching.arrays
        arrays = read_trained_run(base).arrays
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        names = sorted({*shapes, *network.shapes})
        differing = [name for name in names if shapes.get(name) != network.shapes.get(name)]
        if differing:
            name = differing[0]
            raise DataError(
                f"{KEY} = {base}: {len(differing)} arrays don't fit the network, such as {name}: "
                f"has {shapes.get(name, 'none')}, the network {network.shapes.get(name, 'none')}"
            )
        return arrays

    def _initialise(self) -> Arrays:
        """Return the initial weights."""
        network = build_network(self.recipe, self.targets, self.layout)
        zeros = self.inputs.pack(lambda array: jnp.zeros((1, *array.shape), array.dtype))
        rules = self.recipe.model.init.rules

        def init(seed: Any) -> Any:
            variables = network.init(make_key(seed, 0), zeros, train=False)
            params = reinitialize(variables["params"], rules, make_key(seed, 2))
            return {**variables, "params": params}

        variables: Any = jax.jit(init)(seed_words(self.recipe.seed))
        return flatten_arrays(variables)


def flatten_arrays(variables: Mapping[str, Any]) -> Arrays:
    """Return arrays by name, in numpy."""
    flat = flatten_dict(dict(variables), sep="/")
    return {name: np.asarray(array) for name, array in flat.items()}


def merge_run(run: TrainedRun) -> TrainedRun:
    """Return a run with `lora` with the weights of its network without adapters, from those of a
    checkpoint, which lack the frozen ones. Raises DataError as `BaseNetwork.read_weights` does."""
    mapped = map_inputs(run.recipe, run.samples)
    layout = find_table_layout(mapped.ops)
    network = BaseNetwork(run.recipe, mapped.inputs, run.samples.targets, layout)
    arrays = {**network.read_weights(), **run.arrays}
    tree: Any = unflatten_dict(arrays, sep="/")
    params = network.spec.merge_params(tree["params"])
    return replace(run, arrays=flatten_arrays({**tree, "params": params}))


@dataclass(frozen=True)
class FrozenWeights:
    """The weights that a run with `lora` doesn't train."""

    network: BaseNetwork
    arrays: Arrays

    @property
    def digest(self) -> np.ndarray:
        """The SHA-256 of the parameters as words, uint32 (8,)."""
        digest = hashlib.sha256()
        for name in sorted(self.arrays):
            if name.startswith("params/"):
                array = np.ascontiguousarray(self.arrays[name], np.float32)
                digest.update(f"{name} {array.shape}".encode())
                digest.update(array.tobytes())
        return np.frombuffer(digest.digest(), "<u4")[:DIGEST_WORDS].astype(np.uint32)

    def start(self, state: TrainState) -> TrainState:
        """Return the state of step 0 with these weights, and with their digest."""
        tree: Any = unflatten_dict(dict(self.arrays), sep="/")
        collections = {name: part for name, part in tree.items() if name != "params"}
        state = replace(state, collections={**state.collections, **collections})
        return self._put(state.replace_part(Lora.name, jnp.asarray(self.digest)))

    def complete(self, state: TrainState, source: Path) -> TrainState:
        """Return the state of a checkpoint with these weights, which it lacks. Raises DataError
        if its run had others; `source` is the run."""
        if not np.array_equal(np.asarray(state.features[Lora.name]), self.digest):
            base = self.network.spec.base or "null"
            raise DataError(
                f"{KEY} = {base}: has other weights than when {source} began; must be the same"
            )
        return self._put(state)

    def _put(self, state: TrainState) -> TrainState:
        adapters = {
            path: leaf
            for path, leaf in flatten_dict(dict(state.params)).items()
            if path[-1] in ADAPTER_NAMES
        }
        tree: Any = unflatten_dict(dict(self.arrays), sep="/")
        return replace(state, params=unflatten_dict({**flatten_dict(tree["params"]), **adapters}))


def read_frozen(recipe: Recipe, dataset: Dataset) -> FrozenWeights:
    """Read the frozen weights of a recipe with `lora`. Raises DataError as
    `BaseNetwork.read_weights` does."""
    layout = find_table_layout(dataset.eval_ops)
    network = BaseNetwork(recipe, dataset.inputs, dataset.targets, layout)
    return FrozenWeights(network, network.read_weights())


class AdaptedRun(RunFeature):
    """The frozen weights of a run with `lora`, which its states begin with."""

    _frozen: FrozenWeights

    def plan(self, built_run: BuiltRun) -> BuiltRun:
        """Read the frozen weights, before anything is compiled."""
        self._frozen = read_frozen(built_run.recipe, built_run.dataset)
        return built_run

    def start_state(self, run: CompiledRun, state: TrainState, *, resumed: bool) -> TrainState:
        """Put the frozen weights into a state. Raises DataError for a resumed one whose run had
        others."""
        if resumed:
            return self._frozen.complete(state, run.context.run_dir)
        return run.executable.put(self._frozen.start(state))
