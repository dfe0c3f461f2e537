"""Does the autopsy name the origin of a non-finite value? Injections into three networks.

    python -m tests.injections

NaN, infinity and overflow go into the output of each layer, into its gradient, into each parameter
and into a sample. If a parameter or a pixel is finite but huge, an independent way finds the first
layer with a non-finite output: it calls the network as usual and looks at all outputs. Prints the
share of injections that were named rightly, by kind.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pipeline.data.batch import Batch
from pipeline.data.transform import apply_ops
from pipeline.inspect.autopsy.examine import Autopsy, examine
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig
from tests.patched_layers import build_silently, patch_layers

ROW = 3
"""The position of the spoilt sample in the batch."""

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
    """A spoilt tensor; `path` is the path of a layer or a parameter."""

    network: str
    target: Target
    kind: Kind
    path: str = ""

    def __str__(self) -> str:
        return f"{self.kind} in {self.target} {self.path} of {self.network}".replace("  ", " ")


@dataclass(frozen=True)
class Verdict:
    """Whether an injection was named rightly; None if the step was finite all the same."""

    injection: Injection
    hit: bool | None
    text: str


@cache
def build_subject(network: str, folder: Path) -> Subject:
    """Build a network of NETWORKS for the tiny dataset."""
    dataset, built = build_silently(folder, NETWORKS[network])
    order = dataset.train_order.batches(0, 1)
    columns = {name: column[order.indices[0]] for name, column in dataset.train.columns.items()}
    columns["image"] = columns["image"].astype(np.float32)
    batch = Batch(columns, built.seed, order.epochs[0], order.indices[0], np.int32(order.counts[0]))
    return Subject(built.step_config, jax.jit(built.step.init)(built.seed), batch)


def change_layers(change: Callable[[str, Any], Any]) -> AbstractContextManager[None]:
    """Replace the output y of each layer by `change(path, y)`, in the layer's scope."""

    def apply_changed(apply_layer: Any, layer: Any, x: Any, context: Any) -> Any:
        y = apply_layer(layer, x, context)
        with jax.named_scope(context.name):
            return change("/".join(context.path), y)

    return patch_layers(apply_changed)


def list_layers(subject: Subject) -> list[str]:
    """Return the paths of all layers, in the order of their computation."""
    return list(_collect_outputs(subject, jax.eval_shape))


def _collect_outputs(subject: Subject, call: Callable[..., Any]) -> dict[str, Any]:
    """Return the output of each layer by path, if `call` calls the network."""
    outputs: dict[str, Any] = {}

    def collect(path: str, y: Any) -> Any:
        outputs[path] = y
        return y

    batch = subject.batch
    step_config = subject.step_config
    state = subject.state

    def forward(columns: Any, params: Any) -> Any:
        key = batch.seed, batch.epoch, batch.sample
        images = apply_ops(jnp, step_config.train_ops, columns, *key)["image"].astype(jnp.float32)
        weights = {**state.variables, "params": params}
        rngs = {"dropout": jax.random.key(0)}
        return step_config.network.apply(
            weights, images, train=True, mutable=["batch_stats"], rngs=rngs
        )

    with change_layers(collect):
        call(forward, batch.columns, state.params)
    return outputs


def find_non_finite_layer(subject: Subject) -> str | None:
    """Call the network and return the first layer with a non-finite output."""
    outputs = _collect_outputs(subject, lambda function, *args: function(*args))
    return next((path for path, y in outputs.items() if not np.isfinite(np.asarray(y)).all()), None)


def _make_factor(y: Any, value: float) -> np.ndarray:
    """Return a factor for y: ones, but `value` for the spoilt sample."""
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


def _choose_value(kind: Kind, dtype: Any) -> float:
    return {"NaN": np.nan, "Inf": np.inf, "overflow": float(jnp.finfo(dtype).max)}[kind]


def _spoil_layer(injection: Injection) -> Callable[[str, Any], Any]:
    def change(path: str, y: Any) -> Any:
        if path != injection.path:
            return y
        factor = _make_factor(y, _choose_value(injection.kind, y.dtype))
        if injection.target == "gradient":
            return _spoil_gradient(y, factor)
        if injection.kind == "overflow":
            return y * factor * factor
        return jnp.where(jnp.isfinite(factor), y, factor)

    return change


