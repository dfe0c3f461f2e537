"""The args.yaml of timm as a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import load_recipe
from pipeline.config.foreign.adopt import make_recipe_text, read_table
from pipeline.config.foreign.mindcv import adopt_timm
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from tests.config.foreign.files import TIMM


def write_recipe(folder: Path, **changes: Any) -> Recipe:
    """Adopt timm's settings, and return the recipe of the file."""
    file = folder / "adopted.yaml"
    file.write_text(make_recipe_text(adopt_timm("args.yaml", {**TIMM, **changes}), file))
    return load_recipe(str(file))


@pytest.mark.medium
def test_args_values_are_in_the_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    train = recipe.train
    optimizer = train.optimizer.model_dump()
    assert (optimizer["name"], optimizer["nesterov"], optimizer["momentum"]) == (
        "momentum",
        True,
        0.9,
    )
    assert optimizer["lr"] == 0.1 * 64 * 2 / 256
    assert (train.batch_size, train.accumulate_steps) == (128, 2)
    assert train.epochs == 10 + 3 + 2
    assert train.precision == "O1"
    scale = train.loss_scale.model_dump()
    assert (scale["name"], scale["init"]) == ("dynamic", 65536.0)
    assert train.clip.norm == 1.0
    assert train.ema.decay is None
    assert recipe.seed == 42
    dataset = recipe.dataset.model_dump(mode="json")
    assert dataset["train"]["ops"][-1]["mean"] == [127.5] * 3
    assert dataset["image_size"] == [182, 182]


@pytest.mark.parametrize(
    ("device", "name"), [("cpu", "cpu"), ("cuda:0", "gpu"), ("npu:1", "ascend910")]
)
def test_device_string_selects_the_device(device: str, name: str) -> None:
    """G-04: npu:1 is an Ascend."""
    rows = {row.setting: row for row in adopt_timm("args.yaml", {**TIMM, "device": device}).rows}
    assert rows["device"].keys == {"device": name}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "precision", "scale"),
    [
        pytest.param({"amp": False}, "O0", "fixed", marks=pytest.mark.slow),
        pytest.param(
            {"amp": True, "amp_dtype": "bfloat16"}, "bf16", "fixed", marks=pytest.mark.slow
        ),
        ({"amp": True, "amp_dtype": "float16", "amp_impl": "apex"}, "O1", "dynamic"),
    ],
)
def test_mixed_precision_is_mapped(
    changes: dict[str, Any], precision: str, scale: str, tmp_path: Path
) -> None:
    """G-04: APEX and PyTorch's own autocast."""
    train = write_recipe(tmp_path, **changes, device="cpu").train
    assert train.precision == precision
    assert train.loss_scale.model_dump()["name"] == scale


@pytest.mark.slow
def test_gradients_are_not_clipped_without_clip_grad(tmp_path: Path) -> None:
    assert write_recipe(tmp_path, clip_grad=None).train.clip.norm is None


@pytest.mark.slow
def test_adaptive_optimizer_rate_scales_with_square_root_of_batch(tmp_path: Path) -> None:
    values = {"opt": "adamw", "opt_betas": [0.8, 0.95], "opt_eps": 1e-6}
    optimizer = write_recipe(tmp_path, **values).train.optimizer.model_dump()
    assert optimizer["lr"] == pytest.approx(0.1 * (128 / 256) ** 0.5)
    assert (optimizer["b1"], optimizer["b2"], optimizer["eps"]) == (0.8, 0.95, 1e-6)


def test_optimizer_without_betas_leaves_them_unmapped() -> None:
    values = {**TIMM, "opt_betas": [0.8, 0.95], "opt_eps": 1e-6}
    rows = {row.setting: row for row in adopt_timm("args.yaml", values).rows}
    assert rows["opt_betas"].note == "the optimizer doesn't use it"
    assert rows["opt_eps"].keys == {}


def test_every_setting_has_a_row_under_its_name() -> None:
    rows = {row.setting: row for row in adopt_timm("args.yaml", TIMM).rows}
    assert set(TIMM) <= set(rows)
    assert "cutout" in rows["reprob"].note
    assert rows["img_size"].keys == {"dataset.train.ops.random_resized_crop.size": [160, 160]}


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.floats())
)


@pytest.mark.medium
@given(st.dictionaries(st.sampled_from([*TIMM, *read_table("timm")["names"], "unknown"]), VALUES))
@settings(max_examples=100, deadline=None)
def test_accepted_file_has_one_row_per_setting(changes: dict[str, Any]) -> None:
    values = {**TIMM, **changes}
    try:
        adoption = adopt_timm("args.yaml", values)
    except (RecipeError, OverflowError):
        return
    names = [row.setting for row in adoption.rows]
    assert len(names) == len(set(names))
    assert set(values) <= set(names)
    assert all(row.keys or row.note for row in adoption.rows)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "swin_tiny"}, "model = swin_tiny: there is no such network"),
        ({"opt": "kron"}, "opt = kron: must be one of"),
        ({"dataset": "hfds/x"}, "dataset = hfds/x: must be one of"),
        ({"lr_base": "fast"}, "lr_base = fast: must be a number"),
        ({"mean": ["a"]}, r"mean\.0 = a: must be a number"),
        ({"lr_base_size": 0}, "lr_base_size = 0: must be above 0"),
    ],
)
def test_unsupported_setting_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        adopt_timm("args.yaml", {**TIMM, **changes})
