"""Activations that the backward pass computes again: the same losses, fewer temporaries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from tests.conftest import OPS
from tests.whole_run import run

Tiny = Callable[..., Recipe]
PLAIN = OPS.replace("{name: resize, size: [32, 32], interpolation: linear},", "")
HIDDEN = "{name: dense, features: 512}, {name: relu}"
BLOCK = f"{{name: residual, body: [{HIDDEN}, {{name: dense, features: 8}}]}}"
NETWORK = [
    "model=layers",
    "model.layers=[{name: views, body: [{name: flatten}, {name: dense, features: 8}, "
    f"{{name: sequence, scope: blocks, repeat: 4, body: [{BLOCK}]}}, "
    "{name: dense, features: $classes}]}]",
    *(f"dataset.train.ops={PLAIN}", f"dataset.eval.ops={PLAIN}"),
    *("train.batch_size=96", "train.steps=4", "stages=[data,build,compile,train]"),
]


@pytest.mark.slow
def test_auto_remat_reduces_memory_beyond_remat_bytes(tiny: Tiny, tmp_path: Path) -> None:
    """Four blocks of 512 hidden values: their activations are most of the temporaries."""
    run(tiny(*NETWORK), tmp_path / "none")
    run(tiny(*NETWORK, "train.remat=auto", "train.remat_bytes=1"), tmp_path / "auto")
    losses = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("none", "auto")]
    assert losses[0] == losses[1]
    log = (tmp_path / "auto" / "run.log").read_text()
    (line,) = [line for line in log.splitlines() if "remat      blocks:" in line]
    before, after = line.rpartition("; ")[2].split(" MB")[0].split(" -> ")
    assert float(after) < 0.6 * float(before)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("optimizer=thor", "train.remat=blocks"), "train.remat = blocks: must be none with thor"),
        (("train.mode=eager", "train.remat=auto"), "must be none with train.mode = eager"),
        (
            ("train.remat_bytes=5",),
            "train.remat_bytes = 5: must be null unless train.remat is auto",
        ),
    ],
)
def test_settings_incompatible_with_remat_are_refused(
    tiny: Tiny, overrides: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(RecipeError) as error:
        tiny(*overrides)
    assert problem in str(error.value)


@pytest.mark.medium
def test_remat_without_blocks_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train.remat = blocks: the network has no residual"):
        run(tiny("train.remat=blocks"), tmp_path / "run")
