"""The law of keys: no key of a recipe is accepted and read by nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import load_recipe, run
from pipeline.config.recipe import Recipe
from pipeline.core import registry
from pipeline.core.registry import component
from pipeline.training.optimizers.first_order import Sgd
from tests import recipe_keys
from tests.conftest import MLP, TINY
from tests.recipe_keys import (
    HOST_ONLY,
    PARTNERS,
    describe_host_only,
    explain_key,
    list_keys,
    list_unread_fields,
    observe,
)

SHORT = (
    "train.steps=12",
    "train.batch_size=14",  # 96 samples have a remainder
    "train.sink_size=6",
    "monitor.tensorboard=true",
    "eval.samples=8",
    "checkpoint.every_steps=3",
    "checkpoint.keep=2",
)
BASES: Mapping[str, tuple[str, ...]] = {
    "momentum": MLP,
    "adamw": (*MLP, "optimizer=adamw", "schedule=cosine", "train.clip.norm=1.0"),
    "exponential": (*MLP, "optimizer=rmsprop", "schedule=exponential"),
}
"""Small recipes whose keys are changed."""
SECTIONS = ("seed", "dataset", "model", "train", "checkpoint", "eval")
"""Sections whose keys are drawn; `python -m tests.recipe_keys` changes those of all."""
CERTAIN = ("error", "files", "lines", "metrics.jsonl", "evals.jsonl")
"""Parts of what is seen of a run."""
NUM_KEYS = 25
"""Keys that are drawn."""


class PlantedOptimizer(Sgd):
    """Gradient descent with a key that nothing reads."""

    name: Literal["planted"] = "planted"  # type: ignore[assignment]
    forgotten_factor: float = 0.5
    lr_factor: float = 0.5

    def build(self) -> Any:
        import optax

        return optax.chain(optax.scale(self.lr_factor), super().build())


@pytest.fixture
def planted() -> Iterator[None]:
    """The optimizer, among the components for a test."""
    component("optimizer")(PlantedOptimizer)
    yield
    del registry._components["optimizer"]["planted"]
    registry._reset_schemas()


def compose_base(name: str, cache_folder: Path | None) -> Recipe:
    """Compose a small recipe; `cache_folder` keeps its programs."""
    root = [] if cache_folder is None else [f"cache.root={cache_folder}"]
    return load_recipe("lenet5_digits", [*TINY, *BASES[name], *SHORT, *root])


@cache
def see_base(name: str, cache_folder: Path) -> tuple[Recipe, dict[str, Any]]:
    recipe = compose_base(name, cache_folder)
    observe(recipe)  # The first run of a machine also says what it measures.
    return recipe, observe(recipe)


def test_every_key_of_the_schema_is_read() -> None:
    unread = [name for name in list_unread_fields() if not name.startswith("Planted")]
    assert unread == []


def test_planted_key_of_the_schema_is_unread() -> None:
    assert not recipe_keys.is_read(PlantedOptimizer, "forgotten_factor")


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_recipe_is_seen_the_same_twice(cache: Path, name: str) -> None:
    """Else every key would seem to show."""
    recipe, before = see_base(name, cache)
    assert observe(recipe) == before


@pytest.fixture(scope="module")
def weights(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights can be loaded."""
    folder = tmp_path_factory.mktemp("weights") / "run"
    run(compose_base("momentum", cache), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTNERS)
def test_key_shows_with_the_keys_that_it_needs(cache: Path, weights: Path, name: str) -> None:
    partners, value = PARTNERS[name]
    keys = [key.replace("WEIGHTS", str(weights)) for key in partners]
    network = () if "model=lenet5" in keys else MLP
    keys = [*TINY, *network, *SHORT, *keys, f"cache.root={cache}"]
    before, after = (
        observe(load_recipe("lenet5_digits", [*keys, *changed]))
        for changed in ((), (f"{name}={value}",))
    )
    for seen in (before, after):  # Other lines depend on times.
        seen["lines"] = [line for line in seen.get("lines", []) if line.startswith("warning")]
    assert any(before.get(part) != after.get(part) for part in CERTAIN)


@pytest.mark.slow
@settings(max_examples=NUM_KEYS, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_changed_key_is_observable(cache: Path, data: st.DataObject) -> None:
    """Or refused, or listed with its reason."""
    recipe, before = see_base(data.draw(st.sampled_from(sorted(BASES))), cache)
    seen = [key for key in list_keys(recipe) if describe_host_only(key) is None]
    keys = [key for key in seen if key.path[0] in SECTIONS]
    key = data.draw(st.sampled_from(keys))
    assert explain_key(recipe, key, before) is not None, f"{key}: nothing shows its change"


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(("name", "shows"), [("forgotten_factor", False), ("lr_factor", True)])
def test_planted_key_shows_only_if_it_is_read(cache: Path, name: str, shows: bool) -> None:
    keys = [*TINY, *MLP, *SHORT, f"cache.root={cache}"]
    recipe = load_recipe("lenet5_digits", [*keys, "optimizer=planted", "train.optimizer.lr=0.1"])
    (key,) = [key for key in list_keys(recipe) if key.path[-1] == name]
    observe(recipe)  # The first run of a machine also says what it measures.
    assert (explain_key(recipe, key, observe(recipe)) is not None) is shows


def test_host_only_keys_exist_and_have_reasons(cache: Path) -> None:
    recipe = compose_base("momentum", cache)
    names = [f"{key}." for key in list_keys(recipe)]
    assert all(any(key.startswith(f"{name}.") for key in names) for name in HOST_ONLY)
    assert all(len(reason) > 10 for reason in HOST_ONLY.values())