def _spoil_parameter(subject: Subject, injection: Injection) -> Subject:
    params = flatten_dict(dict(subject.state.params), sep="/")
    leaf = np.array(params[injection.path])
    if injection.kind == "overflow":
        leaf[...] = np.finfo(np.float32).max
    else:
        leaf.flat[0] = _choose_value(injection.kind, leaf.dtype)
    params[injection.path] = jnp.asarray(leaf)
    return replace(subject, state=replace(subject.state, params=unflatten_dict(params, sep="/")))


def _spoil_sample(subject: Subject, injection: Injection) -> Subject:
    images = subject.batch.columns["image"].copy()
    images[ROW, 2:6, 2:6] = _choose_value(injection.kind, images.dtype)
    columns = {**subject.batch.columns, "image": images}
    return replace(subject, batch=replace(subject.batch, columns=columns))


def inject(subject: Subject, injection: Injection) -> Verdict:
    """Spoil a step, examine it, and compare the finding with the injection."""
    path: str | None = injection.path
    if injection.target in ("activation", "gradient"):
        with change_layers(_spoil_layer(injection)):
            autopsy = _examine(subject)
    else:
        spoil = _spoil_parameter if injection.target == "parameter" else _spoil_sample
        subject = spoil(subject, injection)
        autopsy = _examine(subject)
        if injection.kind == "overflow":
            path = find_non_finite_layer(subject)
    if autopsy.finding is None:
        return Verdict(injection, None, str(autopsy))
    return Verdict(injection, _is_right(injection, autopsy, path, subject), str(autopsy))


def _examine(subject: Subject) -> Autopsy:
    return examine(subject.step_config, subject.state, subject.batch)


def _is_right(
    injection: Injection, autopsy: Autopsy, path: str | None, subject: Subject
) -> bool | None:
    finding = autopsy.finding
    assert finding is not None
    positions = () if finding.samples is None else finding.samples.positions
    ids = () if finding.samples is None else finding.samples.ids
    if ids != tuple(np.asarray(subject.batch.sample)[list(positions)].tolist()):
        return False
    in_layer = finding.layer == path or finding.layer.startswith(f"{path}/")
    if injection.target in ("activation", "gradient"):
        phase = "forward" if injection.target == "activation" else "backward"
        return (finding.phase, positions) == (phase, (ROW,)) and in_layer
    if injection.kind == "overflow":
        # If all layers are finite but the loss or a gradient isn't, there is no layer to compare.
        return None if path is None else finding.phase == "forward" and in_layer
    if injection.target == "parameter":
        return (finding.phase, finding.tensor.name) == ("update", path)
    return (finding.phase, finding.tensor.name, positions) == ("data", "image", (ROW,))


def iter_injections(network: str, subject: Subject) -> Iterator[Injection]:
    """Yield all injections into a network."""
    for kind in KINDS:
        for path in list_layers(subject):
            yield Injection(network, "activation", kind, path)
            yield Injection(network, "gradient", kind, path)
        for path in flatten_dict(dict(subject.state.params), sep="/"):
            yield Injection(network, "parameter", kind, path)
        yield Injection(network, "sample", kind)


def main() -> int:
    """Print the hit rate by network, target and kind; return 1 if a verdict is wrong."""
    start_s = time.monotonic()
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        for network in NETWORKS:
            subject = build_subject(network, Path(folder))
            verdicts += [inject(subject, fault) for fault in iter_injections(network, subject)]
    print(_format_table(verdicts))
    missed = [verdict for verdict in verdicts if verdict.hit is False]
    for verdict in missed:
        print(f"\nmissed: {verdict.injection}\n{verdict.text}")
    judged = sum(verdict.hit is not None for verdict in verdicts)
    print(
        f"\n{judged - len(missed)} of {judged} named rightly; {len(verdicts) - judged} more left "
        f"the step finite or had no layer to compare with; {time.monotonic() - start_s:.0f} s"
    )
    return 1 if missed else 0


def _format_table(verdicts: list[Verdict]) -> str:
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
