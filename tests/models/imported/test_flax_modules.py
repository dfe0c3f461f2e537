"""Modules of flax as networks of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from pipeline.models.imported.with_lowerings import with_lowerings
from pipeline.models.lowerings.problem import RecordingPolicy
from tests.models.build import QUICK, draw_variables, initialise, parameters, random, shapes
from tests.models.imported.imported_networks import ConvNet, NnxNet

Build = Callable[..., Any]
IMAGES = random(4, 8, 8, 1)


def train(module: nn.Module, variables: Any, key: Any = 1) -> tuple[Any, Any]:
    """Logits and statistics of a step of training."""
    rngs = {"dropout": jax.random.key(key)}
    logits, changed = module.apply(
        variables, IMAGES, train=True, mutable=["batch_stats"], rngs=rngs
    )
    return logits, changed.get("batch_stats", {})


def compile_train(module: nn.Module) -> Callable[..., tuple[Any, Any]]:
    """The step as a program of variables and a key."""
    return jax.jit(partial(train, module), compiler_options=QUICK)


def compile_evaluation(module: nn.Module) -> Callable[[Any], Any]:
    """Logits in evaluation as a program of variables."""
    return jax.jit(
        lambda variables: module.apply(variables, IMAGES, train=False), compiler_options=QUICK
    )


@pytest.mark.medium
def test_linen_module_keeps_its_names_and_results(imported: Build) -> None:
    module, own = imported("flax", "ConvNet", width=4), ConvNet(width=4)
    variables = draw_variables(shapes(module, IMAGES.shape[1:]))
    expected = jax.eval_shape(lambda: own.init(jax.random.key(0), IMAGES, False))
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, expected)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(variables: Any) -> tuple[Any, Any]:
        return own.apply(variables, IMAGES, False), own.apply(
            variables, IMAGES, True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)}
        )

    expected_logits, (_, changed) = compute(variables)
    logits = compile_evaluation(module)(variables)
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-5, atol=1e-5)
    _, statistics = compile_train(module)(variables)
    for ours, theirs in zip(
        jax.tree.leaves(statistics), jax.tree.leaves(changed["batch_stats"]), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"), [("ConvNet", {}), ("Untyped", {}), ("NnxNet", {"width": 4})]
)
def test_dropout_depends_on_the_key_only_in_training(
    name: str, arguments: dict[str, Any], imported: Build
) -> None:
    module = imported("flax", name, **arguments)
    variables = draw_variables(shapes(module, IMAGES.shape[1:]))
    step = compile_train(module)
    first, again, other = (step(variables, key)[0] for key in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    evaluation = compile_evaluation(module)
    np.testing.assert_array_equal(evaluation(variables), evaluation(variables))


@pytest.mark.medium
def test_module_fields_are_set_by_the_recipe(imported: Build) -> None:
    module = imported("flax", "Untyped", hidden=[3, 5])
    found = {path: leaf.shape for path, leaf in parameters(shapes(module, (2, 2, 1))).items()}
    assert found["Dense_0/kernel"] == (4, 3)
    assert found["Dense_1/kernel"] == (3, 5)
    assert found["Dense_2/kernel"] == (5, 10), "the number of classes, which nothing else gives"


def test_classes_placeholder_is_replaced_at_any_depth(imported: Build) -> None:
    module = imported("flax", "Untyped", hidden=["$classes", 3], classes="$classes")
    found = {path: leaf.shape for path, leaf in parameters(shapes(module, (2, 2, 1))).items()}
    assert found["Dense_0/kernel"] == (4, 10)
    assert found["Dense_2/kernel"] == (3, 10)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "arguments"), [("ConvNet", {}), ("Untyped", {}), ("NnxNet", {"width": 4})]
)
def test_layers_all_compute_in_the_dtype_of_the_recipe(
    name: str, arguments: dict[str, Any], dtype: str, imported: Build
) -> None:
    module = imported("flax", name, dtype, **arguments)
    recording = RecordingPolicy()
    variables = shapes(module, (8, 8, 1))
    lowered = with_lowerings(lambda variables: train(module, variables), recording)
    logits, changed = jax.eval_shape(lowered, variables)
    assert {problem.dtype for problem in recording.problems} == {dtype}
    kept = {leaf.dtype for leaf in jax.tree.leaves((variables, logits, changed))}
    assert kept == {jnp.dtype("float32")}


@pytest.mark.slow
def test_nnx_module_keeps_its_results_and_statistics(imported: Build) -> None:
    module = imported("flax", "NnxNet", width=4)
    variables = initialise(module, IMAGES)
    assert sorted(parameters(variables))[:2] == ["blocks/0/bias", "blocks/0/kernel"]
    own = NnxNet(4, 10, rngs=nnx.Rngs(0))
    for number in (0, 1):
        for leaf in ("kernel", "bias"):
            value = variables["params"]["blocks"][str(number)][leaf]
            getattr(own.blocks[number], leaf)[...] = value
    for leaf in ("kernel", "bias"):
        getattr(own.out, leaf)[...] = variables["params"]["out"][leaf]
    own.eval()
    logits = module.apply(variables, IMAGES, train=False)
    np.testing.assert_allclose(logits, own(IMAGES), rtol=1e-5, atol=1e-5)
    own.train()
    own(IMAGES)
    _, statistics = train(module, variables)
    np.testing.assert_allclose(statistics["norm"]["mean"], own.norm.mean[...], rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_nnx_weights_depend_on_the_seed(imported: Build) -> None:
    module = imported("flax", "NnxNet", width=4)
    draw = jax.jit(
        lambda key: module.init(key, IMAGES, train=False)["params"]["out"]["kernel"],
        compiler_options=QUICK,
    )
    first, again, other = (draw(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("ConvNet", {"widht": 3}, "unexpected keyword argument 'widht'; its parameters are width"),
        ("Caching", {}, "has variables in the collection cache; must have only params and"),
        ("Summing", {}, "imported_networks:Summing: returns tuple; must return only logits"),
        ("Faulty", {}, "imported_networks.py, line .*: AttributeError: .*flat_images"),
        ("Halved", {}, "parameter Dense_0/bias is bfloat16; must be float32"),
        ("perceptron", {}, "makes a tuple; must make a flax module"),
        ("number", {}, "makes a int; must make a flax module"),
    ],
)
def test_untrainable_modules_are_refused(
    name: str, arguments: dict[str, Any], said: str, imported: Build
) -> None:
    with pytest.raises(ValueError, match=said):
        shapes(imported("flax", name, **arguments), (8, 8, 1))


@pytest.mark.slow
@pytest.mark.parametrize("names", [("x", "mask"), ("mask", "x"), ("first", "second")])
def test_several_inputs_are_passed_by_name_or_by_position(
    names: tuple[str, str], imported: Build
) -> None:
    """Names of the signature, in any order; other names by position."""
    module = imported("flax", "Masked")
    values = {"x": np.ones((2, 3), np.float32), "mask": np.array([[1, 0, 1]] * 2, np.float32)}
    inputs = dict(zip(names, values.values(), strict=True))
    if "mask" in names:
        inputs = {name: values[name] for name in names}
    variables = module.init(jax.random.key(0), inputs, train=False)
    logits = module.apply(variables, inputs, train=False)
    kernel = variables["params"]["Dense_0"]["kernel"]
    np.testing.assert_allclose(logits, (values["x"] * values["mask"]) @ kernel, rtol=1e-6)
