"""Adapters against PyTorch, by the papers' formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.registry import make_component
from pipeline.models.modules.adapted_network import adapt_network
from pipeline.training.features.components.lora import Lora
from tests.conftest import ROOT
from tests.training.test_step import TwoLayers, make_batch, make_config, make_step, start

GOLDEN = ROOT / "tests" / "golden" / "adapters.npz"


@pytest.mark.medium
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_training_equals_pytorch_golden(name: str) -> None:
    spec = make_component("feature", "lora", rank=2, alpha=3.0, dora=name == "dora")
    step = make_step(
        network=adapt_network(TwoLayers(), spec.rule),
        features=(*make_config().features, Lora(spec)),
    )
    state = start(step)
    with np.load(GOLDEN) as golden:
        params: dict[str, Any] = {}
        for scope in ("Dense_0", "Dense_1"):
            params[scope] = {
                **state.params[scope],
                "kernel": jnp.asarray(golden[f"start {scope} W"]),
                "bias": jnp.asarray(golden[f"start {scope} bias"]),
                "lora_down": jnp.asarray(golden[f"start {scope} A"]),
            }
        state = replace(state, params=params)
        losses = []
        for number, label in enumerate(golden["labels"]):
            columns = {"image": golden["images"][number], "label": label}
            batch = replace(make_batch(number), columns=columns)
            state, record = step.step(state, batch, np.full(6, 0.1, np.float32))
            losses.append(float(record.loss))
        np.testing.assert_allclose(losses, golden[f"{name} losses"], rtol=2e-5)
        for scope, arrays in state.params.items():
            for leaf in ("kernel", "bias"):
                np.testing.assert_array_equal(arrays[leaf], params[scope][leaf])
            for leaf in {"lora_down", "lora_up", "lora_magnitude"} & {*arrays}:
                expected = golden[f"{name} {scope} {leaf}"]
                np.testing.assert_allclose(arrays[leaf], expected, rtol=1e-4, atol=1e-5)
    assert ("lora_magnitude" in state.params["Dense_0"]) == (name == "dora")
    assert abs(losses[0] - losses[-1]) > 0.01
