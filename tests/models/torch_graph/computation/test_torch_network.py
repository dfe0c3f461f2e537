"""The flax module: its weights, dropout, precision and lowerings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax import export

from pipeline.models.layers.precision import KindRule, PathListing, ToFloat
from pipeline.models.lowerings.problem import DEFAULTS, ConvolutionProblem, RecordingPolicy
from pipeline.models.torch_graph.computation.torch_network import (
    initial_variables_of,
    order_samples,
)
from pipeline.models.torch_graph.graph import SampleSpec
from pipeline.models.torch_graph.operator_table import (
    IMAGE_ORDERS,
    NHWC,
    OPERATORS,
    OperatorContext,
    TorchTensor,
    to_tensor,
)
from tests.models.torch_graph.golden_graphs import (
    NAMES,
    golden_graph,
    golden_results,
    network_of,
)

IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(4, 12, 12, 3)), jnp.float32)


def train_logits(name: str, key: int = 0, **fields: Any) -> Any:
    """Logits in training, with a key for dropout."""
    graph = golden_graph(name)
    logits, _ = network_of(graph, **fields).apply(
        initial_variables_of(graph),
        IMAGES,
        train=True,
        mutable=["batch_stats"],
        rngs={"dropout": jax.random.key(key)},
    )
    return logits


def test_initial_weights_equal_module_weights() -> None:
    graph = golden_graph("mobile")
    network = network_of(graph)
    drawn = jax.jit(lambda key: network.init(key, IMAGES[:1], train=False))(jax.random.key(0))
    own, theirs = (flatten_dict(v, sep="/") for v in (drawn, initial_variables_of(graph)))
    assert set(own) == set(theirs)
    assert "params/stem/0/kernel" in own
    assert "batch_stats/stem/1/var" in own
    for path, array in own.items():
        np.testing.assert_array_equal(array, theirs[path])


@pytest.mark.slow
def test_dropout_depends_on_the_key() -> None:
    first, again, other = (np.asarray(train_logits("dropped", key)) for key in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


@pytest.mark.medium
@pytest.mark.parametrize("name", ["dropout", "feature_dropout"])
def test_dropout_drops_the_same_values_in_both_layouts(name: str) -> None:
    dropped = []
    for layout, order in IMAGE_ORDERS.items():
        context = OperatorContext("float32", DEFAULTS, layout, lambda: jax.random.key(0))
        x = TorchTensor(TorchTensor(IMAGES, NHWC).transpose(order), order)
        dropped.append(OPERATORS[f"aten.{name}.default"](context, x, 0.5, True).plain())
    np.testing.assert_array_equal(*dropped)
    assert 0.1 < float((dropped[0] == 0).mean()) < 0.9


def test_chwn_supports_only_graphs_of_images() -> None:
    """Patches become tokens, and channels in groups or shuffled have no formula in CHWN."""
    able = {name for name in NAMES if network_of(golden_graph(name)).can_be_batch_last(())}
    assert able == {"residual"}
    assert network_of(golden_graph("twoconvs")).can_be_batch_last(())


@pytest.mark.parametrize("count", [1, 3, 4])
def test_network_of_one_batch_size_evaluates_any_number_of_samples(count: int) -> None:
    """One sample initialises a network, and `infer` reads as many as come."""
    graph = golden_graph("residual")
    name, spec = next(iter(graph.inputs.items()))
    fixed = replace(graph, inputs={name: replace(spec, shape=(3, *spec.shape[1:]))})
    variables = initial_variables_of(graph)
    of_three, of_any = (
        network_of(g).apply(variables, IMAGES[:count], train=False) for g in (fixed, graph)
    )
    np.testing.assert_allclose(of_three, of_any, rtol=1e-5, atol=1e-6)
    if count != 3:
        with pytest.raises(ValueError, match=f"a batch has {count} samples; must have 3 for this"):
            network_of(fixed).apply(variables, IMAGES[:count], train=True, mutable=["batch_stats"])


def test_sizes_that_are_unknown_during_an_export_are_numbers() -> None:
    """Rows are numbered by the batch size, and a slice ends at torch's greatest number."""
    context = OperatorContext("float32", DEFAULTS, "nhwc", None)

    def compute(name: str, *arguments: Any) -> Any:
        return OPERATORS[name](context, *arguments)

    def apply(x: Any) -> Any:
        batch = x.shape[0]
        rows = compute("aten.arange.default", batch)
        twice = compute("aten.index.Tensor", to_tensor(jnp.concatenate([x, x])), (rows,))
        doubled = compute("aten.arange.start_step", 0, 2 * batch, 2)
        halved = compute("aten.slice.Tensor", doubled, 0, 0, sys.maxsize, 2)
        root = compute("sym.sym_sqrt", batch) + compute("sym.sym_float", batch)
        return twice.plain(), doubled.plain(), halved.plain(), jnp.float32(root)

    (batch,) = export.symbolic_shape("batch")
    sample = jax.ShapeDtypeStruct((batch, 2), jnp.float32)
    x = jnp.arange(10.0).reshape(5, 2)
    exported = export.export(jax.jit(apply))(sample).call(x)
    expected = (x, jnp.arange(0, 10, 2), jnp.asarray([0, 4, 8]), jnp.float32(5**0.5 + 5))
    for results in (exported, apply(x)):
        assert [r.dtype for r in results] == [jnp.float32, jnp.int32, jnp.int32, jnp.float32]
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-6)


