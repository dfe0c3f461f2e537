"""One network, written in several ways, is lowered alike; what isn't lowered is named."""

from __future__ import annotations

import io
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from rich.console import Console

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.plugins.loading import VARIABLE, load_named
from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch
from pipeline.engine.run_sink import PreparedSink, prepare_sink
from pipeline.engine.sink_settings import SinkSettings
from pipeline.engine.user_step import lower_step
from pipeline.models.lowerings.candidates import list_candidates
from pipeline.models.lowerings.problem import DEFAULTS, Layout, Lowering, LoweringPolicy, Problem
from pipeline.models.lowerings.tune.tuner import LoweringChoice, Tuning, choose_lowerings
from pipeline.models.modules.name_stack import find_layer
from pipeline.stages.build import Built, build
from pipeline.stages.data import load_data
from pipeline.stages.lower import list_problems, lower, with_policy
from pipeline.training.step import compute_gradients, make_train_step, mask_batch
from pipeline.training.step_config import StepConfig
from tests import outcome
from tests.models.imported.conftest import IMPORTED_NETWORKS
from tests.models.imported.imported_networks import TwoConvs
from tests.models.torch_graph.golden_graphs import FOLDER
from tests.whole_run import run

Compose = Callable[..., Recipe]

CUSTOM_NETWORKS = Path(__file__).with_name("custom_networks.py")
OPS = "[{name: resize, size: [12, 12], interpolation: linear}]"
IMAGES = ("dataset.like=cifar10", f"dataset.train.ops={OPS}", f"dataset.eval.ops={OPS}")
LAYERS = (
    "[{name: conv, features: 16, kernel: 3, bias: true}, relu, {name: max_pool, kernel: 2},"
    "{name: conv, features: 32, kernel: 3, bias: true}, relu, {name: max_pool, kernel: 2},"
    "flatten, {name: dense, features: $classes}]"
)
WRITTEN = {
    "ModelSpec": ("model.name=two_convs",),
    "flax": ("model=flax", "model.import=imported_networks:TwoConvs"),
    "torch": ("model=torch", f"model.graph={FOLDER / 'twoconvs.torch.json'}"),
    "layers": ("model=layers", f"model.layers={LAYERS}"),
}
BATCH = 8


@dataclass(frozen=True)
class LastCandidate:
    """A policy that never chooses the default: each problem's last formula by XLA."""

    def choose(self, problem: Problem) -> Lowering:
        return list_candidates(problem, frozenset(("xla",)))[-1]


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, os.pathsep.join(map(str, (IMPORTED_NETWORKS, CUSTOM_NETWORKS))))
    list(load_named())


def built_of(recipe: Recipe) -> Built:
    with Reporter(console=Console(file=io.StringIO())) as reporter:
        return build(recipe, load_data(recipe, reporter), reporter)


def reported(recipe: Recipe) -> tuple[str, Built]:
    """What the lower stage reports, and its result."""
    text = io.StringIO()
    with Reporter(console=Console(file=text, width=1000)) as reporter:
        reporter.level = logging.INFO
        dataset = load_data(recipe, reporter)
        backend = recipe.device.open(recipe.parallel)
        built = build(recipe, dataset, reporter)
        built = lower(recipe, dataset, built, backend, None, reporter)
    return text.getvalue(), built


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(item, "jaxpr", item)
                if isinstance(inner, core.Jaxpr):
                    yield from equations(inner)


def formulas(built: Built, step_config: StepConfig) -> Counter[tuple[str, ...]]:
    """The convolutions and products of the gradients, by the shapes of operands and results."""
    images = jnp.zeros((BATCH, *step_config.inputs.shape))

    def gradients(state: Any) -> Any:
        labels, key = jnp.zeros(BATCH, jnp.int32), jax.random.key(0)
        batch = mask_batch(images, labels, BATCH, key)
        return compute_gradients(step_config, state, batch, BATCH, 1.0)

    jaxpr = jax.make_jaxpr(gradients)(built.state).jaxpr
    return Counter(
        (
            equation.primitive.name,
            *(str(atom.aval) for atom in (*equation.invars, *equation.outvars)),
        )
        for equation in equations(jaxpr)
        if equation.primitive.name in ("conv_general_dilated", "dot_general")
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    "policy",
    [DEFAULTS, pytest.param(LastCandidate(), marks=pytest.mark.slow)],
    ids=["defaults", "chosen"],
)
def test_equivalent_networks_are_lowered_alike(policy: LoweringPolicy, tiny: Compose) -> None:
    built = {name: built_of(tiny(*IMAGES, *keys)) for name, keys in WRITTEN.items()}
    problems = {
        name: set(list_problems(one.step_config, one.state, BATCH, BATCH))
        for name, one in built.items()
    }
    found = {
        name: formulas(one, with_policy(one.step_config, policy)) for name, one in built.items()
    }
    assert len(problems["layers"]) >= 10
    assert found["layers"].total() >= 6
    for name in WRITTEN:
        assert problems[name] == problems["layers"], name
        assert found[name] == found["layers"], name


