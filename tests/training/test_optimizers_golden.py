"""Optimizers against PyTorch's and MindSpore's, from tests/golden/make_optimizers.py (L-03)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.component_specs import DecayRule, OptimizerSpec
from pipeline.training.optimizers.adaptive import Adagrad, AdaMax, RAdam, RmsProp
from pipeline.training.optimizers.first_order import Adam, AdamW, Momentum

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "optimizers.json").read_text())
LR = 0.05
COMMON = {"lr": LR, "weight_decay": 0.1, "decay_rules": ()}
MOMENTS = {**COMMON, "b1": 0.9, "b2": 0.8, "eps": 1e-4}
RMS = {**COMMON, "decay": 0.8, "momentum": 0.5, "eps": 1e-4, "initial_mean_square": 1.0}
MOMENTUM = Momentum(**COMMON, momentum=0.9, nesterov=False)

SPECS: dict[str, OptimizerSpec] = {
    "torch momentum": MOMENTUM,
    "torch nesterov": Momentum(**COMMON, momentum=0.9, nesterov=True),
    "torch adam": Adam(**MOMENTS),
    "torch adamw": AdamW(**MOMENTS),
    "torch radam": RAdam(**MOMENTS | {"eps": 1e-8}),
    "torch adamax": AdaMax(**MOMENTS),
    "mindspore momentum": MOMENTUM,
    "mindspore adamax": AdaMax(**MOMENTS | {"eps": 1e-8}),
    "mindspore adagrad": Adagrad(**COMMON, initial_accumulator=0.1, eps=1e-12),
    "mindspore rmsprop": RmsProp(**RMS, centered=False),
    "mindspore rmsprop centered": RmsProp(**RMS, centered=True),
}


GROUP = {"weight_decay": 0.0, "decay_rules": (DecayRule(pattern="p", weight_decay=0.1),)}
"""The weight decay as one of a group of parameters."""


def test_golden_trajectories_are_all_tested() -> None:
    assert SPECS.keys() == GOLDEN.keys()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, GROUP], ids=["all", "group"])
@pytest.mark.parametrize("name", SPECS)
def test_twelve_steps_match_golden_steps(name: str, changes: dict[str, Any]) -> None:
    optimizer = SPECS[name].model_copy(update=changes).build()
    params = {"p": jnp.linspace(-1.5, 1.7, 9)}
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    for expected in GOLDEN[name]:
        gradients = {"p": jnp.sin(3 * params["p"]) + 0.2}
        direction, state = step(gradients, state, params)
        params = jax.tree.map(lambda p, d: p - LR * d, params, direction)
        # MindSpore's RMSProp on the CPU is 2e-5 off the same steps in float64.
        atol = 5e-5 if "rmsprop" in name else 1e-5
        np.testing.assert_allclose(params["p"], expected, rtol=1e-4, atol=atol)
