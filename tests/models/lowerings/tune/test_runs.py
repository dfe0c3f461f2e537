"""Real digits with lowerings of every family: the speed may change, the numbers may not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache as cache_calls
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.backends.base import CompileInputs, Executable, ProgressClock
from pipeline.backends.xla import XlaBackend
from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.models.lowerings.candidates import FORMULAS
from pipeline.models.lowerings.problem import (
    ROLES,
    ConvolutionProblem,
    Engine,
    Lowering,
    Problem,
    to_file_name,
)
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from pipeline.stages.lower import list_problems
from tests import outcome
from tests.compiling import unoptimized
from tests.models.lowerings.engines import require
from tests.whole_run import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized_programs_of_module")]

CONVOLUTIONS = [
    "{name: conv, features: 8, kernel: 3, bias: true}",
    "{name: conv, features: 8, kernel: 3, stride: 2}",
    "{name: conv, features: 8, kernel: 1}",
    "{name: conv, features: 8, kernel: 3, groups: 2}",
    "{name: conv, features: 6, kernel: 3}",
    "{name: conv, features: 7, kernel: 3}",
    "{name: conv, features: 8, kernel: 3}",
]
DIGITS = [
    "model=layers",
    f"model.layers=[{',relu,'.join(CONVOLUTIONS)},{{name: max_pool, kernel: 2}},flatten,"
    "{name: dense, features: 32},relu,{name: dense, features: '$classes'}]",
    "dataset.train.ops=[{name: rescale, factor: 0.0625, shift: 0.0}]",
    "dataset.eval.ops=[{name: rescale, factor: 0.0625, shift: 0.0}]",
    "dataset.eval.batch_size=40",
    "schedule=constant",
    "train.batch_size=64",
    "model.init.conv=he_normal",
    "model.init.dense=he_uniform",
    "train.optimizer.lr=0.04",
    "train.steps=30",
    "eval.every_steps=10",
    "eval.every_epochs=null",
    "checkpoint.every_steps=10",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
]
"""The shipped images, 22 steps an epoch."""

CHOSEN = {
    "8x8x1 kernel 3x3x8": ("shifted_sum", None, "im2col/16"),
    "8x8x8 kernel 3x3x8": ("im2col/8", "phases", "per_tap_matmul/32"),
    "4x4x8 kernel 1x1x8": ("pointwise", "pointwise", "per_tap_matmul"),
    "4x4x8 kernel 3x3x8": ("convolution", "shifted_sum", "grouped_as_dense/16"),
    "4x4x8 kernel 3x3x6": ("winograd2", "winograd2", "winograd2/8"),
    "4x4x6 kernel 3x3x7": ("winograd4/8", "winograd4", "winograd4/16"),
    "4x4x7 kernel 3x3x8": ("convolution", "convolution", "convolution/8"),
    "max_pool": ("reduced", "axes/16", None),
    "dense": ("transposed", "transposed", "transposed"),
}
"""Families, and images at a time, by role; nobody asks for the gradient of the input."""

ENGINES: tuple[Engine, ...] = ("xla", "onednn")

Compose = Callable[..., Recipe]
Compile = Callable[[XlaBackend, CompileInputs, ProgressClock], Executable]


def compose(cache: Path, *overrides: str) -> Recipe:
    return load_recipe("lenet5_digits", [*DIGITS, f"cache.root={cache}", *overrides])


@cache_calls
def choice(engine: Engine, cache: Path) -> dict[str, str]:
    """A lowering by this engine for every computation in `DIGITS`.

    What is XLA's alone is left out of oneDNN's choice, and what compiles for long out of both
    evaluations.
    """
    recipe, reporter = compose(cache), Reporter()
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    batch, eval_batch = recipe.train.batch_size, dataset.eval_order.batch_size
    problems = list_problems(built.step_config, built.state, batch, eval_batch)
    return {str(problem): _way(problem, engine, batch) for problem in problems}


def _way(problem: Problem, engine: Engine, batch: int) -> str:
    if isinstance(problem, ConvolutionProblem):
        (height, width), (rows, columns) = problem.window.sizes, problem.window.kernel
        reads, kernel = f"{height}x{width}x{problem.channels}", f"{rows}x{columns}"
        by_role = CHOSEN[f"{reads} kernel {kernel}x{problem.features}"]
        plain = "convolution"
    else:
        by_role = CHOSEN[problem.kind]
        plain = "axes" if problem.kind == "max_pool" else "product"
    family, *images = str(by_role[ROLES.index(problem.role)]).split("/")
    engines = FORMULAS[problem.kind][problem.role][family].engines
    if family.startswith("winograd") and problem.batch != batch:
        family, images = plain, []
    if engine not in engines:
        family, images = (family, images) if problem.kind == "max_pool" else (plain, [])
    engine = engine if engine in FORMULAS[problem.kind][problem.role][family].engines else "xla"
    return "/".join([family, engine, *images])


def prepared(run_dir: Path, engine: Engine, cache: Path) -> Path:
    """A run directory as one is that was given this choice at its first start."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "lowerings.json").write_text(
        json.dumps({"layout": "nhwc", "computations": choice(engine, cache)})
    )
    return run_dir


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine; with oneDNN one program is compared with itself, so it is compiled quickly."""
    require(request.param, "float32")
    with unoptimized() if request.param == "onednn" else nullcontext():
        yield request.param


@pytest.fixture(scope="module")
def compile_once(engine: Engine) -> Compile:
    """Compile once for all sinks; with calls of oneDNN each run would compile again."""
    compile_anew, made = XlaBackend.compile, {}

    def compile_once(backend: XlaBackend, work: CompileInputs, watch: ProgressClock) -> Executable:
        if engine not in made:
            made[engine] = compile_anew(backend, work, watch)
        return made[engine]

    return compile_once


@pytest.fixture(scope="module")
def reference(
    engine: Engine,
    compile_once: Compile,
    tmp_path_factory: pytest.TempPathFactory,
    cache: Path,
) -> Path:
    """30 steps that the host saw one by one."""
    run_dir = prepared(tmp_path_factory.mktemp(engine), engine, cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(XlaBackend, "compile", compile_once)
        run(compose(cache, "train.sink=false"), run_dir)
    return run_dir


@pytest.fixture(scope="module")
def resumed(
    engine: Engine, reference: Path, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> Path:
    """The same as if killed behind step 20: gone on in sinks, its programs compiled again."""
    run_dir = tmp_path_factory.mktemp("resumed") / engine
    shutil.copytree(reference, run_dir, ignore=shutil.ignore_patterns("summary.json", "30", "*log"))
    lines = (reference / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:23]))
    summary = run(compose(cache, "train.sink_size=7", f"train.resume={run_dir}"))
    assert summary.resumed_from == {"run": str(run_dir), "step": 20}
    return run_dir


@pytest.fixture
def digits(cache: Path) -> Compose:
    return partial(compose, cache)


def test_choice_has_every_family_of_every_role(cache: Path) -> None:
    chosen = choice("xla", cache)
    assert len(chosen) == (20 + 2 + 6) + (7 + 1 + 2)
    for role in ROLES:
        used = {
            Lowering.parse(lowering).family
            for problem, lowering in chosen.items()
            if problem.startswith(f"conv2d {to_file_name(role)} ")
        }
        assert used == set(FORMULAS["conv2d"][role])


SINKS = {
    "sink of 1": ["train.sink_size=1"],
    "sink of 7": ["train.sink_size=7"],
    "sink of an epoch": ["train.sink_size=-1"],
    "soft": ["train.sink_size=20", "train.mechanism=soft"],
}


@pytest.mark.parametrize("overrides", SINKS.values(), ids=SINKS.keys())
def test_sinks_are_bit_equal_with_any_engine(
    overrides: list[str],
    engine: Engine,
    reference: Path,
    compile_once: Compile,
    digits: Compose,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses, weights, evaluations and checkpoints, bit for bit."""
    monkeypatch.setattr(XlaBackend, "compile", compile_once)
    run(digits(*overrides), prepared(tmp_path, engine, cache))
    assert outcome.checkpoints(reference) == [10, 20, 30]
    outcome.assert_same_run(reference, tmp_path)


