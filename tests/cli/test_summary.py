"""`summary`: layers, shapes and what is trained when, of a recipe or a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, UsageError
from pipeline.core.reporter import Reporter
from pipeline.stages.layer_table import LayerTable, make_layer_table
from tests.command_line import summary
from tests.conftest import TINY
from tests.whole_run import run

Compose = Callable[..., Recipe]

TUNED = [
    'train.freeze=["!dense_2"]',
    "train.unfreeze=[{pattern: dense_*, after_epochs: 1}]",
    "train.lr_decay_by_layer=0.5",
]


def table(recipe: Recipe) -> LayerTable:
    """The table of a recipe."""
    return make_layer_table(recipe, Reporter())


def test_layers_are_listed_in_order(tiny: Compose) -> None:
    found = table(tiny())
    assert [row.path for row in found.layers] == [
        *("conv_0", "relu_0", "max_pool_0", "conv_1", "relu_1", "max_pool_1", "flatten_0"),
        *("dense_0", "relu_2", "dense_1", "relu_3", "dense_2"),
    ]
    by_path = {row.path: row for row in found.layers}
    assert by_path["conv_0"].output == (28, 28, 6)
    assert by_path["conv_0"].shapes == {"kernel": (5, 5, 1, 6)}
    assert by_path["max_pool_1"].output == (5, 5, 16)
    assert by_path["dense_0"].shapes == {"bias": (120,), "kernel": (400, 120)}
    assert (by_path["dense_0"].parameters, by_path["dense_0"].dtype) == (48_120, "float32")
    assert (by_path["relu_0"].parameters, by_path["relu_0"].trained) == (0, "")
    assert (found.parameters, found.trained) == (61_684, {0: found.parameters})
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[1:13]] == [row.path for row in found.layers]
    assert lines[0].split()[:4] == ["layer", "kind", "output", "parameters"]


@pytest.mark.medium
def test_header_has_the_task_and_its_speed(tiny: Compose) -> None:
    found = table(tiny(*TUNED))
    trained = {row.path: row.trained for row in found.layers if row.parameters}
    assert trained == {
        "conv_0": "no",
        "conv_1": "no",
        "dense_0": "from step 7",
        "dense_1": "from step 7",
        "dense_2": "yes",
    }
    assert [row.rate for row in found.layers if row.parameters] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
    assert found.trained == {0: 850, 6: 48_120 + 10_164 + 850}
    text = str(found)
    assert "from step 7" in text
    assert "x0.0625" in text
    assert "trained     850; " in text


@pytest.mark.medium
def test_partly_frozen_layers_name_their_parameters(tiny: Compose) -> None:
    found = table(tiny("train.freeze=['*/bias']"))
    assert {row.trained for row in found.layers} == {"", "yes", "bias no, kernel yes"}


@pytest.mark.medium
def test_blocks_are_listed_with_their_layers(tiny: Compose) -> None:
    recipe = tiny("model=resnet20", "dataset.like=cifar10", "dataset.eval.ops=[]")
    found = table(recipe)
    blocks = [row.path for row in found.layers if row.path.startswith("stage2_block0/")]
    assert len(blocks) >= 5
    assert any(path.startswith("stage2_block0/shortcut/batch_norm_") for path in blocks)
    assert found.parameters == sum(row.parameters for row in found.layers)
    assert found.statistics > 0
    assert found.layers[-1].output == (10,)


@pytest.mark.slow
def test_run_summary_equals_summary_of_its_recipe(
    tiny: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny("train.steps=2", *TUNED), tmp_path)
    capsys.readouterr()
    assert main(["summary", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = table(tiny("train.steps=2", *TUNED))
    assert document == json.loads(json.dumps(found.to_dict()))
    assert document["parameters"] == sum(layer["parameters"] for layer in document["layers"])
    assert document["trained"][0] == {"from_step": 1, "parameters": 850}
    assert main(["summary", str(tmp_path), "train.freeze=[]", "train.unfreeze=[]"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("lenet5, image 32x32x1\n\nlayer")
    assert "0 frozen" in out


@pytest.mark.medium
def test_unmatched_scope_error_lists_scopes(tiny: Compose) -> None:
    with pytest.raises(
        RecipeError, match=r"train.freeze: pattern 'dence_0' matches none .*dense_2"
    ):
        table(tiny("train.freeze=[dence_0]"))


def test_usage_is_printed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean --json"):
        summary(["--jsn"])
    with pytest.raises(DataError, match=r"isn't a run directory.*; \+recipe=NAME"):
        summary([str(tmp_path)])


@pytest.mark.medium
def test_summary_command_prints_the_table(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["summary", *TINY, f"cache.root={cache}", "train.steps=4"]) == 0
    said = capsys.readouterr()
    assert "parameters  61,684, 0.2 MB in float32" in said.out
    assert list(tmp_path.iterdir()) == []
