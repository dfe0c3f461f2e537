"""Steps of all networks of the zoo on both emulated chips: `python -m benchmarks.ascend_chips`.

Batch 32 on one device, O2, sinks of 1,000 steps. Nothing is measured. Prints the page
benchmarks/results/ascend_chips.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.measure import table
from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.pricing.traced_step import TracedStep, trace_step
from pipeline.backends.ascend.published.workloads import load_model_spec, trace_network
from pipeline.backends.ascend.report.priced_step import PricedStep
from pipeline.core.files.package_paths import CONF

CHIPS = ("ascend910", "atlas_a2")
BATCH = 32
CUSTOM = ("flax", "function", "keras", "layers", "onnx", "torch")
"""Files of conf/model that name no network."""
SHAPES: Mapping[str, tuple[int, ...]] = {
    "inception_v3": (299, 299, 3),
    "lenet5": (32, 32, 1),
    "mlp": (28, 28, 1),
    "resnet20": (32, 32, 3),
    "vit_tiny": (32, 32, 3),
    "wide_deep": (39, 1, 2),
    "wide_resnet40_10": (32, 32, 3),
    "xception": (299, 299, 3),
}
TOKENS = {"bert_base": (512, 2), "gpt2": (1024, 50257)}
"""Tokens of a sample, and classes."""


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
    return " x ".join(map(str, SHAPES.get(name, (224, 224, 3))))


def describe_step(step: PricedStep) -> str:
    """Return a step's time, interval and bound."""
    low, high = step.table_interval_ms
    return f"{step.step_ms:.2f}, {low:.2f} to {high:.2f}, {step.bound}"


def trace_zoo_network(name: str) -> TracedStep:
    """Return a step of a network with momentum."""
    if name in TOKENS:
        return trace_language_step(name, *TOKENS[name])
    shape = SHAPES.get(name, (224, 224, 3))
    if name == "unet":
        return trace_segmentation_step(name, shape)
    classes = 2 if name == "wide_deep" else 1000
    return trace_network(load_model_spec(name), BATCH, shape, classes)


def trace_language_step(name: str, tokens: int, classes: int) -> TracedStep:
    """Return a step on tokens: a class for each sample or, for GPT-2, for each token."""
    labels = (BATCH, tokens) if name == "gpt2" else (BATCH,)
    return _trace(name, of((BATCH, tokens)), of(labels), classes)


def trace_segmentation_step(name: str, shape: tuple[int, ...]) -> TracedStep:
    """Return a step on four images with a class for each pixel."""
    return _trace(name, of((4, *shape), jnp.float32), of((4, *shape[:2])), 2)


def of(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """Return an array of which only the shape is known."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _trace(name: str, samples: Any, labels: Any, classes: int) -> TracedStep:
    network = load_model_spec(name).build(classes, "float32")
    optimizer = optax.sgd(0.1, momentum=0.9)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = dict(jax.eval_shape(lambda x: network.init(rngs, x, True), samples))
    parameters = variables.pop("params")
    state = (parameters, jax.eval_shape(optimizer.init, parameters), variables)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        parameters, moments, statistics = state

        def loss(parameters: Any) -> tuple[jax.Array, Any]:
            logits, updated = network.apply(
                {"params": parameters, **statistics}, batch[0], True,
                mutable=list(statistics), rngs={"dropout": jax.random.key(1)},
            )  # fmt: skip
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
            return losses.mean(), dict(updated)

        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments, statistics), value

    return trace_step(step, state, (samples, labels), lambda state: state[0])


if __name__ == "__main__":
    main()
