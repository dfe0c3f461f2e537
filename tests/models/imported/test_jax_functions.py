"""Plain JAX functions as networks of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.models.build import initialise, parameters, random, shapes
from tests.models.imported.imported_networks import perceptron

Build = Callable[..., Any]
IMAGES = random(4, 8, 8, 1)


@pytest.mark.medium
def test_parameters_are_named_by_their_pytree_path(imported: Build) -> None:
    module = imported("function", "perceptron", width=3)
    found = {path: leaf.shape for path, leaf in parameters(shapes(module, (2, 2, 1))).items()}
    assert found == {"0/0": (4, 3), "0/1": (3,), "1/0": (3, 10), "1/1": (10,)}


@pytest.mark.slow
def test_apply_receives_parameters_as_returned_by_init(imported: Build) -> None:
    module = imported("function", "perceptron", width=3)
    variables = initialise(module, IMAGES)
    _, apply = perceptron(10, 3)
    flat = parameters(variables)
    params = [(flat["0/0"], flat["0/1"]), (flat["1/0"], flat["1/1"])]
    expected = apply(params, IMAGES, False, jax.random.key(0))
    logits = module.apply(variables, IMAGES, train=False)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    module = imported("function", "perceptron", width=300)
    variables = initialise(module, IMAGES)
    first, second = (
        module.apply(variables, IMAGES, train=True, rngs={"dropout": jax.random.key(key)})
        for key in (0, 1)
    )
    assert not np.array_equal(first, second)


@pytest.mark.medium
def test_haiku_argument_order_is_supported(imported: Build) -> None:
    module = imported("function", "transformed")
    variables = initialise(module, IMAGES)
    weight = parameters(variables)["linear/w"]
    logits = module.apply(variables, IMAGES, train=False)
    np.testing.assert_allclose(logits, IMAGES.mean((1, 2)) @ weight, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_haiku_state_is_carried_as_statistics(imported: Build) -> None:
    """As `haiku.transform_with_state` returns it; evaluation leaves it as it is."""
    module = imported("function", "transformed_with_state")
    variables = initialise(module, IMAGES)
    rngs = {"dropout": jax.random.key(0)}
    logits, changed = module.apply(
        variables, IMAGES, train=True, mutable=["batch_stats"], rngs=rngs
    )
    x = IMAGES.mean((1, 2))
    mean = changed["batch_stats"]["norm"]["mean"]
    np.testing.assert_allclose(mean, 0.1 * x.mean(0), rtol=1e-5)
    weight = parameters(variables)["linear/w"]
    np.testing.assert_allclose(logits, (x - mean) @ weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("perceptron", {"depth": 3}, "unexpected keyword argument 'depth'; its parameters are"),
        ("perceptron", {"width": "wide"}, "imported_networks.py, line .*: TypeError"),
        ("ConvNet", {}, "is a flax module; must be used by model=flax"),
        ("number", {}, r"must return \(init, apply\) or an object with these"),
        ("transformed", {"width": 3}, "has init and apply; arguments must be {}"),
        ("keyless", {}, "apply: must accept params and inputs, .* no parameter for inputs"),
    ],
)
def test_invalid_function_pairs_are_refused(
    name: str, arguments: dict[str, Any], said: str, imported: Build
) -> None:
    with pytest.raises(ValueError, match=said):
        shapes(imported("function", name, **arguments), (8, 8, 1))
