"""Functions around the layers of a network, in one another."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pipeline.models.layers import standard
from pipeline.models.modules.apply_layers import (
    COMPUTATIONS,
    intercept_layers,
    name_scopes,
    record_layers,
)
from tests.models.build import network

LAYERS = network(standard.Flatten(), standard.Relu())
IMAGES = jnp.array([[[[-1.0], [2.0]]]])


def test_layers_are_recorded_by_nested_recorders() -> None:
    outer: list[str] = []
    inner: list[str] = []
    alone: list[str] = []
    key = jax.random.key(0)
    with record_layers(lambda path, kind, y: outer.append(kind)):
        with record_layers(lambda path, kind, y: inner.append(kind)):
            LAYERS.init_with_output(key, IMAGES, train=False)
        LAYERS.init_with_output(key, IMAGES, train=False)
    with record_layers(lambda path, kind, y: alone.append(kind)):
        LAYERS.init_with_output(key, IMAGES, train=False)
    assert alone == ["flatten", "relu"]
    assert inner == alone
    assert outer == [*alone, *alone]


def test_outer_interceptor_receives_the_result_of_the_inner_one() -> None:
    def double(layer: Any, compute: Any, x: Any, context: Any) -> Any:
        return 2 * compute(x)

    def add_one(layer: Any, compute: Any, x: Any, context: Any) -> Any:
        return 1 + compute(x)

    with intercept_layers(double), intercept_layers(add_one):
        result, _ = LAYERS.init_with_output(jax.random.key(0), IMAGES, train=False)
    # Flatten: 2 * (x + 1); ReLU: 2 * (relu + 1).
    assert result.tolist() == [[2.0, 14.0]]


def test_each_layer_is_listed_with_the_module_that_computes_it() -> None:
    """A layer that is missing from the list would have no computation until another imports it."""
    found: dict[str, set[str]] = {}
    for name in COMPUTATIONS:
        source = Path(import_module(name).__file__ or "").read_text()
        pattern = r"^@computes\(((?:standard|tokens|token_mixers|tables)\.\w+)\)"
        layers = re.findall(pattern, source, re.MULTILINE)
        found[name] = set(layers)
    assert found == {name: set(layers) for name, layers in COMPUTATIONS.items()}


@pytest.mark.medium
def test_layer_whose_module_another_thread_imports_waits_for_the_whole_module(
    tmp_path: Path,
) -> None:
    """The jobs of a sweep are threads, and one of them used functions that weren't defined yet."""
    (tmp_path / "slow_module.py").write_text("""
import threading, time
import test_layers
from pipeline.models.modules.apply_layers import computes
@computes(test_layers.Doubled)
def compute(layer, x, context):
    return double(x)
test_layers.registered.set()
time.sleep(0.3)
def double(x):
    return 2 * x
""")
    script = f"""
import sys, threading, types
sys.path.insert(0, {str(tmp_path)!r})
from pipeline.models.modules import apply_layers
from pipeline.models.layers.model_spec import LayerSpec
class Doubled(LayerSpec):
    pass
registered = threading.Event()
sys.modules["test_layers"] = sys.modules["__main__"]
apply_layers.COMPUTATIONS["slow_module"] = ("Doubled",)
apply_layers._MODULES["__main__.Doubled"] = "slow_module"
results = []
def work():
    results.append(apply_layers.apply_layer(Doubled(name="doubled"), 2, None))
first = threading.Thread(target=work)
first.start()
registered.wait()
work()
first.join()
print(results)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout == "[4, 4]\n", run.stderr


@pytest.mark.medium
def test_network_imports_only_what_its_layers_need() -> None:
    """Also if a layer is of a custom class, which is computed as its base."""
    script = """
import sys
import jax, jax.numpy as jnp
from tests.models.build import network
from pipeline.models.layers import standard
class Custom(standard.LeakyRelu):
    pass
y, _ = network(Custom(slope=0.5)).init_with_output(jax.random.key(0), -jnp.ones((1, 1)), train=True)
prefix = "pipeline.models.modules."
print(y.item(), *(name.removeprefix(prefix) for name in sys.modules if name.startswith(prefix)))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    value, *loaded = run.stdout.split()
    assert float(value) == -0.5
    assert "standard" in loaded
    assert "tokens" not in loaded


def test_siblings_are_numbered_by_kind_unless_scoped() -> None:
    siblings = (
        standard.Conv(features=4, kernel=3),
        standard.Relu(),
        standard.Sequence(scope="stage1", body=()),
        standard.Conv(features=4, kernel=3, scope="neck"),
        standard.Conv(features=4, kernel=3),
        standard.Relu(),
    )
    assert name_scopes(siblings) == ["conv_0", "relu_0", "stage1", "neck", "conv_1", "relu_1"]


@pytest.mark.parametrize("taken", ["relu_0", "mine"])
def test_siblings_cannot_share_a_scope(taken: str) -> None:
    with pytest.raises(ValueError, match=f"two layers share the scope '{taken}'"):
        name_scopes((standard.Relu(scope="mine"), standard.Relu(), standard.Relu(scope=taken)))
