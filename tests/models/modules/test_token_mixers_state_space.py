"""Selective state spaces: the mixer against transformers, and chunks against the recurrence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from pydantic import ValidationError

from pipeline.models.layers.token_mixers import StateSpace
from pipeline.models.modules.token_mixers import scan_chunks
from tests.golden.make_token_layers import FILE, MAMBA
from tests.models.build import QUICK, initialise, network, random

with np.load(FILE) as stored:
    GOLDEN = {
        key.removeprefix("mamba2/"): value
        for key, value in stored.items()
        if key.startswith("mamba2/")
    }
LAYER = StateSpace(**MAMBA)
NAMES = {
    "in/kernel": "in_proj.weight",
    "out/kernel": "out_proj.weight",
    "taps": "conv1d.weight",
    "bias": "conv1d.bias",
    "step_bias": "dt_bias",
    "log_decay": "A_log",
    "skip": "D",
    "scale": "norm.weight",
}


def convert(prefix: str = "") -> dict[str, np.ndarray]:
    """The parameters of transformers, or their gradients, as they are here."""
    return {name: GOLDEN[prefix + other].squeeze().T for name, other in NAMES.items()}


@pytest.mark.medium
def test_mixer_has_parity_with_transformers() -> None:
    module = network(LAYER)
    weights = np.cos(np.arange(GOLDEN["y"].size, dtype=np.float32)).reshape(GOLDEN["y"].shape)

    def compute(params: Any, x: Any) -> tuple[Any, Any]:
        y = module.apply({"params": {"state_space_0": params}}, x, train=True)
        return (y * weights).sum(), y

    params = unflatten_dict(convert(), sep="/")
    shapes = initialise(module, GOLDEN["x"])["params"]["state_space_0"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)
    grad = jax.jit(jax.grad(compute, argnums=(0, 1), has_aux=True), compiler_options=QUICK)
    (by_params, by_x), y = grad(params, GOLDEN["x"])
    np.testing.assert_allclose(y, GOLDEN["y"], atol=2e-5)
    np.testing.assert_allclose(by_x, GOLDEN["d_x"], atol=1e-4, rtol=1e-4)
    expected = convert("d_")
    for name, found in flatten_dict(by_params, sep="/").items():
        np.testing.assert_allclose(found, expected[name], atol=2e-4, rtol=1e-3, err_msg=name)


def compute_recurrence(
    x: np.ndarray, decays: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    """One token after the other, float64."""
    y = np.zeros(x.shape)
    state = np.zeros((*x.shape[:1], *x.shape[2:], b.shape[-1]))
    for token in range(x.shape[1]):
        new = x[:, token, ..., None] * b[:, token, :, None]
        state = np.exp(decays[:, token])[..., None, None] * state + new
        y[:, token] = (state * c[:, token, :, None]).sum(-1)
    return y


@pytest.mark.parametrize("chunk", [1, 4, 5, 11, 64])
def test_chunks_compute_the_recurrence(chunk: int) -> None:
    x, b, c = random(2, 11, 3, 4), random(2, 11, 3, 5, seed=1), random(2, 11, 3, 5, seed=2)
    decays = -np.exp(2 * random(2, 11, 3, seed=3))
    found = scan_chunks(*map(jnp.asarray, (x, decays, b, c)), chunk)
    np.testing.assert_allclose(found, compute_recurrence(x, decays, b, c), atol=1e-5)


def test_long_spans_have_finite_gradients() -> None:
    decays = jnp.full((1, 64, 1), -30.0)
    x = jnp.ones((1, 64, 1, 1))
    grad = jax.grad(lambda decays: scan_chunks(x, decays, x, x, 32).sum())(decays)
    assert np.isfinite(grad).all()


@pytest.mark.medium
def test_padding_changes_no_token() -> None:
    x = random(2, 9, 6)
    module = network(LAYER)
    variables = initialise(module, x)
    mask = np.arange(9) > 3  # padding comes first
    masked = module.apply(variables, {"x": x, "mask": np.stack([mask] * 2)}, train=False)
    alone = module.apply(variables, x[:, 4:], train=False)
    np.testing.assert_allclose(masked[:, 4:], alone, atol=1e-5)
    # A convolution reads zeros of a gap; without one, the tokens after a gap don't see it.
    gap = np.insert(x, [4] * 3, 5, axis=1)
    is_token = np.insert(np.ones(9, bool), [4] * 3, False)
    cut = LAYER.model_copy(update={"kernel": 1})
    taps = {**variables["params"]["state_space_0"]}
    taps["taps"] = taps["taps"][-1:]
    own = {"params": {"state_space_0": taps}}
    expected = network(cut).apply(own, x, train=False)
    masked_gap = {"x": gap, "mask": np.stack([is_token] * 2)}
    found = network(cut).apply(own, masked_gap, train=False)[:, is_token]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    later = module.apply(variables, np.where(np.arange(9)[:, None] > 5, 7, x), train=False)
    whole = module.apply(variables, x, train=False)
    np.testing.assert_array_equal(later[:, :6], whole[:, :6])


@pytest.mark.medium
def test_initial_step_sizes_and_decays_are_in_their_ranges() -> None:
    layer = StateSpace(heads=64, head=1, state=2)
    params = initialise(network(layer), random(1, 4, 6))["params"]["state_space_0"]
    sizes = np.logaddexp(0, params["step_bias"])
    assert 0.001 <= sizes.min() < 0.003 < 0.03 < sizes.max() <= 0.1001
    decays = np.exp(params["log_decay"])
    assert 1 <= decays.min() < 4 < 12 < decays.max() <= 16.001


def test_heads_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(ValidationError, match="heads 3 is not a multiple of groups 2"):
        StateSpace(heads=3, groups=2)