def test_dropout_draws_only_in_training() -> None:
    """Two dropouts of one shape do not drop the same places."""
    from pipeline.models.torch_graph.operators.known_operators import draws

    graph = golden_graph("dropped")
    drawing = [node.op for node in graph.training.nodes if draws(node)]
    assert drawing == ["aten.bernoulli.p"]
    assert not any(draws(node) for node in graph.evaluation.nodes)


def test_convolutions_products_and_pools_use_the_policy() -> None:
    listing = RecordingPolicy()
    graph = golden_graph("residual")
    network = network_of(graph).clone(policy=listing)
    jax.eval_shape(lambda v: network.apply(v, IMAGES, train=False), initial_variables_of(graph))
    kinds = [type(problem).__name__ for problem in listing.problems]
    forward = {kind: kinds.count(kind) for kind in kinds}
    assert forward["ConvolutionProblem"] == 3 * 3
    assert forward["DenseProblem"] == 3
    assert forward["PoolingProblem"] == 2


def test_transposed_convolutions_use_the_policy() -> None:
    listing = RecordingPolicy()
    graph = golden_graph("buffers")
    network = network_of(graph, policy=listing)
    jax.eval_shape(lambda v: network.apply(v, IMAGES, train=False), initial_variables_of(graph))
    convolutions = sum(node.op.startswith("aten.conv") for node in graph.evaluation.nodes)
    problems = [p for p in listing.problems if isinstance(p, ConvolutionProblem)]
    assert len(problems) == 3 * convolutions
    text = str(
        jax.make_jaxpr(lambda v: network_of(graph).apply(v, IMAGES, train=False))(
            initial_variables_of(graph)
        )
    )
    assert text.count("conv_general_dilated[") == convolutions


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_have_the_recipe_dtype(dtype: str) -> None:
    graph, theirs = golden_graph("mobile"), golden_results("mobile")
    network = network_of(graph, dtype=dtype)
    variables = initial_variables_of(graph)
    jaxpr = str(jax.make_jaxpr(lambda v, x: network.apply(v, x, train=False))(variables, IMAGES))
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    convolutions = [line for line in jaxpr.splitlines() if "conv_general_dilated" in line]
    assert convolutions
    assert all(f":{short}[" in line for line in convolutions)
    logits = network.apply(variables, theirs["images"], train=False)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, theirs["logits"], atol=0.05)


BIASES = {"mobile": ("depthwise", 0.01), "shuffle": ("stem", 0.04), "patches": ("mlp/0", 0.01)}
"""By network, a layer with a bias, and the error of its gradients in bfloat16."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASES)
def test_gradients_of_biases_are_summed_in_float32(name: str) -> None:
    """In bfloat16 the sums over 256 images were wrong by 1 to 30 % of the largest gradient."""
    graph = golden_graph(name)
    variables = initial_variables_of(graph)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(256, *golden_results(name)["images"].shape[1:])).astype(np.float32)

    def gradients_in(dtype: str) -> Callable[[Any], Any]:
        network = network_of(graph, dtype=dtype)

        def loss_of(params: Any) -> Any:
            inputs = variables | {"params": params}
            logits, _ = network.apply(inputs, images, train=True, mutable=["batch_stats"])
            return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

        return jax.grad(loss_of)

    exact = flatten_dict(jax.jit(gradients_in("float32"))(variables["params"]), sep="/")
    # Not compiled as one program, in which XLA may sum wider than it is asked to.
    rounded = flatten_dict(gradients_in("bfloat16")(variables["params"]), sep="/")
    layer, error = BIASES[name]
    for path in (f"{layer}/bias", f"{layer}/kernel"):
        largest = float(jnp.abs(exact[path]).max())
        np.testing.assert_allclose(rounded[path], exact[path], rtol=0, atol=error * largest)


def test_dtype_rules_apply_to_graph_nodes() -> None:
    rules = (KindRule(frozenset({"conv"}), "float16"), ToFloat(pattern="head", dtype="bfloat16"))
    listing = PathListing()
    graph = golden_graph("mobile")
    variables = initial_variables_of(graph)
    network = network_of(graph, rules=(*rules, listing))
    text = str(jax.make_jaxpr(lambda v, x: network.apply(v, x, train=False))(variables, IMAGES))
    assert ("depthwise",) in listing.paths
    assert ("stem", "0") in listing.paths
    assert "f16[4,6,6,8] = conv_general_dilated" in text.replace("\n", "")
    assert "bf16[4,3]" in text


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ((), ["tokens", "mask"]),
        (("tokens", "mask"), ["tokens", "mask"]),
        (("mask", "tokens"), ["mask", "tokens"]),
        (("tokens",), ["tokens", "mask"]),
    ],
)
def test_several_inputs_are_in_the_order_of_the_recipe(
    order: tuple[str, ...], expected: list[str]
) -> None:
    # As jax sorts a dictionary.
    samples = [SampleSpec((4,), "bool", "mask"), SampleSpec((4,), "int32", "tokens")]
    assert [sample.name for sample in order_samples(samples, order)] == expected
