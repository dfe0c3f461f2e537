"""Does the comparison name the layer with a fault? Faults in single layers of three networks.

    python -m tests.injected_layers [--faults=100] [--clean=50]

A faulty step is compared with a clean one, in float32 and with bfloat16 against float32. The
faults: another epsilon, a wrong axis, a sum in bfloat16, stale statistics, the other gelu, a wrong
stride. Clean pairs differ in precision, layout, lowerings, state and batch. Prints the effect of
each injection (its error over the expected error) and the layer that the comparison named.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pipeline.data.batch import Batch
from pipeline.inspect.compare.layer_errors import ForcedComparison, ReferenceStep
from pipeline.inspect.dumps.dump_step import capture_step
from pipeline.inspect.dumps.layer_programs import QUICK, LayerPrograms, Weights
from pipeline.models.lowerings.candidates import CONVOLUTIONS
from pipeline.models.lowerings.problem import Lowering, Lowerings, RecordingPolicy
from pipeline.models.modules.apply_layers import find_layer_without_chwn
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig
from tests.patched_layers import build_silently, patch_layers

TRAINED_STEPS = 4
"""Training steps of a network before it is compared."""

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
    """A fault in the layer at `path`; the faulty step computes in `dtype`."""

    network: str
    dtype: str
    fault: Fault
    path: str
    kind: str

    def __str__(self) -> str:
        return f"{self.network:8} {self.dtype:8} {self.fault:16} {self.path}"


@dataclass(frozen=True)
class Verdict:
    """The error of an injection over the expected error, and the layer that was named."""

    injection: Injection
    effect: float
    named: str
    """Empty if no layer was named."""

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
def train_subject(network: str, folder: Path, seed: int = 1) -> Subject:
    """Train a network of NETWORKS on the tiny dataset for a few steps."""
    dataset, built = build_silently(folder, [*NETWORKS[network], f"seed={seed}"])
    order = dataset.train_order.batches(0, TRAINED_STEPS + 1)

    def make_batch(number: int) -> Batch:
        rows = order.indices[number]
        columns = {name: jnp.asarray(c[rows]) for name, c in dataset.train.columns.items()}
        epochs = jnp.asarray(order.epochs[number])
        count = jnp.int32(order.counts[number])
        return Batch(columns, jnp.asarray(built.seed), epochs, jnp.asarray(rows), count)

    step = jax.jit(built.step.step, compiler_options=QUICK)
    state = jax.jit(built.step.init)(built.seed)
    for number in range(TRAINED_STEPS):
        state, _ = step(state, make_batch(number), built.learning_rates)
    return Subject(built.step_config, state, make_batch(TRAINED_STEPS))


@cache
def capture_reference(network: str, folder: Path, seed: int = 1) -> ReferenceStep:
    """Capture the clean step of a network in float32."""
    subject = train_subject(network, folder, seed)
    programs = LayerPrograms(subject.step_config, jax.devices("cpu")[0])
    weights = Weights.of(subject.state)
    step = capture_step(programs, weights, subject.batch, int(subject.state.step))
    return ReferenceStep(programs, step)


def inject_fault(injection: Injection) -> AbstractContextManager[None]:
    """Compute one layer wrongly in programs that are traced in the body."""
    compute_wrongly = FAULTS[injection.fault]

    def apply_faulty(apply_layer: Any, layer: Any, x: Any, context: Any) -> Any:
        if "/".join(context.path) != injection.path:
            return apply_layer(layer, x, context)

        def compute(x: Any, layer: Any = layer, context: Any = context) -> Any:
            return apply_layer(layer, x, context)

        return compute_wrongly(compute, layer, x, context)

    return patch_layers(apply_faulty)


Compute = Callable[..., Any]


def _change_epsilon(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    return compute(x, layer.model_copy(update={"epsilon": 0.1}))


def _reduce_wrong_axis(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
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


def _sum_in_bf16(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    """Add the results of eight blocks of channels in bfloat16."""
    if layer.name not in ("conv", "dense"):
        narrow = x.astype(jnp.bfloat16).astype(x.dtype)
        return compute(narrow).astype(jnp.bfloat16).astype(x.dtype)
    block = max(1, x.shape[-1] // 8)
    block_numbers = jnp.arange(x.shape[-1]) // block
    blocks = [
        jnp.where(block_numbers == number, x, 0) for number in range(-(-x.shape[-1] // block))
    ]
    # A flax module may be called only once.
    stacked = compute(jnp.concatenate([jnp.zeros_like(x), *blocks]))
    base, *results = jnp.split(stacked, len(blocks) + 1)
    total = base.astype(jnp.bfloat16)
    for result in results:
        total = total + (result - base).astype(jnp.bfloat16)
    return total.astype(base.dtype)


def _use_stale_statistic(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    if layer.name == "batch_norm":
        return compute(x, layer, dataclasses.replace(context, train=False))
    # The deviation of the previous sample.
    axes = tuple(range(1, x.ndim)) if layer.name == "group_norm" else (-1,)
    spread = x.astype(jnp.float32).std(axes, keepdims=True) + 1e-6
    return (compute(x) * (spread / jnp.roll(spread, 1, axis=0))).astype(x.dtype)


def _compute_exact_gelu(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    return jax.nn.gelu(x, approximate=False)


def _read_wrong_stride(compute: Compute, layer: Any, x: Any, context: Any) -> Any:
    """Read x with a stride of rows that is one element too long."""
    if x.ndim == 2:
        rows, size = x.shape
        positions = (jnp.arange(rows)[:, None] * (size + 1) + jnp.arange(size)) % x.size
        return compute(x.reshape(-1)[positions])
    length = x.shape[2] if x.ndim == 4 else x.shape[1]
    count = x.shape[1] if x.ndim == 4 else x.shape[0]
    positions = jnp.arange(count)[:, None] * (length + 1) + jnp.arange(length)
    positions %= count * length
    if x.ndim == 4:
        flat = x.reshape(x.shape[0], -1, x.shape[-1])
        return compute(flat[:, positions].reshape(x.shape))
    return compute(x.reshape(-1, x.shape[-1])[positions].reshape(x.shape))


FAULTS: dict[Fault, Callable[..., Any]] = {
    "epsilon": _change_epsilon,
    "wrong axis": _reduce_wrong_axis,
    "bf16 sum": _sum_in_bf16,
    "stale statistic": _use_stale_statistic,
    "other gelu": _compute_exact_gelu,
    "wrong stride": _read_wrong_stride,
}
FITS: dict[Fault, tuple[str, ...]] = {
    "epsilon": NORMS,
    "wrong axis": ("conv", "dense", *NORMS, "global_avg_pool", "flatten", "self_attention"),
    "bf16 sum": WEIGHTED,
    "stale statistic": NORMS,
    "other gelu": ("gelu",),
    "wrong stride": ("conv", "dense", "max_pool", "avg_pool", "self_attention", "flatten"),
}


def draw_injections(folder: Path, count: int, seed: int = 0) -> list[Injection]:
    """Draw about equally many injections of each fault, over all networks, layers and dtypes."""
    generator = random.Random(seed)
    by_fault: dict[Fault, list[Injection]] = {fault: [] for fault in FAULTS}
    for network in NETWORKS:
        forms = capture_reference(network, folder).step.merge_passes().forms
        for path, form in forms.items():
            for fault, kinds in FITS.items():
                if form.kind in kinds:
                    # A layer that rounds in bfloat16 anyway has no such fault.
                    fits_bf16 = fault != "bf16 sum" or form.kind in ("conv", "dense")
                    by_fault[fault] += [
                        Injection(network, dtype, fault, path, form.kind)
                        for dtype in (("float32", "bfloat16") if fits_bf16 else ("float32",))
                    ]
    for injections in by_fault.values():
        generator.shuffle(injections)
    result: list[Injection] = []
    while len(result) < count and any(by_fault.values()):
        result += [injections.pop() for injections in by_fault.values() if injections]
    return result[:count]


def inject(injection: Injection, folder: Path) -> Verdict:
    """Compare a faulty step with the clean step."""
    clean = capture_reference(injection.network, folder)
    network = clean.programs.config.network.clone(dtype=injection.dtype)
    config = dataclasses.replace(clean.programs.config, network=network)
    # Cached for all injections, so computed before the fault is there.
    clean.compute_float64()
    clean.expected_in(network)
    with inject_fault(injection):
        comparison = clean.compare(LayerPrograms(config, clean.programs.device))
    named = comparison.findings[0].name.layer if comparison.findings else ""
    return Verdict(injection, measure_effect(comparison, injection.path), named)


def measure_effect(comparison: ForcedComparison, path: str) -> float:
    """Return the largest error of a layer's tensors over the expected error."""
    return max(error.ratio for error in comparison.errors if error.name.layer == path)


