"""Choice of the lowerings of a run, which a resumed run keeps."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from rich.console import Console

from pipeline.backends.base import ProgressClock
from pipeline.backends.xla import XlaBackend
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.reporter import Reporter
from pipeline.data.batch import Batch
from pipeline.data.inputs import Dataset
from pipeline.models.lowerings.problem import (
    ConvolutionProblem,
    Layout,
    Lowering,
    Lowerings,
    Problem,
    make_window,
)
from pipeline.models.lowerings.tune.tuner import LoweringChoice, TimedLowering, TunedProblem, Tuning
from pipeline.models.modules.network import Network
from pipeline.stages import lower as lower_stage
from pipeline.stages.build import Built, build
from pipeline.stages.data import load_data
from pipeline.stages.lower import (
    list_problems,
    lower,
    make_layout_key,
    read_choice,
    time_gradients_us,
    write_choice,
)
from pipeline.stages.record.run_directory import RunFolder
from pipeline.training.parallel.devices import find_device
from pipeline.training.parallel.state_sharing import DevicePlacement
from tests import outcome
from tests.whole_run import run

Compose = Callable[..., Recipe]

NETWORK = [
    "model=layers",
    "model.layers=[{name: conv, features: 4, kernel: 3},batch_norm,relu,"
    "{name: residual, body: [{name: conv, features: 4, kernel: 3}]},"
    "{name: dropout, rate: 0.5},{name: conv, features: 8, kernel: 1, stride: 2, padding: valid},"
    "global_avg_pool,{name: dense, features: '$classes'}]",
    "dataset.train.ops=[]",
    "dataset.eval.ops=[]",
    "dataset.eval.batch_size=20",
]
"""Three convolutions of 8x8 images with one channel and a dense layer, batches of 16; evaluation
of 20."""

THREES = "stride 1x1 pads 1+1,1+1 dilation 1x1 groups 1"
STRIDED = "stride 2x2 pads 0+0,0+0 dilation 1x1 groups 1"
TRAINED = [
    f"conv2d forward 16x8x8x1 kernel 3x3x4 {THREES}",
    f"conv2d kernel_gradient 16x8x8x1 kernel 3x3x4 {THREES}",
    f"conv2d forward 16x8x8x4 kernel 3x3x4 {THREES}",
    f"conv2d images_gradient 16x8x8x4 kernel 3x3x4 {THREES}",
    f"conv2d kernel_gradient 16x8x8x4 kernel 3x3x4 {THREES}",
    f"conv2d forward 16x8x8x4 kernel 1x1x8 {STRIDED}",
    f"conv2d images_gradient 16x8x8x4 kernel 1x1x8 {STRIDED}",
    f"conv2d kernel_gradient 16x8x8x4 kernel 1x1x8 {STRIDED}",
    "dense forward 16x8 kernel 8x10",
    "dense images_gradient 16x8 kernel 8x10",
    "dense kernel_gradient 16x8 kernel 8x10",
]
EVALUATED = [
    f"conv2d forward 20x8x8x1 kernel 3x3x4 {THREES}",
    f"conv2d forward 20x8x8x4 kernel 3x3x4 {THREES}",
    f"conv2d forward 20x8x8x4 kernel 1x1x8 {STRIDED}",
    "dense forward 20x8 kernel 8x10",
]


class Choosing(XlaBackend):
    """A backend that chooses what a test wants it to, and takes down what it was asked."""

    def __init__(self, how: str = "patches/xla", chosen: LoweringChoice | None = None) -> None:
        super().__init__(DevicePlacement((find_device("cpu", 0),)))
        self._how, self._chosen = Lowering.parse(how), chosen
        self.asked: list[tuple[Sequence[Problem], Tuning]] = []

    def choose_lowerings(
        self, problems: Sequence[Problem], tuning: Tuning, watch: ProgressClock
    ) -> LoweringChoice:
        self.asked.append((problems, tuning))
        if tuning.fixed is not None:
            return LoweringChoice(tuning.fixed)
        if self._chosen is not None:
            return self._chosen
        return LoweringChoice(
            Lowerings(tuple((str(problem), self._how) for problem in problems)), (), 3
        )


def prepare(recipe: Recipe) -> tuple[Dataset, Built, Reporter]:
    reporter = Reporter(console=Console(file=io.StringIO()))
    dataset = load_data(recipe, reporter)
    return dataset, build(recipe, dataset, reporter), reporter


def lowered(recipe: Recipe, backend: Choosing, run_dir: Path | None) -> tuple[Built, str]:
    """The step, and the lines for the user."""
    dataset, built, _ = prepare(recipe)
    reporter = Reporter(console=Console(file=io.StringIO()))
    reporter.level = logging.INFO
    folder = None if run_dir is None else RunFolder(run_dir)
    result = lower(recipe, dataset, built, backend, folder, reporter)
    file: Any = reporter.console.file
    return result, file.getvalue()


def chooser(built: Built) -> Lowerings:
    assert isinstance(built.step_config.network, Network)
    assert isinstance(built.step_config.network.policy, Lowerings)
    return built.step_config.network.policy


def problems(recipe: Recipe) -> list[str]:
    dataset, built, _ = prepare(recipe)
    batch, eval_batch = recipe.train.batch_size, dataset.eval_order.batch_size
    found = list_problems(built.step_config, built.state, batch, eval_batch)
    assert len(set(found)) == len(found)
    return [str(problem) for problem in found]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "dtype"), [("O0", "float32"), ("bf16", "bfloat16")])
def test_convolution_and_dense_computations_are_listed(
    precision: str, dtype: str, tiny: Compose
) -> None:
    """But for the gradient of the network's own input; evaluation needs no gradient at all."""
    found = problems(tiny(*NETWORK, f"train.precision={precision}"))
    assert found == [f"{text} {dtype}" for text in [*TRAINED, *EVALUATED]]


