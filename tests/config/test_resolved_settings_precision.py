"""Precision and loss scale of whole runs: they train, skip overflows and repeat themselves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flax import linen as nn

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import resolve_level, resolve_precision
from pipeline.core.errors import RecipeError, RunError
from pipeline.models.layers.precision import find_type_rule
from tests import outcome
from tests.conftest import MLP, compose_tiny
from tests.whole_run import run

pytestmark = pytest.mark.slow

Compose = Callable[..., Recipe]

NORMED = [
    "model=layers",
    "model.layers=[{name: conv, features: 6, kernel: 3, stride: 2},batch_norm,relu,"
    "{name: residual, body: [{name: conv, features: 6, kernel: 3},batch_norm]},"
    "{name: max_pool, kernel: 2},flatten,{name: dense, features: '$classes'}]",
    "train.steps=18",
]
OVERFLOWING = ["train.loss_scale={name: dynamic, init: 1.0e22, factor: 4, window: 6}"]
"""The squares of such gradients are beyond float32; a few divisions later they are not."""


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in outcome.metrics(run_dir)]


@pytest.fixture(scope="module")
def in_float32(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run_dir = tmp_path_factory.mktemp("float32")
    run(compose_tiny(cache, *NORMED), run_dir)
    return losses(run_dir)


@pytest.mark.parametrize("precision", ["O1", "O2", "O3", "bf16"])
def test_small_network_trains_in_every_precision(
    precision: str, tiny: Compose, tmp_path: Path, in_float32: list[float]
) -> None:
    """P-03: about as in float32, but not the same; weights and momentum stay float32."""
    scale = "train.loss_scale=1024"
    run(tiny(*NORMED, f"train.precision={precision}", scale), tmp_path)
    found = losses(tmp_path)
    np.testing.assert_allclose(found, in_float32, rtol=0.05)
    assert found != in_float32
    arrays = outcome.arrays(tmp_path)
    assert {
        array.dtype for path, array in arrays.items() if path.startswith(("params", "opt_state"))
    } == {np.dtype("float32")}


@pytest.mark.parametrize(
    ("level", "keep", "dtype"),
    [
        *[("O2", None, "float32"), ("O2", True, "float32"), ("O2", False, None)],
        *[("O3", None, None), ("O3", True, "float32"), ("O3", False, None)],
        *[("bf16", True, "float32"), ("O0", False, None), ("O0", True, None), ("O1", False, None)],
    ],
)
def test_keep_batchnorm_fp32_sets_batch_norm_dtype(
    level: str, keep: bool | None, dtype: str | None, tiny: Compose
) -> None:
    """P-03: `keep_batchnorm_fp32`; None stands for the type of the network."""
    keys = () if keep is None else (f"train.keep_batchnorm_fp32={str(keep).lower()}",)
    precision = resolve_precision(tiny(*NORMED, f"train.precision={level}", *keys))
    rule = find_type_rule(precision.rules, "batch_norm", ("batch_norm_0",))
    assert (rule and rule.dtype) == dtype
    norm = find_type_rule(precision.rules, "layer_norm", ("layer_norm_0",))
    assert (norm is not None) == (level == "O2")


def test_batch_norm_losses_are_equal_in_either_dtype(tiny: Compose, tmp_path: Path) -> None:
    losses_by_key = []
    for key in ("null", "false"):
        keys = ("train.precision=O2", f"train.keep_batchnorm_fp32={key}", "train.loss_scale=1024")
        run(tiny(*NORMED, *keys), tmp_path / key)
        losses_by_key.append(losses(tmp_path / key))
    assert losses_by_key[0] == losses_by_key[1]


def test_float32_batch_norm_is_slower_on_ascend(tiny: Compose, tmp_path: Path) -> None:
    keys = ("device=ascend910", "device.precision=O2", "stages=[data,build,compile]")
    times = []
    for value in ("null", "false", "true"):
        recipe = tiny(*NORMED, *keys, f"train.keep_batchnorm_fp32={value}")
        times.append(run(recipe, tmp_path / value).modelled["step_ms"])
    assert times[0] == times[1] < times[2]


def test_o2_uses_dynamic_loss_scale(tiny: Compose, tmp_path: Path) -> None:
    """`_config_level` of MindSpore; the scale comes down to where gradients fit into float16."""
    summary = run(tiny(*NORMED, "train.precision=O2"), tmp_path)
    lines = outcome.metrics(tmp_path)
    skipped = [line["step"] for line in lines if line.get("skipped")]
    assert skipped == list(range(1, len(skipped) + 1))
    assert len(skipped) > 0
    assert [line["loss_scale"] for line in lines[: len(skipped)]] == [
        2.0 ** (24 - i) for i in range(len(skipped))
    ]
    assert f"{len(skipped)} updates skipped" in (tmp_path / "run.log").read_text()
    final = 2.0 ** (24 - len(skipped))
    assert summary.loss_scale == {"final": final, "skipped_steps": len(skipped)}
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


@pytest.fixture(scope="module")
def overflowing(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45 steps with overflows at the start and after every growth."""
    run_dir = tmp_path_factory.mktemp("overflowing")
    run(compose_tiny(cache, *OVERFLOWING, *COURSE), run_dir)
    return run_dir


