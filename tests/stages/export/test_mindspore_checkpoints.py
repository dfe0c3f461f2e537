"""Checkpoints of a run as `.ckpt` files: names, optimizer's state, prefixes that are taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.core.errors import DataError
from pipeline.models.weights.files.weight_files import read_weights
from pipeline.stages.export.mindspore_checkpoints import iterate_free_prefixes
from tests import outcome
from tests.command_line import export
from tests.conftest import MLP, compose_tiny
from tests.whole_run import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Sinks of 20 of 45 steps, saved at 20, 40 and 45."""
    run_dir = tmp_path_factory.mktemp("ckpt") / "run"
    saves = ("checkpoint.every_steps=20", "checkpoint.keep=5", "train.sink_size=20")
    run(compose_tiny(cache, *MLP, *saves), run_dir)
    return run_dir


@pytest.mark.medium
def test_file_names_have_sink_epoch_and_step(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for _ in range(2):
        assert export([str(trained), str(folder), "--to=ckpt"]) == 0
    steps = ("1_20", "2_20", "3_5")
    expected = [f"{prefix}-{step}.ckpt" for prefix in ("mlp", "mlp_1") for step in steps]
    assert sorted(file.name for file in folder.iterdir()) == sorted(expected)


@pytest.mark.medium
def test_optimizer_state_is_exported_on_request(trained: Path, tmp_path: Path) -> None:
    one = make_checkpoint_path(trained / "checkpoints", 40)
    assert export([str(one), str(tmp_path), "--to=ckpt", "--optimizer", "--prefix=net"]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name == "net-2_20.ckpt"
    arrays, saved = read_weights(file), outcome.arrays(trained, 40)
    params = [name.removeprefix("params/") for name in saved if name.startswith("params/")]
    moments = [f"moments.{name}" for name in params]
    assert sorted(arrays) == sorted([*params, *moments, "global_step"])
    assert arrays["global_step"].tolist() == [40]
    for name in params:
        np.testing.assert_array_equal(arrays[name], saved[f"params/{name}"])
        (trace,) = [a for path, a in saved.items() if path.endswith(f"trace/{name}")]
        np.testing.assert_array_equal(arrays[f"moments.{name}"], trace)


def test_prefix_is_used_only_by_files_of_its_form(tmp_path: Path) -> None:
    for name in ("net-x.ckpt", "net-1_2.txt", "nets-1_2.ckpt", "net-1.ckpt"):
        (tmp_path / name).touch()
    assert next(iterate_free_prefixes(tmp_path, "net")) == "net"
    (tmp_path / "net-1_2.ckpt").touch()
    (tmp_path / "net_1-1_2.ckpt").touch()
    assert next(iterate_free_prefixes(tmp_path, "net")) == "net_2"


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="isn't a run directory"):
        export([str(tmp_path), str(tmp_path / "out"), "--to=ckpt"])
    assert not (tmp_path / "out").exists()
