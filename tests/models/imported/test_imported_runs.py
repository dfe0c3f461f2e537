"""Whole runs of the user's own networks: trained, resumed, priced, examined, refused."""

from __future__ import annotations

import io
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.reporter import Reporter
from pipeline.stages.build import build
from pipeline.stages.data import load_data
from pipeline.stages.lower import lower
from tests import outcome
from tests.models.imported.conftest import IMPORTED_NETWORKS
from tests.training.optimizers.thor.same_bits import require_same_bits
from tests.whole_run import run

Compose = Callable[..., Recipe]

CONV = ["model=flax", "model.import=imported_networks:ConvNet", "model.arguments.width=4"]
TWO_CONVS = ["model=flax", "model.import=imported_networks:TwoConvs"]
ONE_CONV = ["model=flax", "model.import=imported_networks:OneConv"]
NNX = ["model=flax", "model.import=imported_networks:NnxNet", "model.arguments.width=4"]
FUNCTION = ["model=function", "model.import=imported_networks:perceptron"]
SMALL_IMAGES = ["dataset.train.ops=[]", "dataset.eval.ops=[]"]
VOLUME = ["model=flax", "model.import=imported_networks:Volume", *SMALL_IMAGES]
SHORT = ["train.steps=12", "train.sink_size=4", "checkpoint.every_steps=6"]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in outcome.metrics(run_dir)]


def reported(recipe: Recipe) -> tuple[str, bool]:
    """The lower stage's report, and whether the step is compiled without a loop."""
    text = io.StringIO()
    with Reporter(console=Console(file=text, width=1000)) as reporter:
        reporter.level = logging.INFO
        dataset = load_data(recipe, reporter)
        built = build(recipe, dataset, reporter)
        backend = recipe.device.open(recipe.parallel)
        built = lower(recipe, dataset, built, backend, None, reporter)
    return text.getvalue(), built.single_steps


