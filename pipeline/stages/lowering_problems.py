"""Problems for the lowering stage: those of a network, and the time of its gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.imported.with_lowerings import KeptOperation, list_kept, scope_root
from pipeline.models.lowerings.problem.lowering import (
    ROLES,
    LoweringPolicy,
    Problem,
    RecordingPolicy,
)
from pipeline.models.lowerings.problem.problems import ConvolutionProblem, DenseProblem
from pipeline.models.lowerings.tune.machine import describe_device
from pipeline.models.lowerings.tune.timing import Timer, random_operands
from pipeline.models.modules.layout import LaidOutNetwork
from pipeline.training.state import StepConfig, TrainState
from pipeline.training.step import image_shape


def list_problems(
    parts: StepConfig, state: TrainState, train_batch: int, eval_batch: int
) -> tuple[Problem, ...]:
    """List every computation of a step or an evaluation that can be lowered, by tracing.

    Gradients belong to training alone; the gradient of the input images is never computed.
    """
    problems: list[Problem] = []
    for image in parts.train_images or (parts.image,):
        trained = _traced(replace(parts, image=image), state, train_batch, True)
        problems += [p for p in trained if not _reads_input(p, image_shape(image))]
    evaluated = _traced(parts, state, eval_batch, False)
    return tuple(dict.fromkeys([*problems, *(p for p in evaluated if p.role == "forward")]))


def list_kept_operations(
    parts: StepConfig, state: TrainState, batch: int
) -> tuple[KeptOperation, ...]:
    """List convolutions and max pooling of a custom network that nothing replaces."""
    images = jax.ShapeDtypeStruct((batch, *image_shape(parts.image)), jnp.float32)
    forward, root = _forward(parts.network, True), scope_root(parts.network)
    return list_kept(forward, images, state.params, state.batch_stats, root=root)


def with_policy(parts: StepConfig, policy: LoweringPolicy) -> StepConfig:
    """Return the configuration of a step whose network is computed as a policy chooses."""
    if parts.lowerings is not None:
        return replace(parts, lowerings=policy)
    return replace(parts, network=parts.network.clone(policy=policy))


def _traced(parts: StepConfig, state: TrainState, batch: int, train: bool) -> tuple[Problem, ...]:
    listing = RecordingPolicy()
    _trace(parts, state, batch, train, listing)
    return tuple(listing.problems)


def _trace(
    parts: StepConfig, state: TrainState, batch: int, train: bool, policy: LoweringPolicy
) -> None:
    images = jax.ShapeDtypeStruct((batch, *image_shape(parts.image)), jnp.float32)
    parts = with_policy(parts, policy)
    forward = parts.lower(_forward(parts.network, train))
    jax.eval_shape(forward, images, state.params, state.batch_stats)


def _forward(network: nn.Module, train: bool) -> Callable[[Array, Any, Any], Any]:
    """Return the function (images, params, batch_stats) -> (logits, changed statistics)."""

    def call(images: Array, params: Any, batch_stats: Any) -> Any:
        weights, key = {"params": params, "batch_stats": batch_stats}, jax.random.key(0)
        return network.apply(
            weights, images, train=train, mutable=["batch_stats"], rngs={"dropout": key}
        )

    return call


def _reads_input(problem: Problem, image: tuple[int, ...]) -> bool:
    """Whether this is the gradient of the network's own input, which is never computed."""
    if problem.role != ROLES[1]:
        return False
    if isinstance(problem, ConvolutionProblem):
        return (*problem.window.sizes, problem.channels) == image
    return isinstance(problem, DenseProblem) and problem.channels == prod(image)


def time_gradients_us(
    network: nn.Module, parts: StepConfig, state: TrainState, batch: int, device: jax.Device
) -> float:
    """Time the gradients of all parameters in a loop, on random numbers, in microseconds."""
    forward = _forward(network, True)

    def loss(params: Any, images: Array, batch_stats: Any) -> Array:
        logits, _ = forward(images, params, batch_stats)
        return jnp.square(logits).mean()

    def gradients(operands: tuple[Array, Any, Any]) -> Any:
        images, params, batch_stats = operands
        return jax.grad(loss)(params, images, batch_stats)

    shapes = (state.params, state.batch_stats)
    weights = jax.tree.map(lambda shape: random_operands(shape.shape, shape.dtype), shapes)
    images = random_operands((batch, *image_shape(parts.image)), "float32")
    return Timer((images, *weights), device).time_us(gradients)


def layout_key(network: LaidOutNetwork, parts: StepConfig, batch: int, device: jax.Device) -> str:
    """Return the key of a network, its images and the device in a knowledge bank."""
    image = image_shape(parts.image)
    digest = hashlib.sha256(network.structure(image).encode()).hexdigest()[:16]
    shape = "x".join(map(str, (batch, *image)))
    return f"network {digest} {shape} {network.dtype} on {describe_device(device)}"
