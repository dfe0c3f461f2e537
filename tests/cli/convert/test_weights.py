from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from pipeline.api import ColumnSpec, HostOp, component
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, UsageError
from pipeline.models.weights.files.weight_files import read_weights, write_weights
from pipeline.stages.record.trained_run import read_trained_run
from tests import outcome
from tests.command_line import convert
from tests.stages.export.test_matching import lenet
from tests.whole_run import run

Compose = Callable[..., Recipe]
LENET5 = "+recipe=lenet5_digits"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """LeNet-5 under torch's names, for ten classes and one channel."""
    write_weights(tmp_path / "theirs.npz", lenet())
    return tmp_path / "theirs.npz"


@pytest.mark.slow
def test_weights_are_converted_for_recipe_network(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "ours.safetensors"
    assert convert(["weights", str(theirs), str(target), LENET5, "--rules=torch"]) == 0
    ours, given = read_weights(target), read_weights(theirs)
    assert sorted(ours)[:2] == ["params/conv_0/kernel", "params/conv_1/kernel"]
    np.testing.assert_array_equal(
        ours["params/conv_1/kernel"], given["conv2.weight"].transpose(2, 3, 1, 0)
    )
    said = capsys.readouterr().out
    row = ["matched", "conv2.weight", "16x6x5x5", "params/conv_1/kernel", "5x5x6x16"]
    assert row in [line.split() for line in said.splitlines()]
    assert f"{theirs}: 8 of 8 arrays matched (torch names)" in said
    assert f"{target}: 8 arrays, 0.2 MB" in said


def test_weights_without_recipe_change_only_format(theirs: Path, tmp_path: Path) -> None:
    assert convert(["weights", str(theirs), str(tmp_path / "w.ckpt")]) == 0
    one, other = read_weights(theirs), read_weights(tmp_path / "w.ckpt")
    assert list(one) == list(other)
    for name, array in one.items():
        np.testing.assert_array_equal(other[name], array)


@pytest.mark.parametrize("words", [["--partial"], ["--rules=torch"], ["--partial", "--like=f.npz"]])
def test_options_of_a_network_need_a_recipe(theirs: Path, tmp_path: Path, words: list[str]) -> None:
    named = " ".join(words).replace("=", " ")
    with pytest.raises(UsageError, match=f"^{named}: needs a recipe, whose network the arrays are"):
        convert(["weights", str(theirs), str(tmp_path / "w.npz"), *words])
    assert not (tmp_path / "w.npz").exists()


def test_unsupported_target_format_is_refused_before_reading(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ours\.pth: can't be written; must end in one of"):
        convert(["weights", str(tmp_path / "nowhere.npz"), str(tmp_path / "ours.pth"), LENET5])


@pytest.mark.slow
def test_missing_array_is_refused_unless_partial(theirs: Path, tmp_path: Path) -> None:
    arrays = read_weights(theirs)
    del arrays["fc1.bias"]
    write_weights(theirs, arrays)
    target = tmp_path / "ours.npz"
    with pytest.raises(DataError, match=r"(?s)1 missing; nothing is loaded.*params/dense_0/bias"):
        convert(["weights", str(theirs), str(target), LENET5])
    assert not target.exists()
    assert convert(["weights", str(theirs), str(target), LENET5, "--partial"]) == 0
    assert len(read_weights(target)) == 7


@pytest.mark.slow
def test_renames_of_recipe_apply(theirs: Path, tmp_path: Path) -> None:
    arrays = read_weights(theirs)
    arrays["junk"] = np.zeros(1, np.float32)
    write_weights(theirs, arrays)
    rules = "checkpoint.renames=[{match: junk, to: null}]"
    target = tmp_path / "ours.npz"
    assert convert(["weights", str(theirs), str(target), LENET5, rules]) == 0
    assert len(read_weights(target)) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "convert: must be followed by one of weights, records"),
        (["weigths"], "convert weigths: there is no such command; did you mean weights?"),
        (["weights"], "weights: SOURCE is missing; convert weights takes SOURCE TARGET"),
        (["weights", "a.npz", "b.npz", "rules=x"], "rules = x: there is no such key"),
        (["weights", "a.npz", "--force"], "--force: there is no such option"),
        (
            ["weights", "a.npz", "b.npz", LENET5, "--rules=x"],
            "--rules x: must be one of",
        ),
    ],
)
def test_wrong_arguments_are_refused(args: list[str], message: str) -> None:
    with pytest.raises((RecipeError, UsageError)) as error:
        convert(args)
    assert message in str(error.value)


