from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from pipeline.config.recipe import Recipe
from pipeline.models.lowerings.problem import DEFAULTS
from pipeline.stages.compile import make_program_key
from pipeline.training.losses import CrossEntropy
from pipeline.training.step_config import TracedLowerings

PROCESS: dict[str, Any] = {
    "code": {"sha256": "c0de"},
    "versions": {"jax": "1"},
    "settings": {},
    "plugins": {},
    "machine": dict.fromkeys(("libc", "processor", "cores", "device", "instructions"), "x"),
    "data": {"train": {"image": {"sha256": "da7a", "of": "all"}}},
}


def key(
    recipe: Recipe, *path: str, value: Any = None, policy: str = "", lowerings: Any = None
) -> str | None:
    """The key, with one entry of the provenance changed, or lowerings."""
    process = copy.deepcopy(PROCESS)
    if path:
        section = process
        for name in path[:-1]:
            section = section[name]
        section[path[-1]] = value
    network = SimpleNamespace(layout="nhwc", policy=policy)
    step_config = SimpleNamespace(network=network, lowerings=lowerings)
    built: Any = SimpleNamespace(step_config=step_config, single_steps=False)
    return make_program_key(process, recipe, built)


def test_key_ignores_uncompiled_settings(tiny: Callable[..., Recipe]) -> None:
    first = key(tiny())
    assert first is not None
    assert first == key(tiny("name=other", "checkpoint.keep=2"))
    assert first == key(tiny(), "machine", "memory_bytes", value=1)


@pytest.mark.parametrize(
    "path",
    [
        ("code", "sha256"),
        ("versions", "jax"),
        ("settings", "XLA_FLAGS"),
        ("machine", "instructions"),
        ("data", "train", "image", "sha256"),
    ],
    ids=".".join,
)
def test_key_depends_on_each_part_of_the_origin(
    path: tuple[str, ...], tiny: Callable[..., Recipe]
) -> None:
    assert key(tiny(), *path, value="other") != key(tiny())


def test_key_depends_on_the_recipe_and_its_lowerings(tiny: Callable[..., Recipe]) -> None:
    keys = [key(tiny()), key(tiny("train.batch_size=8")), key(tiny(), policy="winograd4")]
    keys.append(key(tiny(), lowerings=TracedLowerings(DEFAULTS, "chwn")))
    assert len(set(keys)) == len(keys)


def test_sampled_data_has_no_key(tiny: Callable[..., Recipe]) -> None:
    assert key(tiny(), "plugins", value={"mine": {}}) is None
    assert key(tiny(), "data", "train", "image", "of", value="32 of 60,000") is None

    class Own(CrossEntropy):
        name: Literal["cross_entropy"] = "cross_entropy"

    recipe = tiny()
    train = recipe.train.model_copy(update={"loss": Own.model_construct(**dict(recipe.train.loss))})
    assert key(recipe.model_copy(update={"train": train})) is None

    graph = tiny().model.model_copy(update={"graph": Path("net.torch.json")})
    assert key(tiny().model_copy(update={"model": graph})) is None
