"""Steps of all networks of the zoo on both emulated chips: `python -m benchmarks.ascend_chips`.

Batch 32 on one device, O2, sinks of 1,000 steps. Nothing is measured. Prints the page
benchmarks/results/ascend_chips.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from benchmarks.measure import table
from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.pricing.traced_step import TracedStep
from pipeline.backends.ascend.published.workloads import (
    describe_fields,
    describe_input,
    load_model_spec,
    trace_module,
)
from pipeline.backends.ascend.report.priced_step import PricedStep
from pipeline.core.files.paths import CONF
from pipeline.training.losses import CrossEntropy

CHIPS = ("ascend910", "atlas_a2")
BATCH = 32
CUSTOM = ("flax", "function", "keras", "layers", "onnx", "table", "torch")
"""Files of conf/model that name no network."""
SHAPES: Mapping[str, tuple[int, ...]] = {
    "inception_v3": (299, 299, 3),
    "lenet5": (32, 32, 1),
    "mlp": (28, 28, 1),
    "resnet20": (32, 32, 3),
    "vit_tiny": (32, 32, 3),
    "wide_resnet40_10": (32, 32, 3),
    "xception": (299, 299, 3),
}
TOKENS = {"bert_base": (512, 2), "decoder": (1024, 50257), "gpt2": (1024, 50257)}
"""Tokens of a sample, and classes."""
LABELS_BY_TOKEN = ("decoder", "gpt2")
FIELDS = 39
UNET_BATCH = 4


def main() -> None:
    """Print the page."""
    head = ("network", "sample", *(f"{chipset(name).name}: ms, interval, bound" for name in CHIPS))
    print("# The zoo on an Ascend 910A and an Atlas A2, modelled\n")
    print("    python -m benchmarks.ascend_chips\n")
    print("Batch 32 on one device, O2, a loop sink of 1,000 steps. Nothing here is measured. The")
    print(
        "interval has a probability of 80 %. The fit has no kernel and no step of the Atlas A2, so"
    )
    print("its intervals are wider. U-Net has a batch of 4.\n")
    print(table((*head, "ratio"), []), end="")
    for row in make_rows():
        print(f"| {' | '.join(row)} |", flush=True)


def make_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each network."""
    for file in sorted((CONF / "model").glob("*.yaml")):
        if file.stem in CUSTOM:
            continue
        traced = trace_zoo_network(file.stem)
        steps = [Pricing(traced, chipset(name)).price_step(ExecutionConfig()) for name in CHIPS]
        ratio = f"{steps[0].step_ms / steps[1].step_ms:.2f}"
        yield file.stem, describe_sample(file.stem), *map(describe_step, steps), ratio


def describe_sample(name: str) -> str:
    """Return the shape of a sample."""
    if name in TOKENS:
        return f"{TOKENS[name][0]} tokens"
    if name == "wide_deep":
        return f"{FIELDS} fields"
    return " x ".join(map(str, SHAPES.get(name, (224, 224, 3))))


def describe_step(step: PricedStep) -> str:
    """Return a step's time, interval and bound."""
    low, high = step.table_interval_ms
    return f"{step.step_ms:.2f}, {low:.2f} to {high:.2f}, {step.bound}"


def trace_zoo_network(name: str) -> TracedStep:
    """Return a step of a network with momentum and the mean cross entropy."""
    batch, shape, classes = BATCH, SHAPES.get(name, (224, 224, 3)), 1000
    inputs = describe_input(shape)
    positions: tuple[int, ...] = ()
    if name in TOKENS:
        tokens, classes = TOKENS[name]
        inputs = describe_input((tokens,), "int32")
        positions = (tokens,) if name in LABELS_BY_TOKEN else ()
    elif name == "wide_deep":
        inputs, classes = describe_fields(FIELDS), 2
    elif name == "unet":
        batch, classes, positions = UNET_BATCH, 2, shape[:2]
    labels = jax.ShapeDtypeStruct((batch, *positions), jnp.int32)
    loss = CrossEntropy(reduction="mean", smoothing=0.0, smoothing_convention="uniform").build()
    network = load_model_spec(name).build(classes, "float32")
    return trace_module(network, loss, inputs, labels, classes)


if __name__ == "__main__":
    main()