@pytest.mark.slow
def test_resumed_run_of_functions_is_bit_equal_to_the_unbroken_one(
    tiny: Compose, tmp_path: Path
) -> None:
    """Those of modules are resumed with THOR."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(tiny(*FUNCTION, *SHORT), whole)
    shutil.copytree(whole, broken)
    shutil.rmtree(make_checkpoint_path(broken / "checkpoints", 12))
    run(tiny(*FUNCTION, *SHORT, f"train.resume={broken}"))
    assert outcome.metrics(broken) == outcome.metrics(whole)
    outcome.assert_equal_arrays(outcome.arrays(broken, 12), outcome.arrays(whole, 12))


@pytest.mark.slow
def test_run_is_the_same_with_any_sink(tiny: Compose, tmp_path: Path) -> None:
    """Sinks of other sizes have a test with THOR."""
    keys = [*ONE_CONV, *SMALL_IMAGES, *SHORT]
    run(tiny(*keys), tmp_path / "whole")
    for how in ("train.mechanism=soft", "train.feed=stream"):
        run(tiny(*keys, how), tmp_path / how)
        assert losses(tmp_path / how) == losses(tmp_path / "whole"), how


@pytest.mark.slow
def test_slow_loop_is_avoided_without_changing_losses(tiny: Compose, tmp_path: Path) -> None:
    for mechanism in ("auto", "loop"):
        run(tiny(*VOLUME, *SHORT, f"train.mechanism={mechanism}"), tmp_path / mechanism)
    single, looped = (losses(tmp_path / mechanism) for mechanism in ("auto", "loop"))
    np.testing.assert_allclose(single, looped, rtol=1e-5)
    assert '"mechanism": "soft"' in (tmp_path / "auto" / "summary.json").read_text()
    assert '"mechanism": "loop"' in (tmp_path / "loop" / "summary.json").read_text()


@pytest.mark.slow
def test_run_without_a_loop_ends_at_a_non_finite_step(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Step 2 of 12"):
        run(tiny(*VOLUME, *SHORT, "train.optimizer.lr=3e38"), tmp_path / "diverged")


@pytest.mark.medium
def test_operations_left_to_xla_are_reported_and_end_loops_over_steps(tiny: Compose) -> None:
    text, single = reported(tiny(*VOLUME))
    assert "left to XLA: inner: convolution is 3-D\n" in text
    assert "mechanism soft: in a loop over steps such convolutions are slow" in text
    assert single
    text, single = reported(tiny(*VOLUME, "train.mechanism=loop"))
    assert "train.mechanism = loop: slows such convolutions down; soft has no loop" in text
    assert not single


@pytest.mark.medium
def test_completely_lowered_network_reports_nothing(tiny: Compose) -> None:
    text, single = reported(tiny(*CONV))
    assert "left to XLA" not in text
    assert not single


@pytest.mark.medium
def test_network_of_few_channels_has_the_batch_innermost(tiny: Compose) -> None:
    assert "images as CHWN, to vectorize over samples" in reported(tiny(*TWO_CONVS))[0]
    for keys in (
        [*TWO_CONVS, "autotune=off"],
        [*TWO_CONVS, "model.arguments.width=48"],
        CONV,  # with batch norm
    ):
        assert "CHWN" not in reported(tiny(*keys))[0], keys


@pytest.mark.slow
def test_layout_changes_last_digits_only_and_is_kept(tiny: Compose, tmp_path: Path) -> None:
    run(tiny(*TWO_CONVS, *SHORT), tmp_path / "chwn")
    run(tiny(*TWO_CONVS, *SHORT, "autotune=off"), tmp_path / "nhwc")
    np.testing.assert_allclose(losses(tmp_path / "chwn"), losses(tmp_path / "nhwc"), rtol=1e-4)
    choice = (tmp_path / "chwn" / "lowerings.json").read_text()
    assert '"layout": "chwn"' in choice
    # As if an earlier version had begun the run.
    shutil.copytree(tmp_path / "chwn", tmp_path / "resumed")
    shutil.rmtree(make_checkpoint_path(tmp_path / "resumed" / "checkpoints", 12))
    (tmp_path / "resumed" / "lowerings.json").write_text(choice.replace("chwn", "nhwc"))
    run(tiny(*TWO_CONVS, *SHORT, f"train.resume={tmp_path / 'resumed'}"))
    assert '"layout": "nhwc"' in (tmp_path / "resumed" / "lowerings.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        ("train.mode=eager", "train.steps=2"),
        ("train.accumulate_steps=2",),
        ("train.precision=bf16",),
        ("train.precision=O3", "train.loss_scale=dynamic"),
        (
            "parallel.mode=semi_auto",
            *CONV[1:],
            "parallel.reproducible=layout",
            "parallel.mesh={data: 2, model: 2}",
            "parallel.specs=[{pattern: Dense_0/kernel, axes: [null, model]}]",
            "parallel.constraints=[{pattern: Conv_1, axes: [data, null, null, model]}]",
        ),
    ],
    ids=lambda how: how[0],
)
def test_imported_network_trains_in_every_mode(
    how: tuple[str, ...], tiny: Compose, tmp_path: Path
) -> None:
    """Data parallelism has a test with THOR."""
    steps = [] if any("train.steps" in key for key in how) else ["train.steps=6"]
    run_of_all = ["eval.every_steps=null", "checkpoint.every_steps=null", *steps]
    keys = [*ONE_CONV, *SMALL_IMAGES, *run_of_all, *how, "dataset.eval_size=16"]
    summary = run(tiny(*keys), tmp_path / "run")
    assert summary.status == "done"
    assert np.isfinite(losses(tmp_path / "run")).all()


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_thor_is_bit_equal_across_sinks_and_devices(tiny: Compose, tmp_path: Path) -> None:
    keys = [*ONE_CONV, *SMALL_IMAGES, "parallel.mode=data", "parallel.devices=1"]
    others = [["train.sink_size=-1", "parallel.devices=2"]]
    require_same_bits(tiny, tmp_path, keys, others)


@pytest.mark.slow
def test_thor_of_an_nnx_module_is_bit_equal_across_sinks(tiny: Compose, tmp_path: Path) -> None:
    """One program, whose sinks are of 1, of an epoch and, resumed, of 7."""
    require_same_bits(tiny, tmp_path, [*NNX, *SMALL_IMAGES], [["train.sink_size=-1"]])


@pytest.mark.slow
def test_layers_are_priced_by_name_on_an_emulated_device(tiny: Compose, tmp_path: Path) -> None:
    summary = run(tiny(*CONV, "device=ascend910", "stages=[data,build,compile]"), tmp_path / "run")
    assert summary.modelled["step_ms"] > 0
    log = (tmp_path / "run" / "run.log").read_text()
    assert "Conv_1" in log
    assert "(outside modules): " in log
    assert "ImportedNetwork" not in log


@pytest.mark.slow
def test_autopsy_reports_the_layer(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Invalid loss"):
        run(tiny(*CONV, *SMALL_IMAGES, *SHORT, "train.optimizer.lr=1e38"), tmp_path / "run")
    found = (tmp_path / "run" / "run.log").read_text()
    assert "parameter Conv_" in found or "parameter Dense_0" in found


@pytest.mark.medium
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["train.precision=O1"], "flax isn't a list of layers, so all of it computes in one"),
        (["train.to_float=[{pattern: Conv_0, dtype: float16}]"], "isn't a list of layers"),
        (["model.arguments.classes=7"], "7 outputs, and the dataset has 10 classes"),
    ],
)
def test_settings_that_need_a_layer_list_are_refused(
    keys: list[str], said: str, tiny: Compose
) -> None:
    with pytest.raises(RecipeError, match=said):
        reported(tiny(*CONV, *keys))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["model=flax"], "model.import = null: must name the network as module:name"),
        (["model=flax", "model.import=elsewhere:Net"], "add --plugin elsewhere.py"),
        (["model=flax", "model.import=imported_networks:Nothing"], "has no Nothing"),
    ],
)
def test_missing_code_is_a_recipe_problem(keys: list[str], said: str, tiny: Compose) -> None:
    with pytest.raises(RecipeError, match=said):
        tiny(*keys)


@pytest.mark.slow
def test_thor_needs_parameters_named_kernel(tiny: Compose) -> None:
    with pytest.raises(RecipeError, match="network with parameters named kernel"):
        reported(tiny(*FUNCTION, "optimizer=thor"))


@pytest.mark.slow
def test_plugin_network_trains_from_the_command_line(
    forked: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    shutil.copy(IMPORTED_NETWORKS, tmp_path / "nets.py")
    keys = ["model=flax", "model.import=nets:ConvNet", "model.arguments.width=4"]
    keys += ["train.steps=8", "monitor.tensorboard=false"]
    done = forked(["--plugin", "nets.py", *keys])
    assert done.returncode == 0, done.stderr
    assert "step 8: accuracy" in done.stdout
    refused = forked(keys)
    assert refused.returncode == 2
    assert "add --plugin nets.py" in refused.stderr
