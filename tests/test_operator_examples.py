"""The example plug-ins: operators with a backward pass and with kernels of their own (M-16)."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import outcome
from tests.conftest import ROOT, TINY

OPERATORS = {"own_swish": "custom_operator", "pallas_swish": "pallas_operator"}
"""Layers and the examples that define them."""


@cache
def imported(name: str) -> ModuleType:
    """An example, imported so that its component is none of those of the tests' process."""
    spec = importlib.util.spec_from_file_location(
        f"tested_{name}", ROOT / "examples" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipeline.core.registry._components", {})
        spec.loader.exec_module(module)
    return module


def plain(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS.values())
@pytest.mark.parametrize("shape", [(), (3,), (256,), (7, 9, 5), (300, 4)], ids=str)
def test_values_and_gradients_match_the_plain_formula(name: str, shape: tuple[int, ...]) -> None:
    """Also where the elements fill no whole number of blocks."""
    operator = imported(name)
    x = 3 * jax.random.normal(jax.random.key(1), shape)
    value, pull = jax.vjp(operator.swish, x)
    expected, pull_expected = jax.vjp(plain, x)
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7)
    dout = jax.random.normal(jax.random.key(2), shape)
    np.testing.assert_allclose(pull(dout)[0], pull_expected(dout)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layer", OPERATORS)
def test_custom_layer_trains_like_the_built_in_layer(
    layer: str, forked: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """12 steps in sinks of 7."""
    losses = {}
    for name in (layer, "swish"):
        layers = (
            f"[flatten,{{name: dense, features: 16}},{name},{{name: dense, features: $classes}}]"
        )
        flag = ["--plugin", str(ROOT / "examples" / f"{OPERATORS[layer]}.py")]
        recipe = ["+recipe=lenet5_digits", *TINY, "model=layers", f"model.layers={layers}"]
        length = ["train.steps=12", "train.sink_size=7", f"hydra.run.dir=outputs/{name}"]
        done = forked([*(flag if name == layer else ()), *recipe, *length])
        assert done.returncode == 0, done.stdout + done.stderr
        lines = outcome.metrics(tmp_path / "outputs" / name)
        losses[name] = [line["loss"] for line in lines]
    assert len(losses[layer]) == 12
    np.testing.assert_allclose(losses[layer], losses["swish"], rtol=1e-5)


@pytest.mark.slow
def test_kernels_are_lowered_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one: as far as the text of the program, in which two kernels are called."""
    operator = imported("pallas_operator")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(operator.swish(x) ** 2)))
    x = jax.ShapeDtypeStruct((37, 65), np.float32)
    text = gradient.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2
