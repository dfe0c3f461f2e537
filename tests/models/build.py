"""Networks to test with: from conf/model, or from a few layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict
from omegaconf import OmegaConf

from pipeline.core.files.paths import CONF
from pipeline.core.registry import list_components
from pipeline.models.layers.model_spec import InitSpec, LayerSpec, ModelSpec
from pipeline.models.modules.network import Network

INIT = {"conv": "he_normal", "dense": "he_uniform", "bias": {"name": "normal", "sigma": 0.5}}

ZEROS = {"conv": "zeros", "dense": "zeros", "bias": "zeros"}
"""Initialisers of networks whose weights aren't drawn, which takes a third of tracing."""

QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options for programs that run once: compiling them takes a quarter of the time."""

Variables = dict[str, Any]


def conf_model(name: str, **changes: Any) -> ModelSpec:
    """The network of conf/model/<name>.yaml with some keys changed."""
    tree = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    assert isinstance(tree, dict)
    return list_components("model")[str(tree["name"])].model_validate({**tree, **changes})


def network(*layers: LayerSpec, dtype: str = "float32") -> Network:
    """A network of these layers."""
    return Network(layers, InitSpec.model_validate(INIT), dtype)


def without_draws(module: nn.Module) -> nn.Module:
    """The module, whose weights start at zero if it is a list of layers."""
    if isinstance(module, Network):
        return module.clone(initializers=InitSpec.model_validate(ZEROS))
    return module


def shapes(module: nn.Module, sample: Sequence[int]) -> Variables:
    """Shapes and dtypes of the variables for images (height, width, channels), tokens (tokens,), or
    the fields (fields, 2) of `wide_deep`; makes no weight."""
    inputs: Any = jax.ShapeDtypeStruct((1, *sample), jnp.int32 if len(sample) == 1 else jnp.float32)
    if len(sample) == 2:
        inputs = jax.eval_shape(split_fields, jax.ShapeDtypeStruct((1, *sample), jnp.float32))
    return jax.eval_shape(
        lambda key, inputs: without_draws(module).init(key, inputs, train=False),
        jax.random.key(0),
        inputs,
    )


def split_fields(samples: Any) -> dict[str, Any]:
    """The inputs of `wide_deep` from (n, ..., 2): numbers of features, and their values."""
    fields = samples.reshape(len(samples), -1, 2)
    return {
        "field_index": fields[..., 0].astype(np.int32),
        "field_value": fields[..., 1].astype(np.float32),
    }


def initialise(module: nn.Module, images: np.ndarray | dict[str, np.ndarray]) -> Variables:
    """Fresh variables, drawn in one compiled program."""
    draw = jax.jit(lambda key: module.init(key, images, train=False), compiler_options=QUICK)
    return draw(jax.random.key(0))


def draw_variables(variables: Variables, seed: int = 0) -> Variables:
    """Variables of these shapes, drawn without compiling: kernels He normal, scales and variances
    one, all else zero."""
    generator = np.random.default_rng(seed)

    def draw(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if len(leaf.shape) > 1:
            deviation = (2 / np.prod(leaf.shape[:-1])) ** 0.5
            return generator.normal(0, deviation, leaf.shape).astype(np.float32)
        return np.full(leaf.shape, path[-1].key in ("scale", "var"), np.float32)

    return jax.tree_util.tree_map_with_path(draw, variables)


def positions(module: nn.Module, image: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Shape of each module's output for one image, without the batch, by path."""
    _, state = jax.eval_shape(
        lambda images: without_draws(module).init_with_output(
            jax.random.key(0), images, train=False, capture_intermediates=True
        ),
        jax.ShapeDtypeStruct((1, *image), jnp.float32),
    )
    outputs = flatten_dict(state["intermediates"], sep="/")
    return {
        path.removesuffix("/__call__"): leaf.shape[1:]
        for path, (leaf,) in outputs.items()
        if hasattr(leaf, "shape")
    }


def parameters(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by path, such as `conv_0/kernel`."""
    return flatten_dict(variables["params"], sep="/")


def count(variables: Mapping[str, Any]) -> int:
    """How many parameters there are."""
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
