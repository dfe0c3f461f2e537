"""The pipeline as a library: `from pipeline import load_recipe, run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pipeline
from pipeline import api, load_recipe, run
from pipeline.core.errors import PipelineError, RecipeError
from pipeline.core.host.signals import Interrupted
from pipeline.stages.record.recorded_recipe import write_recipe
from tests import outcome
from tests.conftest import STEPS, TINY


def test_public_names() -> None:
    assert pipeline.__all__ == ["Interrupted", "Trainer", "load_recipe", "load_run", "run", "sink"]
    assert pipeline.Trainer.__name__ == "Trainer"
    assert pipeline.Interrupted is Interrupted
    with pytest.raises(AttributeError, match="has no attribute 'Runner'"):
        _ = pipeline.Runner  # type: ignore[attr-defined]


@pytest.mark.slow
def test_components_import_without_jax() -> None:
    """Recipes are checked without it."""
    script = (
        "import sys; from pipeline.api import *; import pipeline.api as p;"
        "assert all(hasattr(p, name) for name in p.__all__);"
        "print(sorted({'jax', 'flax', 'optax'} & {m.split('.')[0] for m in sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_layer_is_created_by_name() -> None:
    made = api.layer("conv", features=16, kernel=3)
    assert made.model_dump()["features"] == 16
    with pytest.raises(ValueError, match="there is no layer 'cnv'; choose from"):
        api.layer("cnv")
    with pytest.raises(ValueError, match="featurs"):
        api.layer("dense", featurs=3)


@pytest.mark.slow
def test_recipe_is_loaded_and_run(cache: Path, tmp_path: Path) -> None:
    recipe = load_recipe("lenet5_digits", [*TINY, STEPS, f"cache.root={cache}"])
    summary = run(recipe, tmp_path / "new" / "folder")
    assert (summary.status, summary.steps) == ("done", 45)
    assert summary.metrics["accuracy"] == summary.metrics["recall"]["micro"]
    assert outcome.read_summary(tmp_path / "new" / "folder")["metrics"] == summary.metrics


@pytest.mark.slow
def test_run_without_a_directory_creates_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    summary = run(load_recipe(overrides=[*TINY, "stages=[data]", f"cache.root={cache}"]))
    assert summary.run_dir is not None
    assert Path(summary.run_dir).parts[0] == "outputs"
    assert (tmp_path / summary.run_dir / "summary.json").is_file()


@pytest.mark.slow
def test_load_recipe_accepts_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [override /model: mlp]\ntrain: {steps: 3}\nseed: 5\n")
    recipe = load_recipe(str(file))
    assert (recipe.name, recipe.model.name, recipe.seed, recipe.train.steps) == (
        "mine",
        "mlp",
        5,
        3,
    )


@pytest.mark.slow
def test_recipe_error_has_every_problem() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_mnist", ["train.sink_sise=5", "train.batch_size=0"])
    assert isinstance(caught.value, PipelineError)
    assert len(caught.value.problems) == 2


@pytest.mark.slow
def test_recipe_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe().seed = 2


def test_import_loads_no_heavy_packages() -> None:
    script = "import sys, pipeline; print(sorted({m.split('.')[0] for m in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not {"jax", "hydra", "pydantic", "numpy"} & set(eval(result.stdout))


@pytest.mark.slow
def test_written_recipe_loads_as_the_same_recipe(tmp_path: Path) -> None:
    """A whole recipe stands for itself: no default shows through, whatever the components were."""
    first = load_recipe("mlp_quickstart", ["optimizer=adamw", "train.steps=7", "model=resnet20"])
    write_recipe(tmp_path, first)
    again = load_recipe(str(tmp_path / "recipe.yaml"))
    assert again == first
    assert load_recipe(str(tmp_path / "recipe.yaml"), ["optimizer=sgd"]).train.optimizer.lr == 0.01
