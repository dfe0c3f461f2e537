"""LARS, LAMB and Muon against numpy in float64 (L-03)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.optimizers.layerwise import Lamb, Lars, Muon

LR, DECAY, STEPS = 0.1, 0.1, 6
COMMON = {"lr": LR, "weight_decay": DECAY, "decay_rules": ()}
LARS = Lars(**COMMON, momentum=0.9, nesterov=False, trust=0.02, eps=1e-3)
LAMB = Lamb(**COMMON, b1=0.9, b2=0.8, eps=1e-4)
MUON = Muon(**COMMON, momentum=0.9, nesterov=False, iterations=5, rms=0.2, b1=0.8, b2=0.9, eps=1e-8)

Arrays = dict[str, np.ndarray]


def some_params() -> Any:
    rng = np.random.default_rng(7)
    return {
        "conv_0": {"bias": rng.normal(size=4), "kernel": rng.normal(size=(3, 2, 2, 4))},
        "dense_0": {"kernel": rng.normal(size=(6, 3))},
        "token_0": {"embedding": rng.normal(size=(5, 4))},
    }


def gradients_at(params: Any) -> Any:
    return jax.tree.map(lambda p: np.sin(3 * p) + 0.2, params)


def assert_steps(spec: Any, direction: Any) -> None:
    """The spec's parameters against those that the numpy rule gives, step by step."""
    optimizer, ours = spec.build(), jax.tree.map(jnp.float32, some_params())
    state, update = optimizer.init(ours), jax.jit(optimizer.update)
    theirs, memory = some_params(), jax.tree.map(lambda p: {}, some_params())
    for t in range(1, STEPS + 1):
        step, state = update(jax.tree.map(jnp.float32, gradients_at(ours)), state, ours)
        ours = jax.tree.map(lambda p, d: p - LR * d, ours, step)
        gradients = gradients_at(theirs)
        for layer, arrays in theirs.items():
            for name, p in arrays.items():
                d = direction(name, t, p, gradients[layer][name], memory[layer][name])
                arrays[name] = p - LR * d
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), ours, theirs
        )


def lars(_: str, t: int, p: np.ndarray, g: np.ndarray, memory: Arrays) -> np.ndarray:
    g = g + DECAY * p
    rate = 0.02 * np.linalg.norm(p) / (np.linalg.norm(g) + 1e-3)
    memory["v"] = 0.9 * memory.get("v", 0) + rate * g
    return memory["v"]


def adam(t: int, g: np.ndarray, memory: Arrays, b1: float, b2: float, eps: float) -> np.ndarray:
    memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * g
    memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * g * g
    return memory["m"] / (1 - b1**t) / (np.sqrt(memory["v"] / (1 - b2**t)) + eps)


def lamb(_: str, t: int, p: np.ndarray, g: np.ndarray, memory: Arrays) -> np.ndarray:
    d = adam(t, g, memory, 0.9, 0.8, 1e-4) + DECAY * p
    return d * np.linalg.norm(p) / np.linalg.norm(d)


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """The quintic of Jordan (2024) on a wide matrix whose largest singular value is at most 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def muon(name: str, t: int, p: np.ndarray, g: np.ndarray, memory: Arrays) -> np.ndarray:
    if name != "kernel":
        return adam(t, g, memory, 0.8, 0.9, 1e-8) + DECAY * p
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    matrix = memory["m"].reshape(-1, p.shape[-1])
    orthogonal = newton_schulz(matrix) * np.sqrt(max(matrix.shape)) * 0.2
    return orthogonal.reshape(p.shape) + DECAY * p


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "rule"), [(LARS, lars), (LAMB, lamb), (MUON, muon)])
def test_six_steps_match_numpy(spec: Any, rule: Any) -> None:
    assert_steps(spec, rule)


@pytest.mark.slow
def test_muon_makes_kernels_nearly_orthogonal() -> None:
    """Singular values between 0.6 and 1.3 times rms * sqrt(longer side), from ones far apart."""
    plain = MUON.model_copy(update={"weight_decay": 0.0})
    optimizer, params = plain.build(), jax.tree.map(jnp.float32, some_params())
    direction, _ = optimizer.update(gradients_at(params), optimizer.init(params), params)
    for layer in ("conv_0", "dense_0"):
        kernel = np.asarray(direction[layer]["kernel"])
        matrix = kernel.reshape(-1, kernel.shape[-1])
        values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * np.sqrt(max(matrix.shape)))
        assert values.min() > 0.6
        assert values.max() < 1.3


@pytest.mark.slow
def test_zero_array_is_updated_by_the_plain_gradient() -> None:
    """Its norm would make the rate 0 for ever; fresh biases start there."""
    params, gradients = {"bias": jnp.zeros(3)}, {"bias": jnp.float32([1.0, -2.0, 0.5])}
    optimizer = LARS.build()
    direction, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(direction["bias"], gradients["bias"])
