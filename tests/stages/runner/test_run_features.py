"""Features of runs: their list, their moments, and those of plug-ins."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest

from pipeline import load_recipe
from pipeline.api import RunFeature, RunFeatureSpec, component
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.engine.callbacks.callback import Monitor
from pipeline.stages.runner import run_features
from pipeline.stages.runner.run_features import RUN_FEATURES, Listed, RunFeatures, open_features
from tests.conftest import ROOT
from tests.whole_run import run

Compose = Callable[..., Recipe]
MOMENTS = [name for name in vars(RunFeature) if not name.startswith("_") and name != "restore_s"]
"""The moments of a run, in the order of the class."""
USES = {
    "train.resume": ["train.resume=auto"],
    "launch": ["launch=slurm", "parallel.mode=data"],
    "launch.processes": ["launch=local", "launch.processes=2", "parallel.mode=data"],
    "privacy": [
        "+privacy={noise: 1.0, delta: 1.0e-3, expected_batch_size: 24, accountant: rdp}",
        "train.batch_size=96",
        "model=mlp",
        "monitor.sample_images=0",
    ],
    "parallel.mode": ["parallel.mode=auto", "parallel.devices=2"],
    "device": ["device=ascend910"],
    "train.memory": ["train.memory=auto"],
    "train.sink_size": ["train.sink_size=auto"],
    "train.minutes": ["train.minutes=5", "train.epochs=null"],
    "profile.mode": ["profile.mode=on"],
    "dump.steps": ["dump.steps=3"],
    "checkpoint.prefix": ["checkpoint.directory=there"],
    "checkpoint.mirror": ["checkpoint.mirror=s3://bucket/run"],
    "eval.robustness": ["++eval.robustness=[{attack: pgd, norm: linf, radius: 0.1}]"],
}
"""Overrides by which a recipe uses a feature. `stages` and `privacy.audit` are tested below."""


def test_each_listed_feature_overrides_moments() -> None:
    """A method of another name would never be called."""
    for listed in RUN_FEATURES:
        module, _, name = listed.place.partition(":")
        feature = getattr(import_module(module), name)
        assert issubclass(feature, RunFeature)
        public = {method for method in vars(feature) if not method.startswith("_")}
        # A feature may be a monitor, too, which the training loop calls.
        events = set(vars(Monitor)) if issubclass(feature, Monitor) else set()
        assert public, listed.place
        assert public <= {*MOMENTS, "restore_s", *events}, listed.place


def test_several_features_have_every_moment() -> None:
    assert [name for name in MOMENTS if name not in vars(RunFeatures)] == []
    for name in MOMENTS:
        moment, several = (inspect.getattr_static(c, name) for c in (RunFeature, RunFeatures))
        if not isinstance(moment, property):
            assert inspect.signature(moment) == inspect.signature(several), name


def list_used(*overrides: str) -> list[str]:
    recipe = load_recipe("lenet5_digits", list(overrides))
    return [listed.key for listed in RUN_FEATURES if listed.is_used(recipe)]


@pytest.mark.medium
@pytest.mark.parametrize("key", USES)
def test_recipe_uses_the_feature_that_it_names(key: str) -> None:
    used = ("launch", key, "stages")
    assert list_used(*USES[key]) == [listed.key for listed in RUN_FEATURES if listed.key in used]


def test_default_recipe_uses_the_autopsy_and_looks_for_a_launcher() -> None:
    assert list_used() == ["launch", "stages"]
    assert list_used("stages=[data, build]", "launch=none") == []


def test_feature_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Listed("profile.mode", lambda recipe: True, "pipeline.inspect.absent.profile:It")
    monkeypatch.setattr(run_features, "RUN_FEATURES", (absent,))
    with pytest.raises(RecipeError) as caught:
        open_features(load_recipe("lenet5_digits"))
    assert list(caught.value.problems) == [
        "profile.mode: needs pipeline.inspect.absent.profile, and this installation has no "
        "pipeline.inspect.absent"
    ]


CALLED: list[str] = []


class EveryMoment(RunFeature):
    """Notes the moments at which it is called, and changes nothing."""

    state_steps = (2,)


def _note(name: str, moment: Any) -> Any:
    if name in ("join", "train", "copy_checkpoints"):

        @contextmanager
        def enter(*args: Any) -> Iterator[Any]:
            CALLED.append(name)
            with moment(*args) as value:
                yield value
            CALLED.append(f"end of {name}")

        return enter

    def call(*args: Any, **named: Any) -> Any:
        CALLED.append(name)
        return moment(*args, **named)

    return call


for _name in MOMENTS:
    if not isinstance(inspect.getattr_static(RunFeature, _name), property):
        setattr(EveryMoment, _name, _note(_name, getattr(RunFeature, _name)))


@component("run_feature")
class Noted(RunFeatureSpec):
    """A feature of a plug-in."""

    name: Literal["noted_moments"] = "noted_moments"
    opens: Literal["feature", "nothing", "error", "bug"] = "feature"

    def open(self, recipe: Recipe) -> Any:
        match self.opens:
            case "error":
                raise ValueError(f"needs train.epochs, and train.steps = {recipe.train.steps}")
            case "bug":
                return {}["missing"]
        return EveryMoment(recipe) if self.opens == "feature" else None


@pytest.mark.slow
@pytest.mark.mlp
def test_feature_of_a_plug_in_is_called_at_every_moment(tiny: Compose, tmp_path: Path) -> None:
    """All but `examine`, which needs a non-finite step."""
    CALLED.clear()
    recipe = tiny("run_features=[noted_moments]", "train.steps=4", "checkpoint.every_steps=2")
    summary = run(recipe, tmp_path / "run")
    assert summary.status == "done"
    assert [name for name in dict.fromkeys(CALLED) if name in MOMENTS] == [
        *("launch", "join", "fit", "find_run", "restore_run", "begin", "change_data", "plan"),
        *("price", "shorten", "compile"),
        *("start_state", "choose_sinks", "prepare", "check", "train", "copy_checkpoints"),
        *("see_state", "record", "conclude_training", "measure", "conclude"),
    ]
    assert CALLED.index("record") < CALLED.index("end of train")
    CALLED.clear()
    resumed = tiny(
        "run_features=[noted_moments]", "train.steps=6", f"train.resume={tmp_path / 'run'}"
    )
    run(resumed)
    assert {"resume", "advance"} <= set(CALLED)


@pytest.mark.slow
@pytest.mark.mlp
def test_feature_of_a_plug_in_changes_no_bits(tiny: Compose, tmp_path: Path) -> None:
    for name, overrides in (("plain", []), ("noted", ["run_features=[noted_moments]"])):
        run(tiny("train.steps=4", *overrides), tmp_path / name)
    plain, noted = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("plain", "noted"))
    assert plain == noted


@pytest.mark.parametrize(
    ("opens", "problem"),
    [
        ("nothing", "null: must be an instance of a subclass of RunFeature"),
        ("error", "needs train.epochs, and train.steps = None"),
        ("bug", "KeyError: 'missing'"),
    ],
)
def test_feature_that_can_not_be_made_is_refused(opens: str, problem: str) -> None:
    features = f"run_features=[{{name: noted_moments, opens: {opens}}}]"
    with pytest.raises(RecipeError) as caught:
        open_features(load_recipe("lenet5_digits", [features]))
    assert list(caught.value.problems) == [f"run_features.0 (noted_moments): {problem}"]


def test_documented_moments_are_those_of_the_class() -> None:
    text = (ROOT / "docs" / "bring-your-own.md").read_text()
    table = (
        text.partition("### A feature of a run")[2].partition("| moment |")[2].partition("\n\n")[0]
    )
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == MOMENTS
