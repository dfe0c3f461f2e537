"""Networks of the package as losses to plan."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from pipeline import load_recipe
from pipeline.backends.planner.blocks import LossToPlan, make_loss
from pipeline.data.columns import ColumnSpec, Targets
from pipeline.data.inputs import resolve_inputs
from pipeline.training.losses import TrainingObjective
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig
from pipeline.training.update import shape_inputs

Shape = tuple[int, ...]
GPT2 = ("model=gpt2", "model.dropout=0")
_COLUMNS = {2: "tokens", 4: "image"}
"""Columns by the number of axes of a batch."""
_INTEGERS = ("tokens", "field_index")


def network_to_plan(
    overrides: tuple[str, ...],
    classes: int,
    samples: Shape | Mapping[str, Shape],
    labels: Shape | None = None,
    *,
    sync_batch_norm: bool = False,
) -> tuple[LossToPlan, nn.Module]:
    """The loss of a network of the package, with momentum, on a global batch; and the network.

    `samples` is the shape of a batch of images (4 axes) or tokens (2 axes), or shapes by column.
    """
    shapes = samples if isinstance(samples, Mapping) else {_COLUMNS[len(samples)]: samples}
    specs = {
        name: ColumnSpec(shape[1:], "int32" if name in _INTEGERS else "float32")
        for name, shape in shapes.items()
    }
    inputs = resolve_inputs(None, tuple(shapes) if len(shapes) > 1 else None, specs, tuple(shapes))
    batch_size = next(iter(shapes.values()))[0]
    recipe = load_recipe("lenet5_digits", [*overrides])
    network = recipe.model.build(classes, "float32")
    variables = jax.eval_shape(
        lambda key, one: network.init(key, one, train=False),
        jax.random.key(0),
        shape_inputs(inputs, 1),
    )
    params = variables["params"]
    config = StepConfig(
        network=network,
        inputs=inputs,
        targets=Targets(tuple(map(str, range(classes)))),
        train_ops=(),
        eval_ops=(),
        objective=TrainingObjective(recipe.train.loss.build()),
        optimizer=optax.sgd(0.1, momentum=0.9),
    )
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=params,
        collections={name: tree for name, tree in variables.items() if name != "params"},
        opt_state=jax.eval_shape(config.optimizer.init, params),
        features={},
    )
    batch = (
        shape_inputs(inputs, batch_size),
        jax.ShapeDtypeStruct(labels or (batch_size,), jnp.int32),
    )
    step = make_loss(overrides[0], config, state, batch, sync_batch_norm=sync_batch_norm)
    return step, network
