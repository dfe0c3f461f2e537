"""What is not finite, put into every layer of three networks: does the autopsy name where?

    python -m tests.injections

NaN, infinity and overflow go into what a layer gives, into the gradient at that, into each
parameter and into a sample. Where a parameter or a pixel is finite but huge, the first layer to
give something that is not finite is found by another way, looking at what every layer gives while
the network is called as usual. Prints the share of injections that were named rightly, by kind.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from rich.console import Console

from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch
from pipeline.data.transform import apply_ops
from pipeline.inspect.autopsy.examine import examine
from pipeline.inspect.autopsy.finding import Autopsy
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from pipeline.training.state import StepConfig, TrainState
from tests.conftest import compose_tiny

apply_module = importlib.import_module("pipeline.models.modules.apply_layers")

ROW = 3
"""The place in the batch of the sample that is spoilt."""

NETWORKS = {
    "LeNet-5": [],
    "ResNet": [
        "model=layers",
        "model.layers=[{name: conv, features: 4, kernel: 3, stride: 2},batch_norm,relu,"
        "{name: residual, body: [{name: conv, features: 4, kernel: 3},batch_norm,relu,"
        "{name: conv, features: 4, kernel: 3},batch_norm]},relu,{name: max_pool, kernel: 2},"
        "global_avg_pool,{name: dense, features: '$classes'}]",
    ],
    "ViT": [
        "model=vit_tiny",
        "model.features=12",
        "model.heads=3",
        "model.hidden=16",
        "model.blocks=1",
        "model.patch=8",
        "model.dropout=0.1",
    ],
}

Kind = Literal["NaN", "Inf", "overflow"]
Target = Literal["activation", "gradient", "parameter", "sample"]
KINDS: tuple[Kind, ...] = ("NaN", "Inf", "overflow")


@dataclass(frozen=True)
class Subject:
    """A network, its fresh state and a batch of float images."""

    step_config: StepConfig
    state: TrainState
    batch: Batch


@dataclass(frozen=True)
class Injection:
    """One thing that is spoilt; `path` is that of a layer or a parameter."""

    network: str
    target: Target
    kind: Kind
    path: str = ""

    def __str__(self) -> str:
        return f"{self.kind} in {self.target} {self.path} of {self.network}".replace("  ", " ")


@dataclass(frozen=True)
class Verdict:
    """Whether an injection was named rightly; None where the step was finite all the same."""

    injection: Injection
    hit: bool | None
    told: str


@cache
def subject(network: str, folder: Path, *overrides: str) -> Subject:
    """A network by name, on the tiny dataset."""
    recipe = compose_tiny(folder, *NETWORKS[network], *overrides, "train.steps=6")
    with open("/dev/null", "w") as nowhere:
        reporter = Reporter(None, Console(file=nowhere))
        dataset = load_data(recipe, reporter)
        built = build(recipe, dataset, reporter)
    order = dataset.train_order.batches(0, 1)
    columns = {name: column[order.indices[0]] for name, column in dataset.train.columns.items()}
    columns["image"] = columns["image"].astype(np.float32)
    batch = Batch(columns, built.seed, order.epochs[0], order.indices[0], np.int32(order.counts[0]))
    return Subject(built.step_config, jax.jit(built.step.init)(built.seed), batch)


@contextmanager
def change_layers(change: Callable[[str, Any], Any]) -> Iterator[None]:
    """Change the result of every layer, in the layer's scope, by its path."""
    apply_layer = apply_module.apply_layer

    def changed(layer: Any, x: Any, context: Any) -> Any:
        y = apply_layer(layer, x, context)
        with jax.named_scope(context.name):
            return change("/".join(context.path), y)

    apply_module.apply_layer = changed
    try:
        yield
    finally:
        apply_module.apply_layer = apply_layer


def layers_of(found: Subject) -> list[str]:
    """The paths of all layers, in the order in which they are done."""
    return list(_seen(found, jax.eval_shape))


def _seen(found: Subject, call: Callable[..., Any]) -> dict[str, Any]:
    """What each layer gives, by path, when the network is called by `call`."""
    seen: dict[str, Any] = {}

    def note(path: str, y: Any) -> Any:
        seen[path] = y
        return y

    batch, step_config, state = found.batch, found.step_config, found.state

    def forward(columns: Any, params: Any) -> Any:
        key = batch.seed, batch.epoch, batch.sample
        images = apply_ops(jnp, step_config.train_ops, columns, *key)["image"].astype(jnp.float32)
        weights = {"params": params, "batch_stats": state.batch_stats}
        rngs = {"dropout": jax.random.key(0)}
        return step_config.network.apply(
            weights, images, train=True, mutable=["batch_stats"], rngs=rngs
        )

    with change_layers(note):
        call(forward, batch.columns, state.params)
    return seen


def first_non_finite_layer(found: Subject) -> str | None:
    """The first layer that gives something that is not finite, by calling the network."""
    seen = _seen(found, lambda function, *args: function(*args))
    return next((path for path, y in seen.items() if not np.isfinite(np.asarray(y)).all()), None)


def _rows(y: Any, value: float) -> np.ndarray:
    """Ones, and the value for the sample that is spoilt, to multiply y with."""
    factor = np.ones((y.shape[0],) + (1,) * (y.ndim - 1), y.dtype)
    factor[ROW] = value
    return factor


@jax.custom_vjp
def _spoil_gradient(y: Any, factor: Any) -> Any:
    return y


