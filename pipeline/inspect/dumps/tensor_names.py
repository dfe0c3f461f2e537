"""Names of the tensors of a step, which don't depend on device, precision or lowering."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from pipeline.config.inspection_specs import What
from pipeline.core.errors import RecipeError
from pipeline.inspect.dumps.layer_programs import LayerTensors
from pipeline.models.layers.path_patterns import covers, require_covered

Role = Literal["input", "output", "output_gradient", "input_gradient", "gradient", "statistics"]
ROLES: tuple[Role, ...] = get_args(Role)
DATA = "dataset.train.ops"
"""Name of the map ops, which are listed like a layer."""
LOSS = "train.loss"
"""Name of the loss, which is listed like a layer."""

OUTPUT_ROLES: tuple[Role, ...] = ("output", "input_gradient", "gradient", "statistics")
"""Roles of the tensors that a layer returns."""
_ROLES_BY_CHOICE: Mapping[What, tuple[Role, ...]] = {
    "input": ("input", "output_gradient"),
    "output": OUTPUT_ROLES,
    "all": ROLES,
}


@dataclass(frozen=True, order=True)
class TensorName:
    """Name of a tensor: its layer's path, its role, and an index or the name of a parameter.

    In the backward pass a layer reads `output_gradient` and returns `input_gradient`. `gradient` is
    the gradient of a parameter; `statistics` are running means and variances.
    """

    layer: str
    role: Role
    index: str = "0"

    def __str__(self) -> str:
        return f"{self.layer}:{self.role}:{self.index}"

    @property
    def tensor_index(self) -> str:
        """Role and index in the layer, such as output:0."""
        return f"{self.role}:{self.index}"

    def file_name(self, time_us: int) -> str:
        """Return the name of the .npy file: / becomes _, : becomes a dot, and the time is last."""
        return f"{str(self).replace('/', '_').replace(':', '.')}.{time_us}.npy"


def parse_name(text: str) -> TensorName:
    """Parse layer:role:index. Raises ValueError for a text of another form."""
    layer, role, index = text.rsplit(":", 2)
    if not layer or role not in ROLES:
        raise ValueError(f"{text!r:.80} isn't the name of a tensor; must be layer:role:index")
    return TensorName(layer, ROLES[ROLES.index(role)], index)


def named_tensors(
    tensors: LayerTensors, inputs: Mapping[str, np.ndarray]
) -> Iterator[tuple[TensorName, np.ndarray]]:
    """Yield tensors by name, in forward order; `inputs` is what the network reads."""
    for name, array in inputs.items():
        yield TensorName(DATA, "output", name), array
    parameters: Mapping[Role, Mapping[str, Mapping[str, np.ndarray]]] = {
        "gradient": _group_by_layer(tensors.parameters, tensors.forms),
        "statistics": _group_by_layer(tensors.statistics, tensors.forms),
    }
    arrays: Mapping[Role, Mapping[str, np.ndarray]] = {
        "input": tensors.inputs,
        "output": tensors.outputs,
        "output_gradient": tensors.output_gradients,
        "input_gradient": tensors.input_gradients,
    }
    for layer in tensors.forms:
        for role, by_layer in arrays.items():
            if layer in by_layer:
                yield TensorName(layer, role), by_layer[layer]
        for role, groups in parameters.items():
            for name, array in groups.get(layer, {}).items():
                yield TensorName(layer, role, name), array
    yield TensorName(LOSS, "input"), tensors.logits
    yield TensorName(LOSS, "output"), np.asarray(tensors.loss)
    yield TensorName(LOSS, "input_gradient"), tensors.logits_gradient


def _group_by_layer(
    arrays: Mapping[str, np.ndarray], layers: Mapping[str, object]
) -> dict[str, dict[str, np.ndarray]]:
    """Return arrays by the innermost layer that holds them, then by their path in that layer."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for path, array in arrays.items():
        scopes = path.split("/")
        for depth in range(len(scopes) - 1, 0, -1):
            layer = "/".join(scopes[:depth])
            if layer in layers:
                groups.setdefault(layer, {})["/".join(scopes[depth:])] = array
                break
    return groups


def require_layers(patterns: Sequence[str], layers: Sequence[str], key: str) -> None:
    """Raise RecipeError for a pattern that covers no layer; `key` is their option or key."""
    names = [*layers, DATA, LOSS]
    try:
        require_covered(patterns, [tuple(layer.split("/")) for layer in names], "layers")
    except ValueError as error:
        raise RecipeError([f"{key}: {error}"]) from error


def is_selected(name: TensorName, patterns: Sequence[str], what: What) -> bool:
    """Whether layer and role of a tensor are requested; no patterns request all layers."""
    path = tuple(name.layer.split("/"))
    is_covered = not patterns or any(covers(pattern, path) for pattern in patterns)
    return is_covered and name.role in _ROLES_BY_CHOICE[what]