@pytest.mark.parametrize("engine", ["xla"], indirect=True)
def test_streaming_is_bit_equal(
    engine: Engine, reference: Path, digits: Compose, cache: Path, tmp_path: Path
) -> None:
    """What brings the batches doesn't depend on the engine."""
    run(digits("train.sink_size=20", "train.feed=stream"), prepared(tmp_path, engine, cache))
    outcome.assert_same_run(reference, tmp_path)


def test_lowerings_differ_only_in_rounding(
    reference: Path, digits: Compose, tmp_path: Path
) -> None:
    run(digits("autotune=off", "train.sink_size=20"), tmp_path)
    kept = json.loads((tmp_path / "lowerings.json").read_text())
    assert kept == {"layout": "nhwc", "computations": {}}
    plain, chosen = (
        np.array([[line["loss"], line["grad_norm"]] for line in outcome.metrics(run_dir)])
        for run_dir in (tmp_path, reference)
    )
    assert len(plain) == 30
    assert plain[-1, 0] < 0.8 * plain[0, 0]
    np.testing.assert_allclose(chosen, plain, rtol=1e-4)
    assert (chosen != plain).any()
    weights, others = outcome.arrays(reference), outcome.arrays(tmp_path)
    for path, array in weights.items():
        np.testing.assert_allclose(array, others[path], rtol=1e-3, atol=1e-5, err_msg=path)


def test_resumed_run_has_its_lowerings_and_is_bit_equal(reference: Path, resumed: Path) -> None:
    """The bank, which has none of this, is not asked again."""
    outcome.assert_same_run(reference, resumed)
    chosen = resumed / "lowerings.json"
    assert chosen.read_bytes() == (reference / "lowerings.json").read_bytes()
    assert f"lower      as before: {chosen}" in (resumed / "run.log").read_text()


def test_programs_are_cached_unless_they_call_onednn(engine: Engine, resumed: Path) -> None:
    """One that calls oneDNN is in no cache, unless this process has compiled it before."""
    told = re.findall(r"compile    (.*): .* s, cache (\w+),", (resumed / "run.log").read_text())
    assert [name for name, _ in told] == ["initialisation", "training step", "evaluation"]
    initialised, *others = [outcome for _, outcome in told]
    assert initialised == "hit"
    assert set(others) == ({"hit"} if engine == "xla" else {"reused"})
