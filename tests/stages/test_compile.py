from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.backends.base import CompileReport
from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.engine.callbacks.callback import Callback, RunControl
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]

SMALL = [
    "model=mlp",
    "model.hidden=[4]",
    "dataset.train.ops=[]",
    "dataset.eval.ops=[]",
]


def compiled(recipe: Recipe, level: int = logging.WARNING) -> CompileReport:
    reporter = Reporter()
    reporter.level = level
    dataset = load_data(recipe, reporter)
    made = build(recipe, dataset, reporter)
    return compile_programs(
        recipe, dataset, made, recipe.device.open(recipe.parallel), reporter
    ).report


def caches(report: CompileReport) -> list[str]:
    return [program.cache for program in report.programs]


@pytest.mark.slow
def test_programs_are_compiled_once(tiny: Compose, tmp_path: Path) -> None:
    """The second run finds everything in the cache, also when seed, rate and length differ."""
    small = [*SMALL, f"cache.root={tmp_path}"]
    assert caches(compiled(tiny(*small, "train.steps=20"))) == ["miss", "miss", "miss"]
    assert any((tmp_path / "xla-2").iterdir())
    again = tiny(*small, "train.steps=20", "seed=2", "train.optimizer.lr=0.1", "train.sink_size=3")
    assert caches(compiled(again)) == ["hit", "hit", "hit"]


@pytest.mark.slow
def test_cache_can_be_disabled(tiny: Compose, tmp_path: Path) -> None:
    off = tiny(*SMALL, f"cache.root={tmp_path}", "cache.compiled=false")
    assert caches(compiled(off)) == ["off", "off", "off"]
    assert not (tmp_path / "xla-2").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "model", "ending"),
    [
        ([], "lenet5", "of memory, all training data 6.5 kB"),
        ([*SMALL, "train.feed=stream"], "mlp", "of memory, the training data at hand 2.2 MB"),
    ],
    ids=["resident", "stream"],
)
def test_programs_and_data_are_reported(
    overrides: list[str],
    model: str,
    ending: str,
    tiny: Compose,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiled(tiny(*overrides), level=logging.INFO)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compile")]
    assert lines[0] == f"compile    {model} for cpu:0 cpu, batches of 16"
    for line, name in zip(
        lines[1:], ("initialisation", "training step", "evaluation"), strict=False
    ):
        assert line.startswith(f"compile    {name}: ")
        assert "MB of temporaries" in line
    assert lines[4].endswith(ending)


class EvaluateLate(Callback):
    """Requests an evaluation after step 3."""

    def on_begin(self, run: RunControl) -> None:
        run.evaluate_at(3)


DEVICES = ["parallel.mode=data", "parallel.devices=2"]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [DEVICES, ["profile.mode=only"]], ids=["parallel", "profile"])
def test_evaluation_is_compiled_only_for_a_stage(
    overrides: list[str], tiny: Compose, tmp_path: Path
) -> None:
    """The last stage, or training with a period of evaluations."""
    keys = [*SMALL, *overrides, f"cache.root={tmp_path}", "train.steps=20"]
    training = "stages=[data,build,compile,train]"
    programs = [program.name for program in compiled(tiny(*keys, training)).programs]
    assert programs == ["initialisation", "training step"]
    for evaluating in (
        ["stages=[data,build,compile,train,eval]"],
        [training, "eval.every_steps=7"],
    ):
        assert len(compiled(tiny(*keys, *evaluating)).programs) == 3


@pytest.mark.slow
def test_requested_evaluation_on_several_devices_is_compiled(tiny: Compose, tmp_path: Path) -> None:
    # A cache of its own: a program on disk needs no compilation.
    keys = [
        *SMALL,
        *DEVICES,
        f"cache.root={tmp_path}",
        "train.steps=4",
        "stages=[data,build,compile,train]",
    ]
    run(tiny(*keys), tmp_path / "plain")
    assert "compile    evaluation: " not in (tmp_path / "plain" / "run.log").read_text()
    run(tiny(*keys), tmp_path / "requested", callbacks=[EvaluateLate()])
    assert "compile    evaluation: " in (tmp_path / "requested" / "run.log").read_text()
    (line,) = outcome.read_lines(tmp_path / "requested" / "evals.jsonl")
    assert line["step"] == 3


@pytest.mark.slow
def test_profile_has_the_names_of_its_layers(tiny: Compose, tmp_path: Path) -> None:
    """Other layers that compute the same are the same program, but for a profile."""

    def scopes(layer: str) -> str:
        layers = f"[{layer},flatten,{{name: dense, features: $classes}}]"
        asked = ["profile.mode=only", f"cache.root={tmp_path}", f"model.layers={layers}"]
        recipe = tiny("model=layers", "dataset.train.ops=[]", "dataset.eval.ops=[]", *asked)
        reporter = Reporter()
        dataset = load_data(recipe, reporter)
        made = build(recipe, dataset, reporter)
        backend = recipe.device.open(recipe.parallel)
        executable = compile_programs(recipe, dataset, made, backend, reporter)
        return str(executable.programs.train.as_text())  # type: ignore[attr-defined]

    assert "sequence_0/relu_0" not in scopes("relu")
    assert "sequence_0/relu_0" in scopes("{name: sequence, body: [relu]}")
