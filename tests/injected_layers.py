"""Faults put into single layers of three networks: does the comparison name the layer?

    python -m tests.injected_layers [--faults=100] [--clean=50]

A side with a fault is compared with a clean one, in float32 and with bfloat16 against float32. The
faults: another epsilon, a wrong axis, a sum kept in bfloat16, stale statistics, the other gelu, a
wrong stride. Clean pairs differ in precision, layout, lowerings, state and batch. Prints each
injection's effect, its error over the expected one, and which layer was named.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from rich.console import Console

from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch
from pipeline.inspect.compare.forced_layers import ForcedComparison, ReferenceStep
from pipeline.inspect.dumps.captured_step import capture_step
from pipeline.inspect.dumps.layer_programs import LayerPrograms, Weights
from pipeline.inspect.dumps.wide_replay import QUICK
from pipeline.models.lowerings.conv2d_formulas import CONVOLUTIONS
from pipeline.models.lowerings.problem.lowering import Lowering, Lowerings, RecordingPolicy
from pipeline.models.modules.layout import find_layer_without_chwn
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from pipeline.training.state import StepConfig, TrainState
from tests.conftest import compose_tiny

apply_module = importlib.import_module("pipeline.models.modules.apply_layers")

TRAINED_STEPS = 4
"""Steps that a network is trained for before it is compared."""

NETWORKS = {
    "LeNet-5": [],
    "ResNet": [
        "model=layers",
        "model.layers=[{name: conv, features: 8, kernel: 3, stride: 2},batch_norm,relu,"
        "{name: residual, body: [{name: conv, features: 8, kernel: 3},batch_norm,gelu,"
        "{name: conv, features: 8, kernel: 3},{name: group_norm, groups: 2}]},gelu,"
        "{name: avg_pool, kernel: 2},{name: conv, features: 12, kernel: 3},batch_norm,relu,"
        "global_avg_pool,{name: dense, features: '$classes'}]",
    ],
    "ViT": [
        "model=vit_tiny",
        "model.features=24",
        "model.heads=3",
        "model.hidden=32",
        "model.blocks=1",
        "model.patch=8",
        "model.dropout=0.1",
    ],
}
Fault = Literal[
    "epsilon", "wrong axis", "bf16 sum", "stale statistic", "other gelu", "wrong stride"
]
NORMS = ("batch_norm", "layer_norm", "group_norm")
WEIGHTED = ("conv", "dense", "self_attention", *NORMS, "global_avg_pool", "avg_pool")


@dataclass(frozen=True)
class Injection:
    """A fault in one layer of a network, whose examined side computes in `dtype`."""

    network: str
    dtype: str
    fault: Fault
    path: str
    kind: str

    def __str__(self) -> str:
        return f"{self.network:8} {self.dtype:8} {self.fault:16} {self.path}"


@dataclass(frozen=True)
class Verdict:
    """The effect of an injection, over the expected error, and the layer that was named."""

    injection: Injection
    effect: float
    named: str
    """"" where no layer was."""

    @property
    def is_right(self) -> bool:
        return self.named == self.injection.path

    def __str__(self) -> str:
        mark = "right" if self.is_right else f"named {self.named or 'none'}"
        return f"{self.injection!s:64} {self.effect:10.4g} {mark}"


@dataclass(frozen=True)
class Subject:
    """A network after a few steps, and a batch."""

    step_config: StepConfig
    state: TrainState
    batch: Batch


@cache
def subject(network: str, folder: Path, seed: int = 1) -> Subject:
    """A network by name on the tiny dataset, trained for a few steps."""
    recipe = compose_tiny(folder, *NETWORKS[network], "train.steps=6", f"seed={seed}")
    with open("/dev/null", "w") as nowhere:
        reporter = Reporter(None, Console(file=nowhere))
        dataset = load_data(recipe, reporter)
        built = build(recipe, dataset, reporter)
    order = dataset.train_order.batches(0, TRAINED_STEPS + 1)

    def batch(number: int) -> Batch:
        rows = order.indices[number]
        columns = {name: jnp.asarray(c[rows]) for name, c in dataset.train.columns.items()}
        about = order.epochs[number], rows, jnp.int32(order.counts[number])
        return Batch(columns, jnp.asarray(built.seed), *map(jnp.asarray, about))

    step = jax.jit(built.step.step, compiler_options=QUICK)
    state = jax.jit(built.step.init)(built.seed)
    for number in range(TRAINED_STEPS):
        state, _ = step(state, batch(number), built.learning_rates)
    return Subject(built.step_config, state, batch(TRAINED_STEPS))


@cache
def reference(network: str, folder: Path, seed: int = 1) -> ReferenceStep:
    """The clean step of a network in float32."""
    found = subject(network, folder, seed)
    programs = LayerPrograms(found.step_config, jax.devices("cpu")[0])
    weights = Weights.of(found.state)
    step = capture_step(programs, weights, found.batch, int(found.state.step))
    return ReferenceStep(programs, step)


@contextmanager
def faulty(injection: Injection) -> Iterator[None]:
    """Have one layer computed wrongly by programs that are traced in the body."""
    apply_layer = apply_module.apply_layer
    spoil = FAULTS[injection.fault]

    def changed(layer: Any, x: Any, context: Any) -> Any:
        if "/".join(context.path) != injection.path:
            return apply_layer(layer, x, context)
        return spoil(
            lambda x, layer=layer, context=context: apply_layer(layer, x, context),
            *(layer, x, context),
        )

    apply_module.apply_layer = changed
    try:
        yield
    finally:
        apply_module.apply_layer = apply_layer


Compute = Callable[..., Any]


def _epsilon(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    return compute(x, layer.model_copy(update={"epsilon": 0.1}))


def _wrong_axis(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    if layer.name == "layer_norm":
        # Statistics over the tokens, not over the features.
        centred = x - x.mean(1, keepdims=True)
        return compute(x) * 0 + centred * jax.lax.rsqrt(centred.var(1, keepdims=True) + 1e-5)
    if layer.name in ("batch_norm", "group_norm"):
        return compute(x[..., ::-1])[..., ::-1]
    if layer.name == "global_avg_pool":
        return compute(x[:, :, :1])
    if x.ndim == 4 and x.shape[1] == x.shape[2]:
        return (
            compute(x.swapaxes(1, 2)).swapaxes(1, 2)
            if layer.name == "conv"
            else compute(x.swapaxes(1, 2))
        )
    return compute(x[..., ::-1])


def _bf16_sum(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    """The result as the sum of those of eight blocks of channels, added in bfloat16."""
    if layer.name not in ("conv", "dense"):
        narrow = x.astype(jnp.bfloat16).astype(x.dtype)
        return compute(narrow).astype(jnp.bfloat16).astype(x.dtype)
    block = max(1, x.shape[-1] // 8)
    of_block = jnp.arange(x.shape[-1]) // block
    blocks = [jnp.where(of_block == number, x, 0) for number in range(-(-x.shape[-1] // block))]
    # A flax module may be called once alone.
    stacked = compute(jnp.concatenate([jnp.zeros_like(x), *blocks]))
    base, *results = jnp.split(stacked, len(blocks) + 1)
    total = base.astype(jnp.bfloat16)
    for result in results:
        total = total + (result - base).astype(jnp.bfloat16)
    return total.astype(base.dtype)


def _stale(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    if layer.name == "batch_norm":
        return compute(x, layer, dataclasses.replace(context, train=False))
    # The deviation of the sample before.
    axes = tuple(range(1, x.ndim)) if layer.name == "group_norm" else (-1,)
    spread = x.astype(jnp.float32).std(axes, keepdims=True) + 1e-6
    return (compute(x) * (spread / jnp.roll(spread, 1, axis=0))).astype(x.dtype)


def _other_gelu(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    return jax.nn.gelu(x, approximate=False)


def _wrong_stride(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    """The layer of x as read with a stride of rows that is one too long."""
    if x.ndim == 2:
        rows, size = x.shape
        at = (jnp.arange(rows)[:, None] * (size + 1) + jnp.arange(size)) % x.size
        return compute(x.reshape(-1)[at])
    length = x.shape[2] if x.ndim == 4 else x.shape[1]
    count = x.shape[1] if x.ndim == 4 else x.shape[0]
    at = (jnp.arange(count)[:, None] * (length + 1) + jnp.arange(length)) % (count * length)
    if x.ndim == 4:
        flat = x.reshape(x.shape[0], -1, x.shape[-1])
        return compute(flat[:, at].reshape(x.shape))
    return compute(x.reshape(-1, x.shape[-1])[at].reshape(x.shape))


FAULTS: dict[Fault, Callable[..., Any]] = {
    "epsilon": _epsilon,
    "wrong axis": _wrong_axis,
    "bf16 sum": _bf16_sum,
    "stale statistic": _stale,
    "other gelu": _other_gelu,
    "wrong stride": _wrong_stride,
}
FITS: dict[Fault, tuple[str, ...]] = {
    "epsilon": NORMS,
    "wrong axis": ("conv", "dense", *NORMS, "global_avg_pool", "flatten", "self_attention"),
    "bf16 sum": WEIGHTED,
    "stale statistic": NORMS,
    "other gelu": ("gelu",),
    "wrong stride": ("conv", "dense", "max_pool", "avg_pool", "self_attention", "flatten"),
}


def injections(folder: Path, count: int, seed: int = 0) -> list[Injection]:
    """Draw injections: of each fault about as many, over all networks, layers and types."""
    generator = random.Random(seed)
    by_fault: dict[Fault, list[Injection]] = {fault: [] for fault in FAULTS}
    for network in NETWORKS:
        forms = reference(network, folder).step.merge_passes().forms
        for path, form in forms.items():
            for fault, kinds in FITS.items():
                if form.kind in kinds:
                    # What a layer rounds in bfloat16 anyway is no fault there.
                    summed = fault != "bf16 sum" or form.kind in ("conv", "dense")
                    by_fault[fault] += [
                        Injection(network, dtype, fault, path, form.kind)
                        for dtype in ("float32", *(("bfloat16",) if summed else ()))
                    ]
    for drawn in by_fault.values():
        generator.shuffle(drawn)
    result: list[Injection] = []
    while len(result) < count and any(by_fault.values()):
        result += [drawn.pop() for drawn in by_fault.values() if drawn]
    return result[:count]


def inject(injection: Injection, folder: Path) -> Verdict:
    """Compare a side with a fault with the clean one."""
    clean = reference(injection.network, folder)
    network = clean.programs.config.network.clone(dtype=injection.dtype)
    config = dataclasses.replace(clean.programs.config, network=network)
    # Without the fault, and once for all.
    clean.compute_float64()
    clean.expected_in(network)
    with faulty(injection):
        found = clean.compare(LayerPrograms(config, clean.programs.device))
    named = found.findings[0].name.layer if found.findings else ""
    return Verdict(injection, effect_of(found, injection.path), named)


def effect_of(found: ForcedComparison, path: str) -> float:
    """The largest error of what a layer makes, over the expected one."""
    return max(one.ratio for one in found.errors if one.name.layer == path)


@dataclass(frozen=True)
class CleanPair:
    """Two clean sides that differ in type, layout and lowerings."""

    network: str
    dtype: str
    layout: str
    lowered: bool
    seed: int

    def __str__(self) -> str:
        how = "drawn lowerings" if self.lowered and self.layout == "nhwc" else self.layout
        return f"{self.network:8} {self.dtype:8} {how:16} seed {self.seed}"


def clean_pairs(folder: Path, count: int, seed: int = 0) -> list[CleanPair]:
    """Draw pairs: networks, types, layouts, lowerings and seeds."""
    generator = random.Random(seed)
    result = []
    for number in range(count):
        network = list(NETWORKS)[number % len(NETWORKS)]
        layers = subject(network, folder).step_config.network.layers
        layouts = ["nhwc", "chwn"] if find_layer_without_chwn(layers) is None else ["nhwc"]
        result.append(
            CleanPair(
                network,
                generator.choice(["float32", "bfloat16", "float16"]),
                generator.choice(layouts),
                generator.random() < 0.7,
                1 + number // len(NETWORKS) % 2,
            )
        )
    return result


def compare_clean(pair: CleanPair, folder: Path, draw: int = 0) -> ForcedComparison:
    """Compare the two sides of a clean pair."""
    clean = reference(pair.network, folder, pair.seed)
    network = clean.programs.config.network.clone(dtype=pair.dtype, layout=pair.layout)
    if pair.lowered and pair.layout == "nhwc":
        network = network.clone(policy=_drawn_lowerings(clean, network, draw))
    config = dataclasses.replace(clean.programs.config, network=network)
    return clean.compare(LayerPrograms(config, clean.programs.device))


def _drawn_lowerings(clean: ReferenceStep, network: Any, draw: int) -> Lowerings:
    """Any formula that fits for every convolution."""
    generator, recording = random.Random(draw), RecordingPolicy()
    config = dataclasses.replace(clean.programs.config, network=network.clone(policy=recording))
    one = clean.step.passes[0]
    variables = {"params": one.weights.params, "batch_stats": one.weights.batch_stats}
    rngs = {"dropout": one.portion.dropout}
    apply = partial(config.network.apply, train=True, mutable=["batch_stats"], rngs=rngs)
    jax.eval_shape(apply, variables, one.portion.images)  # records the problems
    chosen = []
    for problem in recording.problems:
        if problem.kind != "conv2d":
            continue
        fitting = [
            name for name, formula in CONVOLUTIONS[problem.role].items() if formula.fits(problem)
        ]
        chosen.append((str(problem), Lowering(generator.choice(fitting))))
    return Lowerings(tuple(chosen))


def main() -> int:
    """Print the table; the exit status is 1 where less is named rightly than is promised."""
    options = dict(arg.removeprefix("--").partition("=")[::2] for arg in sys.argv[1:])
    began, verdicts, named = time.monotonic(), list[Verdict](), 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        drawn = injections(folder, int(options.get("faults", 100)))
        pairs = clean_pairs(folder, int(options.get("clean", 50)))
        for number in range(max(len(drawn), 2 * len(pairs))):
            if number < len(drawn):
                verdicts.append(verdict := inject(drawn[number], folder))
                print(verdict, flush=True)
            if number % 2 == 0 and number // 2 < len(pairs):
                pair = pairs[number // 2]
                found = compare_clean(pair, folder, number)
                named += bool(found.findings)
                worst = max(found.errors, key=lambda one: one.score)
                told = f"{worst.name} {worst.ratio:.2f}, score {worst.score:.2f}"
                print(f"{pair!s:64} {told} {'NAMED' if found.findings else ''}", flush=True)
    counted = [one for one in verdicts if one.effect > 2]
    right = sum(one.is_right for one in counted)
    print(f"{right} of {len(counted)} whose effect is over twice the expected error named rightly")
    for fault in FAULTS:
        own = [one for one in counted if one.injection.fault == fault]
        every = sum(one.injection.fault == fault for one in verdicts)
        print(f"  {fault:16} {sum(one.is_right for one in own)} of {len(own)}, of {every} in all")
    print(f"{named} of {len(pairs)} clean pairs named; {time.monotonic() - began:.0f} s")
    return int(right < 0.95 * len(counted) or named > 0)


if __name__ == "__main__":
    sys.exit(main())