@pytest.mark.slow
def test_table_is_the_last_output_of_the_command(
    theirs: Path, forked: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    arrays = read_weights(theirs)
    write_weights(theirs, arrays | {"fc3.weight": np.zeros((7, 84), np.float32)})
    said = forked(["convert", "weights", str(theirs), "ours.npz", LENET5])
    assert (said.returncode, said.stdout) == (2, "")
    lines = said.stderr.splitlines()
    assert lines[0].startswith(f"error: {theirs}: 7 of 8 arrays matched (torch names), 1 misshapen")
    row = "misshapen fc3.weight 84x7 params/dense_2/kernel 84x10 7x84 in the file"
    assert lines[2].split() == row.split()
    assert len(lines) == 3


def test_missing_source_is_refused() -> None:
    with pytest.raises(DataError, match="nowhere: there is no such file or run directory"):
        convert(["weights", "nowhere", "b.npz"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    from tests.conftest import compose_tiny

    run_dir = tmp_path_factory.mktemp("trained") / "run"
    run(compose_tiny(cache), run_dir)
    return run_dir


@pytest.mark.slow
def test_exported_run_weights_can_be_restored(trained: Path, tiny: Compose, tmp_path: Path) -> None:
    target = tmp_path / "ours.safetensors"
    assert convert(["weights", str(trained), str(target)]) == 0
    kept = outcome.arrays(trained)
    for name, array in read_weights(target).items():
        np.testing.assert_array_equal(array, kept[name])
    eval_only = "stages=[data,build,compile,eval]"
    restored = run(tiny(eval_only, f"checkpoint.restore={target}"), tmp_path / "again")
    assert restored.metrics["accuracy"] == outcome.read_summary(trained)["metrics"]["accuracy"]
    said = (tmp_path / "again" / "run.log").read_text()
    assert f"restore    {target}: 8 of 8 arrays matched (own names)" in said


@pytest.mark.slow
def test_warm_start_applies_renames_and_resets_optimizer(
    trained: Path, tiny: Compose, tmp_path: Path
) -> None:
    """As requested, the head is the network's own, and everything else comes from the file."""
    arrays = {
        f"old/{name}": array
        for name, array in outcome.arrays(trained).items()
        if name.startswith("params/")
    }
    write_weights(tmp_path / "old.npz", arrays)
    renames = (
        r"checkpoint.renames=[{match: 'old/params/dense_2/.*', to: null},"
        r"{match: 'old/(.*)', to: '\1'}]"
    )
    restore = [f"checkpoint.restore={tmp_path / 'old.npz'}", renames, "checkpoint.rules=none"]
    still = ["train.optimizer.lr=1e-30", "train.steps=1"]
    with pytest.raises(DataError, match="6 of 8 arrays matched"):
        run(tiny(*restore, *still), tmp_path / "refused")
    assert_nothing_compiled(tmp_path / "refused")
    run(tiny(*restore, *still, "checkpoint.partial=true"), tmp_path / "run")
    before, after = outcome.arrays(trained), outcome.arrays(tmp_path / "run")
    same = [
        name
        for name in before
        if name.startswith("params/") and np.allclose(before[name], after[name], rtol=0, atol=1e-20)
    ]
    assert len(same) == 6
    assert not [name for name in same if "dense_2" in name]


def assert_nothing_compiled(run_dir: Path) -> None:
    stages = [line.split()[1] for line in (run_dir / "run.log").read_text().splitlines()]
    assert "build" in stages
    assert "compile" not in stages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.npz", "there is no such file"),
        ("none", "holds no checkpoint"),
        ("text.txt", "holds no checkpoint"),
        ("empty.safetensors", "can't read these weights"),
    ],
)
def test_restore_error_is_reported_before_compilation(
    source: str, message: str, tiny: Compose, tmp_path: Path
) -> None:
    for name in ("text.txt", "empty.safetensors"):
        (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=message):
        run(tiny(f"checkpoint.restore={tmp_path / source}"), tmp_path / "run")
    assert_nothing_compiled(tmp_path / "run")


@pytest.mark.slow
def test_checkpoint_of_another_network_is_reported_before_compilation(
    trained: Path, tiny: Compose, tmp_path: Path
) -> None:
    other = ["model=mlp", "model.hidden=[8]"]
    with pytest.raises(DataError, match="of another recipe"):
        run(tiny(*other, f"checkpoint.restore={trained}"), tmp_path / "run")
    assert_nothing_compiled(tmp_path / "run")


@pytest.mark.slow
def test_renames_apply_to_run_checkpoints(trained: Path, tiny: Compose, tmp_path: Path) -> None:
    renames = "checkpoint.renames=[{match: 'params/conv_(.)/kernel', to: 'conv_\\1/kernel'}]"
    eval_only = "stages=[data,build,compile,eval]"
    run(tiny(eval_only, f"checkpoint.restore={trained}", renames), tmp_path / "run")
    said = (tmp_path / "run" / "run.log").read_text()
    assert f"restore    step 45 of {trained}: 8 of 8 arrays matched (own names)" in said


@pytest.mark.slow
def test_rename_adds_the_path_of_a_cell_without_prefix(tiny: Compose, tmp_path: Path) -> None:
    """M-01: names of a cell with auto_prefix=False have no path."""
    weights = {"weight": np.zeros((10, 1024), np.float32), "bias": np.arange(10, dtype=np.float32)}
    np.savez(tmp_path / "cell.npz", **weights)
    network = "model.layers=[flatten,{name: dense, features: '$classes'}]"
    renames = "checkpoint.renames=[{match: '(.*)', to: 'dense_0.\\1'}]"
    eval_only = "stages=[data,build,compile,eval]"
    restore = f"checkpoint.restore={tmp_path / 'cell.npz'}"
    run(tiny("model=layers", network, eval_only, restore, renames), tmp_path / "run")
    said = (tmp_path / "run" / "run.log").read_text()
    assert "2 of 2 arrays matched" in said


@component("host_op")
class EveryOther(HostOp):
    """Leaves out every other row and column of an image."""

    name: Literal["test_every_other"] = "test_every_other"
    column: str = "image"

    def output(self, value: ColumnSpec) -> ColumnSpec:
        height, width, channels = value.shape
        return ColumnSpec(((height + 1) // 2, (width + 1) // 2, channels), value.dtype)

    def __call__(self, value: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        return value[::2, ::2]


@pytest.mark.slow
@pytest.mark.mlp
def test_weights_of_a_run_with_host_ops_are_converted(tiny: Compose, tmp_path: Path) -> None:
    """A host op changes the sizes that the network reads."""
    # Without map ops, which would resize images to one size.
    splits = ("train", "eval")
    ops = [f"dataset.{split}.host_ops=[test_every_other]" for split in splits]
    run(tiny(*ops, *(f"dataset.{split}.ops=[]" for split in splits)), tmp_path / "run")
    assert convert(["weights", str(tmp_path / "run"), str(tmp_path / "ours.npz")]) == 0
    saved = outcome.arrays(tmp_path / "run")
    written = read_weights(tmp_path / "ours.npz")
    assert "params/dense_0/kernel" in written
    for name, array in written.items():
        np.testing.assert_array_equal(array, saved[name])


@pytest.mark.slow
@pytest.mark.mlp
def test_weights_of_a_run_with_adapters_are_their_sum(tiny: Compose, tmp_path: Path) -> None:
    run(tiny("train.features=[{name: lora, rank: 2}]"), tmp_path / "run")
    assert convert(["weights", str(tmp_path / "run"), str(tmp_path / "ours.npz")]) == 0
    merged = read_trained_run(tmp_path / "run").arrays
    written = read_weights(tmp_path / "ours.npz")
    assert {*written} == {*merged}
    for name, array in written.items():
        np.testing.assert_array_equal(array, merged[name])