COURSE = [
    *MLP,
    "schedule=cosine",
    "train.sink_size=7",
    "eval.every_steps=10",
    "checkpoint.every_steps=5",
    "checkpoint.keep=99",
]


def test_overflow_skips_the_update_and_its_learning_rate(overflowing: Path) -> None:
    """P-01 (7): the schedule counts updates, and the run goes on."""
    lines = outcome.metrics(overflowing)
    skipped = [bool(line.get("skipped")) for line in lines]
    assert 2 < sum(skipped) < 30
    assert [line["grad_norm"] is None for line in lines] == skipped
    updates = np.cumsum([0, *(not skip for skip in skipped)])[:-1]
    rates = [line["learning_rate"] for line in lines]
    first = {int(update): rate for update, rate in zip(updates, rates, strict=True)}
    assert rates == [first[int(update)] for update in updates]
    assert len(set(rates)) == len(skipped) - sum(skipped) + (1 if skipped[-1] else 0)
    summary = outcome.read_summary(overflowing)
    assert summary["loss_scale"]["skipped_steps"] == sum(skipped)
    assert summary["status"] == "done"


def test_loss_scale_follows_overflows(overflowing: Path) -> None:
    lines = outcome.metrics(overflowing)
    scale, good = np.float32(1e22), 0
    for line in lines:
        assert line["loss_scale"] == pytest.approx(float(scale), rel=1e-6)
        good = 0 if line.get("skipped") else good + 1
        if line.get("skipped"):
            scale = max(scale / np.float32(4), np.float32(1))
        elif good == 6:
            scale, good = scale * np.float32(4), 0


@pytest.mark.parametrize(
    "how",
    [
        ["train.sink=false"],
        ["train.sink_size=1"],
        ["train.sink_size=1000"],
        ["train.mechanism=soft"],
        ["train.feed=stream"],
    ],
    ids=lambda how: how[0],
)
def test_overflows_are_the_same_at_every_sink_size(
    how: list[str], overflowing: Path, tiny: Compose, tmp_path: Path
) -> None:
    run(tiny(*OVERFLOWING, *COURSE, *how), tmp_path)
    outcome.assert_same_run(tmp_path, overflowing)


def test_resumed_run_continues_with_scale_and_counts(
    overflowing: Path, tiny: Compose, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(overflowing, run_dir)
    (run_dir / "summary.json").unlink()
    for step in outcome.checkpoints(run_dir):
        if step > 10:
            shutil.rmtree(make_checkpoint_path(run_dir / "checkpoints", step))
    summary = run(tiny(*OVERFLOWING, *COURSE, f"train.resume={run_dir}"))
    assert summary.resumed_from == {"run": str(run_dir), "step": 10}
    outcome.assert_same_run(run_dir, overflowing)
    assert (
        outcome.arrays(run_dir)["features/loss_scale/overflows/skipped_steps"]
        == summary.loss_scale["skipped_steps"]
    )


@pytest.mark.mlp
def test_fixed_scale_drops_the_update_or_ends_the_run(tiny: Compose, tmp_path: Path) -> None:
    """P-02: `drop_overflow_update`."""
    drops = "train.loss_scale={name: fixed, scale: 1.0e38}"
    summary = run(tiny(drops, "train.steps=5"), tmp_path / "drops")
    assert summary.loss_scale == {"final": float(np.float32(1e38)), "skipped_steps": 5}
    before = losses(tmp_path / "drops")
    assert all(np.isfinite(before))
    with pytest.raises(RunError, match=r"Step 1 of 5: .* gradient norm is (inf|nan)"):
        run(tiny("train.loss_scale=1e38", "train.steps=5"), tmp_path / "ends")
    assert outcome.arrays(tmp_path / "ends")["step"] == 0


@pytest.mark.mlp
def test_non_finite_loss_fails_run_with_dynamic_scale(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"loss is (nan|inf)"):
        run(tiny("train.loss_scale=dynamic", "train.optimizer.lr=1e30"), tmp_path)


@pytest.mark.mlp
def test_layers_selected_by_path_train_in_their_dtype(tiny: Compose, tmp_path: Path) -> None:
    run(tiny("train.to_float=[{pattern: 'dense_*', dtype: bfloat16}]", "train.steps=6"), tmp_path)
    run(tiny("train.steps=6"), tmp_path / "float32")
    by_path, single = losses(tmp_path), losses(tmp_path / "float32")
    assert by_path != single
    np.testing.assert_allclose(by_path, single, rtol=0.02)


@pytest.mark.parametrize("how", ["train.precision=O1", "train.precision=O2"])
def test_dtype_rules_require_a_list_of_layers(
    how: str, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(how)
    monkeypatch.setattr(type(recipe.model), "build", lambda self, classes, dtype: nn.Dense(classes))
    with pytest.raises(RecipeError, match=r"train\.precision: lenet5 isn't a list of layers"):
        run(recipe, tmp_path)


def test_auto_is_the_choice_of_the_device(tiny: Compose) -> None:
    recipe = tiny("train.precision=auto")
    assert resolve_level(recipe) == "O0"
    assert resolve_level(tiny("train.precision=auto", "device=gpu")) == "bf16"
    assert resolve_level(tiny("train.precision=auto", "device=ascend910")) == "O3"