@pytest.mark.slow
def test_evaluation_at_the_training_batch_size_adds_no_problems(tiny: Compose) -> None:
    found = problems(tiny(*NETWORK, "dataset.eval.batch_size=16"))
    assert found == [f"{text} float32" for text in TRAINED]


@pytest.mark.slow
def test_channels_first_images_are_listed_as_the_network_reads_them(
    tiny: Compose,
) -> None:
    ops = "[{name: hwc2chw}]"
    recipe = tiny(*NETWORK, f"dataset.train.ops={ops}", f"dataset.eval.ops={ops}")
    assert problems(recipe) == [f"{text} float32" for text in [*TRAINED, *EVALUATED]]


@pytest.mark.slow
def test_gradients_of_images_like_the_input_are_listed(tiny: Compose) -> None:
    """They are not the network's input, though they look like it."""
    convolution = "{name: conv, features: 1, kernel: 1, stride: 2, padding: valid}"
    layers = f"[{convolution},{convolution},flatten,{{name: dense, features: '$classes'}}]"
    found = problems(tiny(*NETWORK, f"model.layers={layers}"))
    gradients = [text for text in found if text.startswith("conv2d images_gradient")]
    assert gradients == [f"conv2d images_gradient 16x4x4x1 kernel 1x1x1 {STRIDED} float32"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhwc", "chwn"])
def test_max_pooling_is_listed_in_its_layout(layout: str, tiny: Compose) -> None:
    """And convolutions in NHWC alone: with the batch last each is computed by one lowering."""
    layers = (
        "[{name: conv, features: 4, kernel: 3},{name: max_pool, kernel: 2},"
        "flatten,{name: dense, features: '$classes'}]"
    )
    _, built, _ = prepare(tiny(*NETWORK, f"model.layers={layers}"))
    network = built.step_config.network.clone(layout=layout)
    step_config = replace(built.step_config, network=network)
    found = [str(problem) for problem in list_problems(step_config, built.state, 16, 20)]
    shapes = {"nhwc": ("16x8x8x4", "20x8x8x4"), "chwn": ("4x8x8x16", "4x8x8x20")}[layout]
    window = "window 2x2 stride 2x2 pads 0+0,0+0 float32"
    assert [text for text in found if text.startswith("max_pool")] == [
        f"max_pool forward {shapes[0]} {window}",
        f"max_pool images_gradient {shapes[0]} {window}",
        f"max_pool forward {shapes[1]} {window}",
    ]
    slides = [text for text in found if text.startswith("conv2d")]
    assert len(slides) == (3 if layout == "nhwc" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "mlp",
            [
                "dense forward 16x64 kernel 64x4",
                "dense kernel_gradient 16x64 kernel 64x4",
                "dense forward 16x4 kernel 4x10",
                "dense images_gradient 16x4 kernel 4x10",
                "dense kernel_gradient 16x4 kernel 4x10",
            ],
        ),
        ("bert_base", None),
    ],
)
def test_network_without_convolutions_has_only_dense_problems(
    model: str, expected: list[str] | None, tiny: Compose, tmp_path: Path
) -> None:
    small = {"mlp": ["model.hidden=[4]"], "bert_base": ["model.blocks=1", "model.features=12"]}
    overrides = ["dataset.train.ops=[]", "dataset.eval.ops=[]", "dataset.eval.batch_size=16"]
    recipe = tiny(f"model={model}", *small[model], *overrides)
    found = problems(recipe)
    assert all(text.startswith("dense ") for text in found)
    assert expected is None or found == [f"{text} float32" for text in expected]
    _, lines = lowered(recipe, Choosing(chosen=LoweringChoice()), tmp_path)
    assert lines == ""
    assert read_choice(tmp_path / "lowerings.json") == LoweringChoice()


