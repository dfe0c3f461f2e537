"""Types that layers compute in, by level (P-01, P-03) and by path (M-07)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from pipeline import load_recipe
from pipeline.config.resolved_settings import resolve_precision
from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import InitSpec, LayerSpec
from pipeline.models.layers.precision import LEVELS, Level, PathListing, ToFloat, TypeRule
from pipeline.models.layers.tokens import (
    Embedding,
    FirstToken,
    Rotary,
    SelfAttention,
    TiedEmbedding,
)
from pipeline.models.modules.apply_layers import LayerContext, apply_layers
from pipeline.models.modules.network import Network
from tests.models.build import INIT, conf_model, initialise, network, random, shapes

with np.load(Path(__file__).parents[2] / "golden" / "precision" / "levels.npz") as stored:
    GOLDEN = dict(stored)
CELLS = [key for key in GOLDEN if key[:2] in LEVELS]
NORM = {"params": ("scale", "bias"), "batch_stats": ("mean", "var")}

EPSILONS = {"batch_norm": 1e-5, "layer_norm": 1e-7, "group_norm": 1e-5}
"""MindSpore's defaults, which count for values smaller than the golden ones."""
CELL_LAYERS: dict[str, tuple[LayerSpec, ...]] = {
    "conv": (standard.Conv(features=5, kernel=3, bias=True),),
    "conv_transpose": (standard.ConvTranspose(features=5, kernel=2, stride=2, padding="valid"),),
    "dense": (standard.Dense(features=5),),
    "batch_norm": (standard.BatchNorm(),),
    "layer_norm": (standard.LayerNorm(epsilon=1e-5),),
    "group_norm": (standard.GroupNorm(groups=1),),
    "max_pool": (standard.MaxPool(kernel=2),),
    "avg_pool": (standard.AvgPool(kernel=2),),
    **{
        name: (cls(),)
        for name, cls in {
            "relu": standard.Relu,
            "relu6": standard.Relu6,
            "sigmoid": standard.Sigmoid,
            "tanh": standard.Tanh,
            "gelu": standard.Gelu,
        }.items()
    },
    "net": (
        standard.BatchNorm(),
        standard.Conv(features=5, kernel=3, bias=True),
        standard.Relu(),
        standard.Flatten(),
        standard.Dense(features=4, bias=False),
    ),
}


