"""Mixtures of experts: against transformers, and capacities against a loop over the tokens."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.models.layers.path_patterns import SAMPLE_LOSSES
from pipeline.models.layers.standard import Dense, Reshape
from pipeline.models.layers.token_mixers import MixtureOfExperts
from pipeline.models.layers.tokens import MeanToken
from tests.golden.make_token_layers import EXPERTS, FILE, HIDDEN, TOP
from tests.models.build import initialise, network, random
from tests.training.test_step import RATES, make_batch, make_config, make_step, start

with np.load(FILE) as stored:
    GOLDEN = {
        key.removeprefix("experts/"): value
        for key, value in stored.items()
        if key.startswith("experts/")
    }
LAYER = MixtureOfExperts(experts=EXPERTS, hidden=HIDDEN, top=TOP, balance=1.0)
KERNELS = ("gate", "up", "down", "router")
TOKENS = random(3, 8, 6)


def convert(prefix: str) -> dict[str, np.ndarray]:
    """The parameters of transformers, or their gradients, as they are here."""
    gate, up = np.split(GOLDEN[f"{prefix}experts.gate_up_proj"].swapaxes(1, 2), 2, -1)
    down = GOLDEN[f"{prefix}experts.down_proj"].swapaxes(1, 2)
    router = GOLDEN[f"{prefix}gate.weight"].T
    return dict(zip(KERNELS, (gate, up, down, router), strict=True))


def apply(
    layer: MixtureOfExperts, params: Any, x: Any, mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The result in training, and the losses of the samples."""
    inputs = x if mask is None else {"tokens": x, "mask": mask}
    variables = {"params": {"mixture_of_experts_0": params}, SAMPLE_LOSSES: {}}
    y, after = network(layer).apply(variables, inputs, train=True, mutable=[SAMPLE_LOSSES])
    return y, after[SAMPLE_LOSSES]["mixture_of_experts_0"]["loss"]


def draw(layer: MixtureOfExperts, x: np.ndarray = TOKENS) -> Any:
    return initialise(network(layer), x)["params"]["mixture_of_experts_0"]


@pytest.mark.medium
def test_experts_have_parity_with_transformers() -> None:
    weights = np.cos(np.arange(GOLDEN["y"].size, dtype=np.float32)).reshape(GOLDEN["y"].shape)

    def compute(params: Any, x: Any) -> tuple[Any, Any]:
        y, losses = apply(LAYER, params, x)
        return (y * weights).sum(), (y, losses)

    grad = jax.grad(compute, argnums=(0, 1), has_aux=True)
    (by_params, by_x), (y, losses) = grad(convert(""), GOLDEN["x"])
    np.testing.assert_allclose(y, GOLDEN["y"], atol=1e-5)
    np.testing.assert_allclose(by_x, GOLDEN["d_x"], atol=1e-5)
    for name, expected in convert("d_").items():
        np.testing.assert_allclose(by_params[name], expected, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(losses, GOLDEN["balance"] / TOP, rtol=1e-5)


def compute_by_token(layer: MixtureOfExperts, params: Any, x: np.ndarray) -> np.ndarray:
    """The results of one token after the other, each expert with its capacity."""
    y = np.zeros_like(x)
    assert layer.capacity_factor is not None
    most = np.ceil(layer.capacity_factor * x.shape[1] * layer.top / layer.experts)
    for sample in range(len(x)):
        counts = np.zeros(layer.experts)
        for place, token in enumerate(x[sample]):
            p = np.exp(token @ params["router"])
            chosen = np.argsort(-p)[: layer.top]
            for expert in chosen:
                counts[expert] += 1
                if counts[expert] <= most:
                    gate = token @ params["gate"][expert]
                    hidden = gate / (1 + np.exp(-gate)) * (token @ params["up"][expert])
                    share = p[expert] / p[chosen].sum()
                    y[sample, place] += share * (hidden @ params["down"][expert])
    return y


@pytest.mark.parametrize("factor", [0.5, 1.0, 9.0])
def test_expert_computes_the_first_tokens_that_chose_it(factor: float) -> None:
    layer = MixtureOfExperts(experts=4, hidden=5, capacity_factor=factor)
    params = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), draw(layer))
    y, _ = apply(layer, params, TOKENS)
    np.testing.assert_allclose(y, compute_by_token(layer, params, TOKENS), atol=1e-5)
    evaluated = network(layer).apply(
        {"params": {"mixture_of_experts_0": params}}, TOKENS, train=False
    )
    whole = layer.model_copy(update={"capacity_factor": 9.0})
    np.testing.assert_allclose(evaluated, compute_by_token(whole, params, TOKENS), atol=1e-5)


def test_padding_takes_no_capacity_and_no_part_in_the_losses() -> None:
    layer = MixtureOfExperts(experts=4, hidden=5, capacity_factor=1.0, balance=1.0, z_loss=0.5)
    params = draw(layer)
    mask = np.ones((3, 8), bool)
    mask[:, :4] = False
    y, losses = apply(layer, params, TOKENS, mask)
    # Of four tokens an expert computes 2 of capacity 1.0, of eight 4: all that can choose it.
    kept, alone = apply(layer.model_copy(update={"capacity_factor": 2.0}), params, TOKENS[:, 4:])
    np.testing.assert_allclose(y[:, 4:], kept, atol=1e-6)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    changed = np.where(mask[..., None], TOKENS, 7)
    np.testing.assert_allclose(apply(layer, params, changed, mask)[1], losses, rtol=1e-5)


@pytest.mark.medium
def test_step_adds_the_losses_of_the_router_and_trains_it() -> None:
    def run(balance: float) -> tuple[float, float, np.ndarray]:
        layer = MixtureOfExperts(experts=4, hidden=5, balance=balance, z_loss=balance)
        rows = Reshape(shape=(4, 1)), Dense(features=6)
        module = network(*rows, layer, MeanToken(), Dense(features=3))
        step = make_step(network=module)
        state = start(step)
        batch = make_batch()
        after, record = step.step(state, batch, RATES)
        config = make_config(network=module)
        images = np.asarray(batch.columns["image"], np.float32) / 255
        assert SAMPLE_LOSSES not in {**state.collections, **after.collections}
        variables = {**state.variables, SAMPLE_LOSSES: {}}
        _, written = config.network.apply(variables, images, train=True, mutable=[SAMPLE_LOSSES])
        (added,) = jax.tree.leaves(written) if balance else (np.zeros(len(images)),)
        router = after.params["mixture_of_experts_0"]["router"]
        return float(record.loss), float(np.mean(added)), np.asarray(router)

    (plain, _, router), (loss, added, moved) = run(0.0), run(0.5)
    assert added > 0.4
    assert loss == pytest.approx(plain + added, rel=1e-5)
    assert abs(moved - router).max() > 1e-4


def test_more_chosen_experts_than_experts_are_refused() -> None:
    with pytest.raises(ValidationError, match="top 3 is above the number of experts, 2"):
        MixtureOfExperts(experts=2, top=3, hidden=4)