def _spoil_forward(y: Any, factor: Any) -> tuple[Any, Any]:
    return y, factor


def _spoil_backward(factor: Any, cotangent: Any) -> tuple[Any, Any]:
    return cotangent * factor * factor, jnp.zeros_like(factor)


_spoil_gradient.defvjp(_spoil_forward, _spoil_backward)


def _factor(kind: Kind, dtype: Any) -> float:
    return {"NaN": np.nan, "Inf": np.inf, "overflow": float(jnp.finfo(dtype).max)}[kind]


def _spoil_layer(injection: Injection) -> Callable[[str, Any], Any]:
    def change(path: str, y: Any) -> Any:
        if path != injection.path:
            return y
        factor = _rows(y, _factor(injection.kind, y.dtype))
        if injection.target == "gradient":
            return _spoil_gradient(y, factor)
        if injection.kind == "overflow":
            return y * factor * factor
        return jnp.where(jnp.isfinite(factor), y, factor)

    return change


def _spoil_parameter(found: Subject, injection: Injection) -> Subject:
    params = flatten_dict(dict(found.state.params), sep="/")
    leaf = np.array(params[injection.path])
    if injection.kind == "overflow":
        leaf[...] = np.finfo(np.float32).max
    else:
        leaf.flat[0] = _factor(injection.kind, leaf.dtype)
    params[injection.path] = jnp.asarray(leaf)
    return replace(found, state=replace(found.state, params=unflatten_dict(params, sep="/")))


def _spoil_sample(found: Subject, injection: Injection) -> Subject:
    images = found.batch.columns["image"].copy()
    images[ROW, 2:6, 2:6] = _factor(injection.kind, images.dtype)
    columns = {**found.batch.columns, "image": images}
    return replace(found, batch=replace(found.batch, columns=columns))


def inject(found: Subject, injection: Injection) -> Verdict:
    """Spoil a step, examine it, and compare what is found with what was done."""
    where: str | None = injection.path
    if injection.target in ("activation", "gradient"):
        with change_layers(_spoil_layer(injection)):
            autopsy = _examine(found)
    else:
        spoil = _spoil_parameter if injection.target == "parameter" else _spoil_sample
        found = spoil(found, injection)
        autopsy = _examine(found)
        where = first_non_finite_layer(found) if injection.kind == "overflow" else where
    if autopsy.finding is None:
        return Verdict(injection, None, str(autopsy))
    return Verdict(injection, _is_right(injection, autopsy, where, found), str(autopsy))


def _examine(found: Subject) -> Autopsy:
    return examine(found.step_config, found.state, found.batch)


def _is_right(
    injection: Injection, autopsy: Autopsy, where: str | None, found: Subject
) -> bool | None:
    finding = autopsy.finding
    assert finding is not None
    positions = () if finding.samples is None else finding.samples.positions
    ids = () if finding.samples is None else finding.samples.ids
    if ids != tuple(np.asarray(found.batch.sample)[list(positions)].tolist()):
        return False
    in_layer = finding.layer == where or finding.layer.startswith(f"{where}/")
    if injection.target in ("activation", "gradient"):
        phase = "forward" if injection.target == "activation" else "backward"
        return (finding.phase, positions) == (phase, (ROW,)) and in_layer
    if injection.kind == "overflow":
        # Finite layers and a loss that is not, or a gradient: nothing to compare with.
        return None if where is None else finding.phase == "forward" and in_layer
    if injection.target == "parameter":
        return (finding.phase, finding.tensor.name) == ("update", where)
    return (finding.phase, finding.tensor.name, positions) == ("data", "image", (ROW,))


def injections(network: str, found: Subject) -> Iterator[Injection]:
    """Everything that is put into a network."""
    for kind in KINDS:
        for path in layers_of(found):
            yield Injection(network, "activation", kind, path)
            yield Injection(network, "gradient", kind, path)
        for path in flatten_dict(dict(found.state.params), sep="/"):
            yield Injection(network, "parameter", kind, path)
        yield Injection(network, "sample", kind)


def main() -> int:
    """Print the hit rate by network, target and kind; the exit status is 1 where one was missed."""
    begun, verdicts = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for network in NETWORKS:
            found = subject(network, Path(folder))
            verdicts += [inject(found, injection) for injection in injections(network, found)]
    print(_table(verdicts))
    missed = [verdict for verdict in verdicts if verdict.hit is False]
    for verdict in missed:
        print(f"\nmissed: {verdict.injection}\n{verdict.told}")
    judged = sum(verdict.hit is not None for verdict in verdicts)
    print(
        f"\n{judged - len(missed)} of {judged} named rightly; {len(verdicts) - judged} more left "
        f"the step finite or had no layer to compare with; {time.monotonic() - begun:.0f} s"
    )
    return 1 if missed else 0


def _table(verdicts: list[Verdict]) -> str:
    counts = Counter(
        ((v.injection.network, v.injection.target, v.injection.kind), v.hit) for v in verdicts
    )
    lines = [
        "| network | in | " + " | ".join(KINDS) + " |",
        "| --- | --- |" + " --- |" * len(KINDS),
    ]
    for network, target in dict.fromkeys((n, t) for (n, t, _), _ in counts):
        cells = []
        for kind in KINDS:
            right = counts[(network, target, kind), True]
            cells.append(f"{right} of {right + counts[(network, target, kind), False]}")
        lines.append(f"| {network} | {target} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