class Stack(nn.Module):
    """Some layers at a level, from float32 to float32; their results may be images."""

    layers: tuple[LayerSpec, ...]
    dtype: str
    rules: tuple[TypeRule, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = InitSpec.model_validate(INIT)
        site = LayerContext((), init, self.dtype, train=False, rules=self.rules)
        read = x if self.rules else x.astype(self.dtype)
        return apply_layers(self.layers, read, site).astype(jnp.float32)


def weights(kind: str) -> dict[str, Any]:
    """The golden's own."""
    norm = {
        collection: {"batch_norm_0": {name: GOLDEN[f"norm/{name}"] for name in names}}
        for collection, names in NORM.items()
    }
    ones = {"scale": np.ones, "bias": np.zeros}
    conv = {"kernel": GOLDEN["conv"], "bias": GOLDEN["bias"]}
    known: dict[str, dict[str, Any]] = {
        "conv": {"params": {"conv_0": conv}},
        "conv_transpose": {"params": {"conv_transpose_0": {"kernel": GOLDEN["transposed"]}}},
        "dense": {"params": {"dense_0": {"kernel": GOLDEN["dense"], "bias": GOLDEN["bias"]}}},
        "batch_norm": norm,
        "layer_norm": {"params": {"layer_norm_0": {k: f(6, "f4") for k, f in ones.items()}}},
        "group_norm": {"params": {"group_norm_0": {k: f(3, "f4") for k, f in ones.items()}}},
        "net": {
            "params": {**norm["params"], "conv_0": conv, "dense_0": {"kernel": GOLDEN["head"]}},
            "batch_stats": norm["batch_stats"],
        },
    }
    return known.get(kind, {})


def is_float16(values: np.ndarray) -> bool:
    """Whether every value is one of float16."""
    return np.array_equal(values, values.astype(np.float16).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("key", CELLS)
def test_layer_at_a_precision_level_has_parity_with_mindspore(key: str) -> None:
    """Values to a few units of the type, and the type itself: float16 has no other values."""
    level, _, kind = key.partition("/")
    precision = LEVELS[level]  # type: ignore[index]
    if kind in EPSILONS:
        assert type(CELL_LAYERS[kind][0]).model_fields["epsilon"].default == EPSILONS[kind]
    stack = Stack(CELL_LAYERS[kind], precision.dtype, precision.rules)
    given = GOLDEN["rows" if kind in ("dense", "layer_norm") else "images"]
    result = np.asarray(stack.apply(weights(kind), given))
    close = 2e-3 if is_float16(GOLDEN[key]) else 1e-5
    np.testing.assert_allclose(result, GOLDEN[key], rtol=close, atol=close)
    assert is_float16(result) == is_float16(GOLDEN[key])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "axes", "epsilon"),
    [
        (standard.LayerNorm(), (3,), 1e-7),
        (standard.GroupNorm(groups=1), (1, 2, 3), 1e-5),
        (standard.BatchNorm(), (0, 1, 2), 1e-5),
    ],
    ids=["layer_norm", "group_norm", "batch_norm"],
)
def test_norms_have_mindspores_epsilon(
    layer: LayerSpec, axes: tuple[int, ...], epsilon: float
) -> None:
    """M-15: on values so small that it counts."""
    images = 1e-3 * random(4, 3, 5, 6)
    module = network(layer, standard.Flatten())
    variables = initialise(module, images)
    found, _ = module.apply(variables, images, train=True, mutable=["batch_stats"])
    wide = images.astype(np.float64)
    deviations = np.sqrt(wide.var(axes, keepdims=True) + epsilon)
    expected = (wide - wide.mean(axes, keepdims=True)) / deviations
    np.testing.assert_allclose(found, expected.reshape(4, -1), rtol=1e-3, atol=1e-4)


BLOCK = (
    standard.Conv(features=4, kernel=3),
    standard.BatchNorm(),
    standard.Relu(),
    standard.Residual(body=(standard.Conv(features=4, kernel=1), standard.BatchNorm())),
    standard.MaxPool(kernel=2),
    standard.GlobalAvgPool(),
    standard.LayerNorm(),
    standard.Dense(features=3),
)


def types(module: Network, images: np.ndarray) -> dict[str, str]:
    """The output of each flax module, by path."""
    found: dict[str, str] = {}

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        if context.method_name == "__call__":
            found["/".join(context.module.path)] = str(result.dtype)
        return result

    variables = shapes(module, images.shape[1:])
    with nn.intercept_methods(note):
        jax.eval_shape(lambda v, x: module.apply(v, x, train=False), variables, images)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype("float32")}
    return found


