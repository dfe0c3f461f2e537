"""Shampoo against its algorithm in numpy float64, with LAPACK's eigenvectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.optimizers.kronecker_transforms import from_blocks, to_blocks
from pipeline.training.optimizers.layerwise import Shampoo
from tests import outcome
from tests.training.optimizers.test_kronecker_transforms import gradient_at, some_params
from tests.whole_run import run

LR, DECAY, B1, B2, EPS, GRAFT_EPS, PERIOD, BLOCK, STEPS = 0.02, 0.1, 0.9, 0.8, 1e-3, 1e-4, 4, 4, 50
SHAMPOO = Shampoo(
    lr=LR, weight_decay=DECAY, decay_rules=(), b1=B1, b2=B2, eps=EPS, graft_eps=GRAFT_EPS,
    period=PERIOD, block=BLOCK,
)  # fmt: skip


def compute_root(factor: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(factor)
    return (vectors * (np.maximum(values, 0) + EPS) ** -0.25) @ vectors.T


def shampoo(p: np.ndarray) -> list[np.ndarray]:
    """Parameters after each of the updates, block by block without padding."""
    shape = p.shape
    matrix = p.reshape(-1, shape[-1]) if p.ndim > 1 else p[:, None]
    p = matrix
    places = [
        np.s_[row : row + BLOCK, column : column + BLOCK]
        for row in range(0, p.shape[0], BLOCK)
        for column in range(0, p.shape[1], BLOCK)
    ]
    left = [np.zeros((len(p[place]),) * 2) for place in places]
    right = [np.zeros((p[place].shape[1],) * 2) for place in places]
    roots: list[tuple[np.ndarray, np.ndarray]] = []
    m = v = np.zeros_like(p)
    result = []
    for t in range(1, STEPS + 1):
        g = gradient_at(p, t, np.sin)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        mean = m / (1 - B1**t)
        adam = mean / (np.sqrt(v / (1 - B2**t)) + GRAFT_EPS)
        direction = adam.copy()
        if len(shape) > 1:
            for number, place in enumerate(places):
                left[number] = B2 * left[number] + (1 - B2) * g[place] @ g[place].T
                right[number] = B2 * right[number] + (1 - B2) * g[place].T @ g[place]
            if t % PERIOD == 0:
                scale = 1 - B2**t
                roots = [
                    (compute_root(one / scale), compute_root(other / scale))
                    for one, other in zip(left, right, strict=True)
                ]
            for place, (one, other) in zip(places, roots, strict=False):
                turned = one @ mean[place] @ other
                norms = np.linalg.norm(adam[place]), np.linalg.norm(turned)
                direction[place] = turned * norms[0] / norms[1]
        p = p - LR * (direction + DECAY * p)
        result.append(p.reshape(shape))
    return result


@pytest.mark.slow
def test_fifty_updates_match_the_algorithm_in_float64() -> None:
    optimizer, params = SHAMPOO.build(), jax.tree.map(jnp.float32, some_params())
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, t):
        gradients = jax.tree.map(lambda p: gradient_at(p, t, jnp.sin), params)
        directions, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, d: p - LR * d, params, directions), state

    expected = {name: shampoo(p) for name, p in some_params().items()}
    for t in range(1, STEPS + 1):
        params, state = step(params, state, t)
        for name, p in params.items():
            np.testing.assert_allclose(p, expected[name][t - 1], atol=2e-4, err_msg=f"{name} {t}")


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 9), (4, 4), (1, 11)])
def test_blocks_are_put_together_again(shape: tuple[int, ...]) -> None:
    array = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    blocks = to_blocks(array, 4)
    assert max(blocks.shape[1:]) <= 4
    np.testing.assert_array_equal(from_blocks(blocks, array, 4), array)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["data", "fsdp"])
def test_two_devices_have_the_bits_of_one(mode: str, tiny: Any, tmp_path: Path) -> None:
    """Each computes all roots: of whole arrays, also if a device keeps a part of them."""
    keys = ["optimizer=shampoo", "train.optimizer.period=2", "train.optimizer.block=8"]
    keys += ["model=mlp", "model.hidden=[20]", "train.steps=6", "checkpoint.every_steps=6"]
    for count, layout in ((1, "data"), (2, mode)):
        places = [f"parallel.mode={layout}", f"parallel.devices={count}"]
        assert run(tiny(*keys, *places), tmp_path / str(count)).status == "done"
    one, two = tmp_path / "1", tmp_path / "2"
    assert outcome.metrics(two) == outcome.metrics(one)
    arrays = outcome.arrays(one)
    assert any("roots" in path for path in arrays)
    outcome.assert_equal_arrays(outcome.arrays(two), arrays)