@pytest.mark.slow
def test_few_channels_use_chwn_in_layers_and_from_torch(tiny: Compose, tmp_path: Path) -> None:
    found = {}
    for name in ("layers", "torch"):
        keys = (*WRITTEN[name], "autotune=bank", f"cache.root={tmp_path}")
        text, built = reported(tiny(*IMAGES, *keys))
        assert "images as CHWN, to vectorize over samples: few channels" in text
        found[name] = formulas(built, built.step_config)
    assert found["torch"] == found["layers"]
    assert not any(name == "conv_general_dilated" for name, *_ in found["torch"])
    assert found["torch"].total() >= 6


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "layout"), [(BATCH, "chwn"), (2048, "nhwc")])
def test_custom_step_is_lowered_like_recipe_layers(
    tiny: Compose, tmp_path: Path, batch_size: int, layout: Layout
) -> None:
    built = built_of(tiny(*IMAGES, *WRITTEN["layers"]))
    step_config = replace(built.step_config, network=built.step_config.network.clone(layout=layout))
    problems = list_problems(step_config, built.state, batch_size, batch_size)
    network = TwoConvs(classes=10)
    images, labels = np.zeros((batch_size, 12, 12, 3), np.float32), np.zeros(batch_size, np.int32)

    def step(weights: Any, batch: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            logits = network.apply(weights, batch[0], True)
            return -jax.nn.log_softmax(logits)[jnp.arange(batch_size), batch[1]].mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda leaf, by: leaf - 0.1 * by, weights, gradients), {"loss": loss}

    weights = network.init(jax.random.key(0), images, True)
    settings = SinkSettings(1, 1, None, batch_size, 0, None)
    prepared = prepare_sink(step, weights, (images, labels), settings)
    device = jax.devices()[0]
    _, choice = lower_step(prepared.step, prepared.spec, device, None)
    tuning = Tuning("bank", "exhaustive", tmp_path)
    expected = choose_lowerings(problems, device, tuning, lambda _: nullcontext()).lowerings
    assert len(problems) >= (10 if layout == "nhwc" else 5)
    assert choice.layout == layout
    assert dict(choice.lowerings.chosen) == dict(expected.chosen)


def prepared_convolution(channels: int, groups: int = 1) -> PreparedSink:
    """A step of one convolution of images of 8x8."""
    images = np.zeros((4, 8, 8, channels), np.float32)
    kernel = np.zeros((3, 3, channels // groups, channels), np.float32)

    def step(kernel: Any, batch: Any) -> Any:
        def loss_of(kernel: Any) -> Any:
            convolved = jax.lax.conv_general_dilated(
                batch,
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )
            return jnp.square(convolved).mean()

        loss, gradient = jax.value_and_grad(loss_of)(kernel)
        return kernel - 0.1 * gradient, {"loss": loss}

    return prepare_sink(step, kernel, images, SinkSettings(1, 1, None, 4, 0, None))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("channels", "groups", "layout"),
    [
        (16, 1, "chwn"),
        pytest.param(32, 1, "nhwc", marks=pytest.mark.slow),
        pytest.param(16, 4, "nhwc", marks=pytest.mark.slow),
    ],
)
def test_custom_step_uses_chwn_for_few_ungrouped_channels(
    channels: int, groups: int, layout: Layout
) -> None:
    prepared = prepared_convolution(channels, groups)
    _, choice = lower_step(prepared.step, prepared.spec, jax.devices()[0], None)
    assert choice.layout == layout


@pytest.mark.medium
def test_layout_unsupported_by_the_platform_is_refused() -> None:
    prepared = prepared_convolution(4)
    device: Any = SimpleNamespace(platform="cuda")
    with pytest.raises(RunError, match="images in CHWN, which this device can't use"):
        lower_step(prepared.step, prepared.spec, device, LoweringChoice(layout="chwn"))


@pytest.mark.medium
def test_custom_network_formulas_change_by_lowering(tiny: Compose) -> None:
    built = built_of(tiny(*IMAGES, *WRITTEN["ModelSpec"]))
    plain = replace(built.step_config, lowerings=None)
    assert formulas(built, plain) != formulas(built, built.step_config)


@pytest.mark.slow
def test_unlowered_convolutions_are_named_and_disable_loops(tiny: Compose) -> None:
    keys = ("model.name=volume", "dataset.train.ops=[]", "dataset.eval.ops=[]")
    text, built = reported(tiny(*keys))
    assert "left to XLA: inner: convolution is 3-D\n" in text
    assert "mechanism soft: in a loop over steps such convolutions are slow" in text
    assert built.single_steps


@pytest.mark.slow
def test_eager_mode_does_not_lower_a_custom_network(tiny: Compose) -> None:
    _, built = reported(tiny(*IMAGES, *WRITTEN["ModelSpec"], "train.mode=eager"))
    assert built.step_config.lowerings is None


@pytest.mark.slow
def test_custom_network_layers_keep_their_names(tiny: Compose) -> None:
    for name in ("ModelSpec", "flax"):
        built = built_of(tiny(*IMAGES, *WRITTEN[name]))
        step = make_train_step(built.step_config).step
        batch = Batch(
            columns={
                "image": np.zeros((BATCH, 32, 32, 3), np.uint8),
                "label": np.zeros(BATCH, np.int32),
            },
            seed=built.seed,
            epoch=np.uint32(0),
            sample=np.arange(BATCH, dtype=np.uint32),
            count=np.int32(BATCH),
        )
        jaxpr = jax.make_jaxpr(step)(built.state, batch, built.learning_rates).jaxpr
        scopes = {find_layer(str(equation.source_info.name_stack)) for equation in equations(jaxpr)}
        assert {"Conv_0", "Conv_1", "Dense_0"} <= scopes, name
        assert not any("TwoConvs/" in scope for scope in scopes), name


@pytest.mark.slow
def test_thor_observes_a_custom_network(tiny: Compose, tmp_path: Path) -> None:
    run(tiny("model.name=two_dense", "optimizer=thor", "train.steps=6"), tmp_path / "run")
    losses = [line["loss"] for line in outcome.metrics(tmp_path / "run")]
    assert len(losses) == 6
    assert np.isfinite(losses).all()
