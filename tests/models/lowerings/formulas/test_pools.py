"""Every lowering of max pooling against the default and what it derives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.lowerings.candidates import compute, list_candidates
from pipeline.models.lowerings.formulas.pools import POOLINGS
from pipeline.models.lowerings.lowered_layers import max_pool, pool_max
from pipeline.models.lowerings.problem import (
    Engine,
    Lowering,
    Lowerings,
    Pair,
    PoolingProblem,
    RecordingPolicy,
    Role,
)

BOTH: frozenset[Engine] = frozenset(("xla", "onednn"))
ROLES: tuple[Role, ...] = ("forward", "input_grad")
SHAPE = (4, 9, 8, 3)
Geometry = tuple[Pair, Pair, tuple[Pair, Pair]]
GEOMETRIES: tuple[Geometry, ...] = (
    ((2, 2), (2, 2), ((0, 0), (0, 0))),
    ((3, 3), (2, 2), ((0, 1), (1, 1))),
    ((3, 2), (1, 3), ((0, 0), (0, 0))),
    ((3, 3), (1, 1), ((1, 1), (1, 1))),
)


def few_values(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """With many ties, in which lowerings must not differ either."""
    return jnp.asarray(np.random.default_rng(0).integers(-3, 3, shape), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("geometry", "dtype"),
    [
        *((each, "float32") for each in GEOMETRIES),
        *((each, "bfloat16") for each in GEOMETRIES[::2]),
        *((each, "float16") for each in GEOMETRIES[1::2]),
    ],
)
def test_max_pool_lowerings_equal_the_default(geometry: Geometry, dtype: str) -> None:
    """Bit for bit: a maximum rounds nothing, and what is added up is the same in each."""
    images = few_values(SHAPE, dtype)
    y, pull = jax.vjp(lambda images: max_pool(images, *geometry), images)
    cotangent = few_values(y.shape, dtype)
    reads = {"forward": (images,), "input_grad": (images, cotangent)}
    expected = {"forward": y, "input_grad": pull(cotangent)[0]}
    for role in ROLES:
        problem = PoolingProblem(role, SHAPE, *geometry, dtype)
        assert tuple(array.shape for array in reads[role]) == problem.operand_shapes
        for lowering in (*list_candidates(problem, BOTH), *chunked(role)):
            result = compute(problem, lowering, reads[role])
            assert result.dtype == dtype
            np.testing.assert_array_equal(
                result, expected[role], err_msg=f"{lowering} of {problem}"
            )


def chunked(role: Role) -> list[Lowering]:
    """By a few images, which are too small here to be tried so."""
    families = POOLINGS[role].items()
    return [Lowering(name, images=2) for name, family in families if family.chunked]


def test_candidates_for_large_images_include_chunks() -> None:
    problem = PoolingProblem("forward", (8, 64, 64, 32), *GEOMETRIES[0], "float32")
    lowerings = [str(lowering) for lowering in list_candidates(problem, BOTH)]
    assert lowerings == ["axes/xla", "axes/xla/1", "axes/xla/2", "axes/xla/4", "reduced/xla"]
    assert str(problem) == (
        "max_pool forward 8x64x64x32 window 2x2 stride 2x2 pads 0+0,0+0 float32"
    )


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_max_pool_uses_the_chosen_lowering(role: Role) -> None:
    images, geometry = few_values(SHAPE, "float32"), GEOMETRIES[1]
    listing = RecordingPolicy()
    pool_max(images, *geometry, listing)
    problems = [PoolingProblem(role, SHAPE, *geometry, "float32") for role in ROLES]
    assert list(listing.problems) == problems
    lowering = Lowering("reduced") if role == "forward" else Lowering("axes", images=2)
    chosen = Lowerings(((str(problems[ROLES.index(role)]), lowering),))

    def loss(images: jax.Array, policy: Lowerings) -> jax.Array:
        return jnp.sin(pool_max(images, *geometry, policy)).sum()

    ours, default = (jax.value_and_grad(loss)(images, how) for how in (chosen, Lowerings()))
    np.testing.assert_array_equal(ours[0], default[0])
    np.testing.assert_allclose(ours[1], default[1], rtol=1e-6)
    text = str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(images, chosen))
    assert ("reduce_window" in text) is (role == "forward")
    assert ("scan" in text) is (role == "input_grad")