@pytest.mark.slow
def test_choice_is_in_the_step_and_the_run_directory(tiny: Compose, tmp_path: Path) -> None:
    backend = Choosing()
    built, lines = lowered(tiny(*NETWORK), backend, tmp_path)
    expected = {f"{text} float32": "patches/xla" for text in [*TRAINED, *EVALUATED]}
    kept = json.loads((tmp_path / "lowerings.json").read_text())
    assert kept == {"layout": "nhwc", "computations": expected}
    assert {text: str(how) for text, how in chooser(built).chosen} == expected
    assert lines.startswith("lower      15 computations: 0 from the bank, 3 by rule")
    assert [file.name for file in tmp_path.iterdir()] == ["lowerings.json"]


@pytest.mark.slow
@pytest.mark.parametrize("text", [TRAINED[0], TRAINED[1], EVALUATED[0]])
def test_step_and_evaluation_use_the_chosen_lowerings(text: str, tiny: Compose) -> None:
    """Told by a lowering that does not fit: only where it is used is it refused."""
    recipe = tiny(*NETWORK)
    dataset, built, reporter = prepare(recipe)
    chosen = LoweringChoice(Lowerings(((f"{text} float32", Lowering("pointwise")),)))
    made = lower(recipe, dataset, built, Choosing(chosen=chosen), None, reporter)
    sums = jax.eval_shape(made.step.zero_sums)

    def trace_step() -> Any:
        return jax.eval_shape(made.step.step, made.state, batch_of(16), built.learning_rates)

    def trace_evaluation() -> Any:
        return jax.eval_shape(made.step.evaluate, made.state, batch_of(20), sums)

    fine, refused = trace_evaluation, trace_step
    if text in EVALUATED:
        fine, refused = refused, fine
    fine()
    with pytest.raises(ValueError, match=re.escape(f"pixels/xla can't compute {text}")):
        refused()


def batch_of(size: int) -> Batch:
    """The shapes of a batch of digits."""
    columns = {
        "image": jax.ShapeDtypeStruct((size, 8, 8, 1), np.uint8),
        "label": jax.ShapeDtypeStruct((size,), np.int32),
    }
    number, words = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((2,), np.uint32)
    sample: Any = jax.ShapeDtypeStruct((size,), np.int32)
    made: Any = (columns, words, number, sample, number)
    return Batch(*made)


@pytest.mark.slow
def test_recipe_sets_the_tuning_and_the_cache_its_place(tiny: Compose, tmp_path: Path) -> None:
    changes = ["autotune=repeat", "autotune_search=ga", f"cache.root={tmp_path}"]
    backend = Choosing()
    lowered(tiny(*NETWORK, *changes), backend, None)
    ((_, tuning),) = backend.asked
    assert tuning == Tuning("repeat", "ga", tmp_path / "autotune")


STACK = (
    "model.layers=[{name: conv, features: 4, kernel: 3},batch_norm,relu,{name: max_pool, "
    "kernel: 2},flatten,{name: dense, features: '$classes'}]"
)
"""Layers that are computed in both layouts; few channels, for which the rule takes CHWN."""