@dataclass(frozen=True)
class CleanPair:
    """Two clean steps that differ in dtype, layout and lowerings."""

    network: str
    dtype: str
    layout: str
    lowered: bool
    seed: int

    def __str__(self) -> str:
        form = "drawn lowerings" if self.lowered and self.layout == "nhwc" else self.layout
        return f"{self.network:8} {self.dtype:8} {form:16} seed {self.seed}"


def draw_clean_pairs(folder: Path, count: int, seed: int = 0) -> list[CleanPair]:
    """Draw networks, dtypes, layouts, lowerings and seeds of pairs."""
    generator = random.Random(seed)
    result = []
    for number in range(count):
        network = list(NETWORKS)[number % len(NETWORKS)]
        layers = train_subject(network, folder).step_config.network.layers
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
    """Compare the two steps of a clean pair."""
    clean = capture_reference(pair.network, folder, pair.seed)
    network = clean.programs.config.network.clone(dtype=pair.dtype, layout=pair.layout)
    if pair.lowered and pair.layout == "nhwc":
        network = network.clone(policy=_draw_lowerings(clean, network, draw))
    config = dataclasses.replace(clean.programs.config, network=network)
    return clean.compare(LayerPrograms(config, clean.programs.device))


def _draw_lowerings(clean: ReferenceStep, network: Any, draw: int) -> Lowerings:
    """Draw a formula that fits each convolution."""
    generator = random.Random(draw)
    recording = RecordingPolicy()
    config = dataclasses.replace(clean.programs.config, network=network.clone(policy=recording))
    first_pass = clean.step.passes[0]
    weights = first_pass.weights
    variables = {"params": weights.params, **weights.collections}
    rngs = {"dropout": first_pass.portion.dropout}
    apply = partial(config.network.apply, train=True, mutable=["batch_stats"], rngs=rngs)
    jax.eval_shape(apply, variables, first_pass.portion.inputs)  # records the problems
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
    """Print the table; the exit status is 1 if fewer faults are named rightly than promised."""
    options = dict(arg.removeprefix("--").partition("=")[::2] for arg in sys.argv[1:])
    start_s = time.monotonic()
    verdicts: list[Verdict] = []
    num_named = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        injections = draw_injections(folder, int(options.get("faults", 100)))
        pairs = draw_clean_pairs(folder, int(options.get("clean", 50)))
        for number in range(max(len(injections), 2 * len(pairs))):
            if number < len(injections):
                verdicts.append(inject(injections[number], folder))
                print(verdicts[-1], flush=True)
            if number % 2 == 0 and number // 2 < len(pairs):
                pair = pairs[number // 2]
                comparison = compare_clean(pair, folder, number)
                num_named += bool(comparison.findings)
                worst = max(comparison.errors, key=lambda error: error.score)
                text = f"{worst.name} {worst.ratio:.2f}, score {worst.score:.2f}"
                print(f"{pair!s:64} {text} {'NAMED' if comparison.findings else ''}", flush=True)
    counted = [verdict for verdict in verdicts if verdict.effect > 2]
    right = sum(verdict.is_right for verdict in counted)
    print(f"{right} of {len(counted)} whose effect is over twice the expected error named rightly")
    for fault in FAULTS:
        hits = [verdict.is_right for verdict in counted if verdict.injection.fault == fault]
        total = sum(verdict.injection.fault == fault for verdict in verdicts)
        print(f"  {fault:16} {sum(hits)} of {len(hits)}, of {total} in all")
    print(f"{num_named} of {len(pairs)} clean pairs named; {time.monotonic() - start_s:.0f} s")
    return int(right < 0.95 * len(counted) or num_named > 0)


if __name__ == "__main__":
    sys.exit(main())
