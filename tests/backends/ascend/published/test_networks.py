"""The networks of published steps have the published numbers of parameters."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pipeline.backends.ascend.published.networks.parts import Net
from pipeline.backends.ascend.published.networks.workload_table import WORKLOADS

PIXELS = {"facenet": 160, "arc_resnet100": 112, "inception_resnet_v2": 299}
CLASSES = {"pspnet": 21, "ocrnet": 19, "ssd_mobilenet_v2": 81}
OTHER_THAN_PUBLISHED = {"ssd_mobilenet_v2": 0.08, "cmt_small": 0.05}
"""Relative differences that are larger than 3 %: the published figure is another release's."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_network_is_computed_and_has_the_parameters_that_are_published(name: str) -> None:
    work = WORKLOADS[name]
    sample = work.sample or (PIXELS.get(name, 224),) * 2 + (3,)
    classes = 21 if name.startswith("deeplab") else CLASSES.get(name, work.classes or 10)
    network = Net(partial(work.body, classes=classes))
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    inputs = jax.ShapeDtypeStruct((1, *sample), jnp.float32)
    variables = jax.eval_shape(lambda x: network.init(keys, x, True), inputs)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))
    if not work.parameters:
        assert count > 0
        return
    tolerance = OTHER_THAN_PUBLISHED.get(name, 0.03)
    assert count == pytest.approx(work.parameters * 1e6, rel=tolerance)