@pytest.mark.slow
@pytest.mark.parametrize(("nhwc_us", "layout"), [(3000.0, "chwn"), (1000.0, "nhwc")])
def test_faster_layout_is_used_whatever_the_rule(
    nhwc_us: float, layout: str, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_us, timed = {"nhwc": nhwc_us, "chwn": 2000.0}, []

    def time_gradients_us(network: Network, *_: object) -> float:
        timed.append(network.layout)
        return times_us[network.layout]

    monkeypatch.setattr(lower_stage, "time_gradients_us", time_gradients_us)
    changes = [*NETWORK, STACK, f"cache.root={tmp_path}"]
    run_dirs = [tmp_path / name for name in ("ruled", "tuned", "banked")]
    modes = ("bank", "tune", "bank")
    laid_out, reports = [], []
    for run_dir, mode in zip(run_dirs, modes, strict=True):
        run_dir.mkdir()
        recipe = tiny(*changes, f"autotune={mode}")
        built, lines = lowered(recipe, Choosing(chosen=LoweringChoice()), run_dir)
        assert isinstance(built.step_config.network, Network)
        laid_out.append(built.step_config.network.layout)
        reports.append(lines.splitlines()[:1])
    assert laid_out == ["chwn", layout, layout]
    assert sorted(timed) == ["chwn", "nhwc"]
    assert reports[0] == ["lower      images as CHWN, to vectorize over samples: few channels"]
    if layout == "chwn":
        line = "lower      images as CHWN, to vectorize over samples; gradients 3.00 -> 2.00 ms"
        assert reports[1] == reports[2] == [line]
    (file,) = run_dirs[1].glob("tune_result*")
    (operator,) = json.loads(file.read_text())["operators"]
    assert (operator["layout"], operator["op"]) == (layout, ["network", "layout"])
    assert list(run_dirs[2].glob("tune_result*")) == []


@pytest.mark.slow
def test_layout_is_unchanged_without_bank_or_tuning(tiny: Compose, tmp_path: Path) -> None:
    built, _ = lowered(
        tiny(*NETWORK, STACK, "autotune=off"), Choosing(chosen=LoweringChoice()), None
    )
    assert isinstance(built.step_config.network, Network)
    assert built.step_config.network.layout == "nhwc"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhwc", "chwn"])
def test_network_gradients_are_timed_under_a_stable_key(layout: Layout, tiny: Compose) -> None:
    _, built, _ = prepare(tiny(*NETWORK, STACK))
    assert isinstance(built.step_config.network, Network)
    network, device = built.step_config.network.clone(layout=layout), find_device("cpu", 0)
    assert 0 < time_gradients_us(network, built.step_config, built.state, 4, device) < 10e6
    keys = [make_layout_key(network, built.step_config, batch, device) for batch in (4, 4, 8)]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0] == make_layout_key(built.step_config.network, built.step_config, 4, device)
    assert re.fullmatch(r"network [0-9a-f]{16} 4x8x8x1 float32 on cpu .*", keys[0])


@pytest.mark.slow
def test_run_continues_with_its_initial_settings(tiny: Compose, tmp_path: Path) -> None:
    """Whatever the bank holds now: other lowerings are other roundings."""
    lowering = (TRAINED[0], Lowering.parse("patches/xla"))
    choice = LoweringChoice(Lowerings((lowering,)))
    first, _ = lowered(tiny(*NETWORK), Choosing(chosen=choice), tmp_path)
    other = Choosing("convolution/xla")
    again, lines = lowered(tiny(*NETWORK), other, tmp_path)
    ((_, tuning),) = other.asked
    assert tuning.fixed == chooser(first)
    assert chooser(again) == chooser(first)
    assert lines == f"lower      as before: {tmp_path / 'lowerings.json'}\n"


