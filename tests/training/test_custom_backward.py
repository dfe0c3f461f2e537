"""A custom backward pass: the documents' sampler, and training through it (M-09)."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests import outcome
from tests.conftest import ROOT, TINY
from tests.training.sampled_loss import SampledMse, draw, loss_of, places_of, sample
from tests.training.test_step import make_batch, make_step, start

X = jnp.arange(10.0).reshape(2, 5)


class FiveOutputs(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        return nn.Dense(5)(images.reshape(images.shape[0], -1))


def plainly(x: jax.Array) -> jax.Array:
    """The same values in jax alone, which has a backward pass for them."""
    return jnp.take_along_axis(x, places_of(x.shape[0]), axis=1)


def test_gradient_counts_the_draws_of_each_position() -> None:
    gradient = jax.jit(jax.grad(lambda x: sample(x).sum()))(X)
    assert gradient.tolist() == [[0, 1, 0, 2, 0], [0, 2, 0, 0, 1]]


@pytest.mark.slow
def test_numpy_callback_has_no_gradient_without_custom_backward() -> None:
    """MindSpore gives zeros there, and so does jax where it is configured to; else it refuses."""
    stopped = jax.grad(lambda x: draw(jax.lax.stop_gradient(x)).sum())(X)
    assert not stopped.any()
    with pytest.raises(ValueError, match="callbacks do not support JVP"):
        jax.grad(lambda x: draw(x).sum())(X)


@pytest.mark.slow
def test_gradient_matches_finite_differences() -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4, 5)).astype(np.float32)
    dout = generator.standard_normal((4, 3)).astype(np.float32)
    gradient = jax.vjp(sample, jnp.asarray(x))[1](jnp.asarray(dout))[0]
    for row, column in np.ndindex(x.shape):
        shifted = x.copy()
        shifted[row, column] += 1e-2
        difference = (np.asarray(draw(shifted)) - np.asarray(draw(x))) / np.float32(1e-2)
        assert float(gradient[row, column]) == pytest.approx((difference * dout).sum(), abs=1e-3)


@pytest.mark.slow
def test_training_matches_the_gradient_of_jax() -> None:
    """Ten steps of the actual training step, compiled."""
    losses = {}
    for name, take in (("custom", sample), ("jax", plainly)):
        loss = functools.partial(loss_of, take)
        loss = SampledMse().build() if take is sample else loss
        step = make_step(loss=loss, network=FiveOutputs(), classes=5)
        state, result = start(step), []
        for _ in range(10):
            state, record = step.step(state, make_batch(), jnp.full(10, 0.05))
            result.append(float(record.loss))
        losses[name] = result
    np.testing.assert_allclose(losses["custom"], losses["jax"], rtol=1e-5)
    assert losses["custom"][-1] < losses["custom"][0] / 2


@pytest.mark.slow
def test_plugin_loss_is_used_by_a_recipe(
    command: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by its entry point, checked, trained with inside of sinks."""
    info = tmp_path / "site" / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[pipeline.components]\nmine = tests.training.sampled_component\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))
    (tmp_path / "sampled.yaml").write_text("name: sampled_mse\nreduction: mean\n")
    run = ["+recipe=lenet5_digits", *TINY, "loss=./sampled.yaml", "train.steps=12"]
    done = command([*run, "train.sink_size=7", "hydra.run.dir=outputs/run"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({line["loss"] for line in outcome.metrics(tmp_path / "outputs" / "run")}) == 12


EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "losses.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.slow
def test_document_examples_run() -> None:
    """A custom loss is a component, and the sampler gives what is printed there."""
    use = """
import jax.numpy as jnp
from pipeline.core.registry import list_components
print(list_components("loss")["capped"](most=1.75).build()(jnp.array([[3.0, 0.0]]), jnp.array([0])))
"""
    assert len(EXAMPLES) == 2
    said = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXAMPLES[0] + use + EXAMPLES[1]],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert said.returncode == 0, said.stderr
    # The first output's error of 2 is capped, the second's is 0: their mean.
    assert said.stdout.split("\n")[0] == "[0.875]"
    assert "[[0. 1. 0. 2. 0.]\n [0. 2. 0. 0. 1.]]" in said.stdout