HALF, SINGLE = "float16", "float32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "conv", "norm", "residual"),
    [
        ("O0", SINGLE, SINGLE, SINGLE),
        ("O1", HALF, SINGLE, SINGLE),
        ("O2", HALF, SINGLE, HALF),
        ("O3", HALF, HALF, HALF),
        ("bf16", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_precision_level_sets_dtypes_by_kind_of_layer(
    level: Level, conv: str, norm: str, residual: str
) -> None:
    precision = LEVELS[level]
    module = network(*BLOCK, dtype=precision.dtype).clone(rules=precision.rules)
    found = types(module, random(2, 4, 4, 2))
    expected = {"conv_0": conv, "dense_0": conv, "batch_norm_0": norm, "layer_norm_0": norm}
    assert {name: found[name] for name in expected} == expected
    assert found["residual_0"] == residual
    assert found[""] == SINGLE


@pytest.mark.slow
def test_last_matching_rule_applies_to_the_matched_layers() -> None:
    """M-07: a cell and all cells in it; everything else computes in float32."""
    by_recipe = (
        "train.to_float=[{pattern: 'residual_*', dtype: float16},"
        "{pattern: '*batch_norm*', dtype: bfloat16}]"
    )
    rules = resolve_precision(load_recipe("lenet5_digits", [by_recipe])).rules
    found = types(network(*BLOCK).clone(rules=rules), random(2, 4, 4, 2))
    assert found["conv_0"] == found["dense_0"] == found["layer_norm_0"] == SINGLE
    assert found["residual_0/conv_0"] == HALF
    assert found["batch_norm_0"] == found["residual_0/batch_norm_0"] == "bfloat16"
    # bfloat16 and float16 added are float32.
    assert found["residual_0"] == SINGLE


@pytest.mark.slow
def test_rule_for_all_layers_equals_a_level() -> None:
    images = random(2, 4, 4, 2)
    by_path = network(*BLOCK).clone(rules=(ToFloat(pattern="*", dtype="float16"),))
    at_level = network(*BLOCK, dtype="float16")
    variables = initialise(at_level, images)
    results = [module.apply(variables, images, train=False) for module in (by_path, at_level)]
    assert np.array_equal(*results)


@pytest.mark.slow
def test_token_numbers_are_not_cast() -> None:
    """4095 is no number of float16."""
    stack = (Embedding(vocabulary=4096, features=4), SelfAttention(heads=2), FirstToken())
    module = network(*stack, standard.Dense(features=2))
    numbers = np.array([[[[4095.0]], [[2049.0]]]], np.float32)
    variables = initialise(module, numbers)
    expected = module.apply(variables, numbers, train=False)
    precision = LEVELS["O2"]
    half = module.clone(dtype=precision.dtype, rules=precision.rules)
    result = half.apply(variables, numbers, train=False)
    np.testing.assert_allclose(result, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "bf16"])
def test_decoder_supports_every_precision_level(level: Level) -> None:
    """O1 computes the dense layers of a gated MLP in float16, and its product in float32."""
    rotary = SelfAttention(
        heads=4, key_heads=2, causal=True, rotary=Rotary(), query_key_norm=True, window=4
    )
    sloped = SelfAttention(heads=4, causal=True, alibi=True)
    norm, mlp = standard.RmsNorm(), standard.GatedMlp(hidden=24)
    body = (norm, rotary, norm, mlp, sloped, standard.SquaredRelu())
    module = network(TiedEmbedding(vocabulary=300, features=16, body=body))
    numbers = np.arange(280, 290, dtype=np.int32).reshape(2, 5)
    variables = initialise(module, numbers)
    expected = module.apply(variables, numbers, train=False)
    precision = LEVELS[level]
    typed = module.clone(dtype=precision.dtype, rules=precision.rules)
    found = types(typed, numbers)
    half = "bfloat16" if level == "bf16" else HALF
    others = SINGLE if level == "O1" else half
    assert {found[f"tied_embedding_0/{name}"] for name in ("rms_norm_0", "gated_mlp_0")} == {others}
    result = typed.apply(variables, numbers, train=False)
    assert result.dtype == np.float32
    assert not np.array_equal(result, expected)
    spread = float(np.abs(expected).max())
    np.testing.assert_allclose(result, expected, atol=0.05 * spread)


def test_layer_paths_are_all_listed() -> None:
    listing = PathListing()
    module = network(*BLOCK).clone(rules=(listing,))
    jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=False), random(1, 4, 4, 2))
    names = ["/".join(path) for path in listing.paths]
    assert names[:5] == [
        "conv_0",
        "batch_norm_0",
        "relu_0",
        "residual_0",
        "residual_0/conv_0",
    ]
    assert names[-1] == "dense_0"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_wide_and_deep_supports_every_precision_level(level: Level) -> None:
    """Its dense layers are layers of a list, too; its tables are looked up in float32."""
    spec = conf_model("wide_deep", vocabulary=300, hidden=[8])
    numbers = np.arange(12, dtype=np.int32).reshape(3, 4)
    samples = {"field_index": numbers, "field_value": np.ones((3, 4), np.float32)}
    module = spec.build(2, "float32")
    variables = initialise(module, samples)
    expected = module.apply(variables, samples, train=False)
    precision = LEVELS[level]
    typed = module.clone(dtype=precision.dtype, rules=precision.rules)
    result = typed.apply(variables, samples, train=False)
    assert result.dtype == np.float32
    assert not np.array_equal(result, expected)
    np.testing.assert_allclose(result, expected, atol=2e-3)