@pytest.mark.slow
def test_choice_is_not_written_without_a_run_directory(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    built, _ = lowered(tiny(*NETWORK), Choosing(chosen=tuned()), None)
    assert chooser(built) == tuned().lowerings
    assert list(tmp_path.iterdir()) == []


def tuned() -> LoweringChoice:
    """One computation found in the bank and one tuned, of a network that has two."""
    window = make_window((8, 8), (3, 3), (1, 1), "SAME", (1, 1), 1)
    one, other = (
        ConvolutionProblem("forward", window, batch, 4, 4, "float32") for batch in (16, 20)
    )
    how = Lowering("im2col")
    found = (
        TunedProblem(
            one, 3000.0, TimedLowering(how, 1000.0), TimedLowering(how, 1000.0), "bank_hit"
        ),
        TunedProblem(
            other,
            2000.0,
            TimedLowering(how, 1500.0),
            TimedLowering(how, 1500.0),
            "bank_append",
            (1500.0,),
        ),
    )
    return LoweringChoice(Lowerings(((str(one), how), (str(other), how))), found)


@pytest.mark.medium
def test_tuned_result_is_written_to_the_run_directory(tiny: Compose, tmp_path: Path) -> None:
    _, lines = lowered(tiny(*NETWORK), Choosing(chosen=tuned()), tmp_path)
    (file,) = tmp_path.glob("tune_result_pid*.json")
    assert json.loads(file.read_text()) == json.loads(json.dumps(tuned().to_result()))
    first, second = lines.splitlines()
    assert first == (
        "lower      2 computations: 1 from the bank, 1 tuned; 0 by oneDNN; 5.0 -> 2.5 ms"
    )
    assert second.startswith("lower      1 tuned, kept in ")
    assert second.endswith(f"; {file.name}")


@pytest.mark.medium
def test_banked_lowerings_write_no_result(tiny: Compose, tmp_path: Path) -> None:
    chosen = tuned()
    banked = replace(chosen, results=chosen.results[:1])
    lowered(tiny(*NETWORK), Choosing(chosen=banked), tmp_path)
    assert list(tmp_path.glob("tune_result*")) == []


class OtherNetwork(nn.Module):
    """A flax module of somebody's own."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        return nn.Dense(10)(images.reshape(images.shape[0], -1))


def test_unknown_networks_are_unchanged(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny(*NETWORK)
    dataset, built, reporter = prepare(recipe)
    other = replace(built, step_config=replace(built.step_config, network=OtherNetwork()))
    backend = Choosing()
    assert lower(recipe, dataset, other, backend, RunFolder(tmp_path), reporter) is other
    assert backend.asked == []
    assert list(tmp_path.iterdir()) == []


def test_lowerings_round_trip(tmp_path: Path) -> None:
    first, second, *_ = TRAINED
    lowerings = Lowerings(((second, Lowering("default")), (first, Lowering("im2col", "onednn", 8))))
    chosen = LoweringChoice(lowerings, layout="chwn")
    write_choice(tmp_path / "lowerings.json", chosen)
    assert read_choice(tmp_path / "lowerings.json") == chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"layout": "nhcw", "computations": {}}',
        b'{"layout": "nhwc", "computations": 7}',
        b'{"layout": "nhwc", "computations": {"a": null}}',
        b'{"layout": "nhwc", "computations": {"a": "patches"}}',
        b'{"layout": "nhwc", "computations": {"a": "patches/xla"}}',
        b'{"layout": "nhwc", "computations": {"": "default/xla"}}',
        b'{"layout": "nhwc", "computations": {"conv2d forward": "nonsense/xla"}}',
        b'{"layout": "nhwc", "computations": {"conv2d forward": "default/onednn"}}',
        b'{"layout": "nhwc", "computations": {"dense forward 1x1 kernel 1x1": "patches/xla"}}',
        b'{"layout": "nhwc", "computations": {"conv2d sideways": "patches/xla"}}',
        b'{"layout": "nhwc", "computations": {"pool forward": "patches/xla"}}',
        b"\xff",
    ],
)
def test_damaged_choice_is_refused_unchanged(content: bytes, tiny: Compose, tmp_path: Path) -> None:
    """Rather than going on with another one."""
    file = tmp_path / "lowerings.json"
    file.write_bytes(content)
    backend = Choosing()
    with pytest.raises(RunError) as caught:
        lowered(tiny(*NETWORK), backend, tmp_path)
    assert str(caught.value).startswith(f"{file}: must be the lowerings of a run (")
    assert str(caught.value).endswith("); delete it to choose them again")
    assert file.read_bytes() == content
    assert backend.asked == []


@pytest.mark.medium
def test_layout_that_a_layer_lacks_is_refused(tiny: Compose, tmp_path: Path) -> None:
    file = tmp_path / "lowerings.json"
    file.write_text('{"layout": "chwn", "computations": {}}')
    with pytest.raises(RunError, match=f"^{file}: layout chwn: a layer of this network can't be"):
        lowered(tiny(*NETWORK), Choosing(), tmp_path)


@pytest.mark.slow
def test_build_only_run_chooses_no_lowerings(tiny: Compose, tmp_path: Path) -> None:
    run(tiny(*NETWORK, "stages=[data,build]"), tmp_path)
    assert not (tmp_path / "lowerings.json").exists()
    assert outcome.read_summary(tmp_path)["status"] == "done"
