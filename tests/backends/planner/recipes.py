"""Networks of the package as losses to plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from pipeline import load_recipe
from pipeline.backends.planner.traced_loss import LossToPlan, make_loss
from pipeline.data.targets import Targets
from pipeline.training.losses import TrainingObjective
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig
from tests.training.step_configs import read_image

Shape = tuple[int, ...]
GPT2 = ("model=gpt2", "model.dropout=0")


def network_to_plan(
    overrides: tuple[str, ...],
    classes: int,
    images: Shape,
    labels: Shape | None = None,
    *,
    sync_batch_norm: bool = False,
) -> tuple[LossToPlan, nn.Module]:
    """The loss of a network of the package, with momentum, on a global batch; and the network."""
    recipe = load_recipe("lenet5_digits", [*overrides])
    network = recipe.model.build(classes, "float32")
    variables = jax.eval_shape(
        lambda key: network.init(key, jnp.zeros((1, *images[1:])), train=False), jax.random.key(0)
    )
    params = variables["params"]
    config = StepConfig(
        network=network,
        inputs=read_image(images[1:]),
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
        jax.ShapeDtypeStruct(images, jnp.float32),
        jax.ShapeDtypeStruct(labels or images[:1], jnp.int32),
    )
    step = make_loss(overrides[0], config, state, batch, sync_batch_norm=sync_batch_norm)
    return step, network
