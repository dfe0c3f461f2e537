"""Parts of a state: their sizes, and updates with the bits of whole arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec
from jax.tree_util import register_dataclass

from pipeline.training.parallel.devices import provide_cpu_devices
from pipeline.training.parallel.fixed_sum import copy_unfused
from pipeline.training.parallel.state_sharing import StateSharing, find_sharded_dimension

DEVICES = 8
SHAPES = {"kernel": (24, 10), "bias": (24,), "conv": (3, 3, 4, 16), "odd": (7, 5)}


@register_dataclass
@dataclass(frozen=True)
class State:
    """The fields that a sharing reads."""

    params: Any
    opt_state: Any
    features: Any


@given(
    shape=st.lists(st.integers(0, 40), max_size=4).map(tuple), devices=st.sampled_from([1, 2, 6, 8])
)
def test_largest_divisible_dimension_is_sharded(shape: tuple[int, ...], devices: int) -> None:
    dimension = find_sharded_dimension(shape, devices)
    divided = [size for size in shape if size and size % devices == 0]
    if dimension is None:
        assert not divided
    else:
        assert shape[dimension] == max(divided)
        assert shape[dimension] not in shape[:dimension]


def run_updates(
    optimizer: optax.GradientTransformation, *, shares: bool
) -> tuple[State, Callable[[], str]]:
    """Return the state after three updates in a compiled loop, and the program's text."""
    provide_cpu_devices(DEVICES)
    devices = np.array(jax.devices("cpu")[:DEVICES])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    params, *gradients = (
        {name: rng.normal(size=shape).astype("f") for name, shape in SHAPES.items()}
        for _ in range(4)
    )
    state = State(params, optimizer.init(params), {})
    sharing = StateSharing(jax.eval_shape(lambda: state), DEVICES)
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *gradients)

    def update(state: State, gradients: Any) -> State:
        gradients = jax.tree.map(lambda g: g * jnp.float32(0.3), gradients)
        directions, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = jax.tree.map(lambda p, d: p - jnp.float32(0.01) * d, state.params, directions)
        return State(params, opt_state, {})

    def loop(state: State, stacked: Any, count: Any) -> State:
        compute = partial(sharing.update, update) if shares else update

        def body(carry: tuple[Any, State]) -> tuple[Any, State]:
            number, state = carry
            gradients = copy_unfused(jax.tree.map(lambda array: array[number], stacked))
            is_finite = jnp.isfinite(optax.tree.norm(gradients))
            updated = jax.lax.cond(
                is_finite, lambda state: compute(state, gradients), lambda state: state, state
            )
            return number + 1, updated

        return jax.lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), state))[1]

    whole = PartitionSpec()
    parts = sharing.specs if shares else whole
    on_mesh = jax.shard_map(
        loop, mesh=mesh, in_specs=(parts, whole, whole), out_specs=parts, check_vma=False
    )
    program = jax.jit(on_mesh).lower(state, stacked, np.int32(3)).compile()
    shardings = program.input_shardings[0]
    placed = jax.device_put((state, stacked, np.int32(3)), shardings)
    return program(*placed), program.as_text


OPTIMIZERS = {
    "adam": optax.scale_by_adam(),
    "clipped momentum": optax.chain(optax.clip_by_global_norm(0.5), optax.trace(0.9)),
    "clipped lamb": optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1),
        optax.scale_by_trust_ratio(),
    ),
    "centred gradients": optax.chain(optax.centralize(), optax.scale_by_lion()),
}


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs_of_module")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_and_unsharded_updates_have_the_same_bits(name: str) -> None:
    """For updates on parts, and for others, which read whole arrays."""
    whole, _ = run_updates(OPTIMIZERS[name], shares=False)
    parts, text = run_updates(OPTIMIZERS[name], shares=True)
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(parts), jax.tree.leaves(whole), strict=True
    ):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), jax.tree_util.keystr(
            path
        )
        shared = find_sharded_dimension(ours.shape, DEVICES) is not None
        size = prod(ours.addressable_shards[0].data.shape)
        assert size == (ours.size // DEVICES if shared else ours.size)
    gathers = text().count(" all-gather(")
    # 3 of 4 arrays are shared: parameters and one or two averages of Lion or LAMB.
    assert gathers == {"clipped lamb": 9, "centred gradients": 6}.get(name, 0)
