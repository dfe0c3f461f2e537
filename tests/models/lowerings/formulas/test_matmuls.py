"""Every lowering of a dense layer's products against numpy, and what a network takes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.lowerings.candidates import compute, list_candidates
from pipeline.models.lowerings.formulas.matmuls import PRODUCTS
from pipeline.models.lowerings.lowered_layers import multiply_dense
from pipeline.models.lowerings.problem import (
    ROLES,
    DenseProblem,
    Engine,
    Lowering,
    Lowerings,
    RecordingPolicy,
    Role,
    to_file_name,
)
from tests.models.lowerings.engines import engines_here

TOLERANCE = {"float32": 2e-6, "bfloat16": 0.01, "float16": 1e-3}
"""Of the largest value: the result alone is rounded."""
BATCH, CHANNELS, FEATURES = 6, 17, 10
BOTH: frozenset[Engine] = frozenset(("xla", "onednn"))


def matrices(dtype: str) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {
        "inputs": (BATCH, CHANNELS),
        "kernel": (CHANNELS, FEATURES),
        "cotangent": (BATCH, FEATURES),
    }
    made = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
    return {name: np.asarray(jnp.asarray(array, dtype)) for name, array in made.items()}


def exact(role: Role, m: dict[str, np.ndarray]) -> np.ndarray:
    inputs, kernel, cotangent = (m[name].astype(np.float64) for name in m)
    results = {
        "forward": inputs @ kernel,
        "input_grad": cotangent @ kernel.T,
        "weight_grad": inputs.T @ cotangent,
    }
    return results[role]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "dtype"), [(role, dtype) for role in ROLES for dtype in TOLERANCE]
)
def test_dense_lowerings_equal_the_product(role: Role, dtype: str) -> None:
    m, problem = matrices(dtype), DenseProblem(role, BATCH, CHANNELS, FEATURES, dtype)
    reads = {
        "forward": ("inputs", "kernel"),
        "input_grad": ("kernel", "cotangent"),
        "weight_grad": ("inputs", "cotangent"),
    }
    operands = [m[name] for name in reads[role]]
    assert tuple(operand.shape for operand in operands) == problem.operand_shapes
    truth = exact(role, m)
    for lowering in list_candidates(problem, engines_here(dtype)):
        result = jax.jit(lambda a, b, lowering=lowering: compute(problem, lowering, (a, b)))(
            *operands
        )
        assert result.dtype == dtype
        error = np.abs(np.asarray(result, np.float64) - truth).max()
        assert error <= TOLERANCE[dtype] * np.abs(truth).max(), f"{lowering} of {problem}: {error}"


@pytest.mark.parametrize("role", ROLES)
def test_candidates_start_with_the_product_and_have_every_family(role: Role) -> None:
    problem = DenseProblem(role, BATCH, CHANNELS, FEATURES, "float32")
    lowerings = list_candidates(problem, BOTH)
    assert lowerings[0] == Lowering("product")
    assert {lowering.family for lowering in lowerings} == set(PRODUCTS[role])
    assert str(problem) == f"dense {to_file_name(role)} 6x17 kernel 17x10 float32"


def test_token_products_are_posed_with_all_rows() -> None:
    listing = RecordingPolicy()
    x, kernel = (
        jax.ShapeDtypeStruct((2, 3, 4), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 5), jnp.bfloat16),
    )
    jax.eval_shape(lambda x, k: multiply_dense(x, k, listing), x, kernel)
    assert list(listing.problems) == [DenseProblem(role, 6, 4, 5, "bfloat16") for role in ROLES]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(BATCH, CHANNELS), (2, 3, CHANNELS)])
@pytest.mark.parametrize("role", ROLES)
def test_choice_for_one_role_does_not_change_results(role: Role, shape: tuple[int, ...]) -> None:
    """Values and gradients equal the default's, whichever of the three is chosen."""
    m = matrices("float32")
    inputs, cotangent = m["inputs"].reshape(shape), m["cotangent"].reshape(*shape[:-1], -1)
    problem = DenseProblem(role, BATCH, CHANNELS, FEATURES, "float32")
    chosen = Lowerings(((str(problem), Lowering("transposed")),))

    def results(policy: Lowerings) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda x, k: multiply_dense(x, k, policy), inputs, m["kernel"])
        return y, *pull(cotangent)

    for ours, default in zip(results(chosen), results(Lowerings()), strict=True):
        np.testing.assert_allclose(ours, default, rtol=1e-5, atol=1e-5)
