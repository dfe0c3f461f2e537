"""Recipes whose numbers are in range one by one and make sizes that no machine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.compose import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import PipelineError, RunError
from tests import outcome
from tests.conftest import TINY
from tests.whole_run import run

LAYERS = "flatten, {name: dense, features: $classes}]"
NESTED = "{name: sequence, repeat: 1000, body: [{name: sequence, repeat: 1000, body: [relu]}]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["dataset.train_size=2000000000", "dataset.like=cifar10"],
            "would take 6,160.0 GB of memory",
        ),
        (
            ["dataset.train_size=1000000000000"],
            "train_size = 1000000000000: must be at most 2,147,",
        ),
        (["dataset.buckets=[[1000000,1000000]]"], "a padded batch of 16 would take 16,000.0 GB"),
        (
            ["model=mlp", "model.hidden=[2000000000,2000000000]"],
            "at most 10,000,000,000,000 param",
        ),
        (["model=efficientnet_b0", "model.width=1e30"], "model efficientnet: "),
        (["model=efficientnet_b0", "model.depth=99"], "more than 10,000 layers"),
        (["model=layers", f"model.layers=[{NESTED}, {LAYERS}"], "more than 10,000 layers"),
        (["model=resnet20", "model.blocks=[1000000000,3,3]"], "must be less than or equal to 1000"),
        (["model=vit_tiny", "model.patch=100000"], "model vit: "),
        (["train.batch_size=2000000000"], "must be at most the 96 training samples"),
    ],
)
def test_unbounded_sizes_are_reported(
    overrides: list[str], message: str, cache: Path, tmp_path: Path
) -> None:
    """Of weights and layers nothing is made before."""
    common = ["train.steps=2", "stages=[data,build]", f"cache.root={cache}"]
    with pytest.raises(PipelineError) as caught:
        run(load_recipe("lenet5_digits", [*TINY, *common, *overrides]), tmp_path / "run")
    assert message in str(caught.value)
    if (tmp_path / "run").exists():
        assert outcome.read_summary(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_weights_larger_than_memory_are_refused(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny()
    monkeypatch.setattr("pipeline.core.host.memory.read_available_bytes", lambda: 100_000)
    monkeypatch.setattr("pipeline.data.sources.synthetic.require_room", lambda *_: None)
    with pytest.raises(RunError, match=r"the weights and the optimizer of lenet5 would take 0.0 G"):
        run(recipe, tmp_path)
    assert outcome.read_summary(tmp_path)["exit_status"] == 1


@pytest.mark.slow
def test_override_given_twice_is_refused() -> None:
    """Each complaint of Hydra's asks for the other spelling."""
    with pytest.raises(PipelineError, match="the key exists already; leave out the"):
        load_recipe("lenet5_digits", ["+dataset.like=x", "+dataset.like=y"])
