"""`compare` from the command line: runs, recipes and dumps, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from pipeline import run
from pipeline.core.errors import DataError, RecipeError, UsageError
from tests.command_line import compare as main
from tests.command_line import dump
from tests.conftest import compose_tiny
from tests.inspect.dumps.test_dump_step import MLP

OTHER = "model.layers=[flatten,relu,{name: dense, features: '$classes'}]"
NORMALISED = (
    "model.layers=[{name: conv, features: 4, kernel: 3, stride: 4},batch_norm,relu,flatten,"
    "{name: dense, features: '$classes'}]"
)


@pytest.fixture(scope="module")
def runs(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    recipes = {
        "A": compose_tiny(cache, *MLP),
        "B": compose_tiny(cache, *MLP, "seed=2"),
        "other": compose_tiny(cache, MLP[0], OTHER, *MLP[2:]),
    }
    for name, recipe in recipes.items():
        assert run(recipe, folder / name).status == "done"
    return {name: folder / name for name in recipes}


def told(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    status = main(args)
    return status, capsys.readouterr().out


@pytest.mark.slow
def test_precision_error_is_located_by_layer(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.csv"
    status, text = told([str(runs["A"]), "--against=train.precision=bf16", f"--out={file}"], capsys)
    assert status == 0, text
    assert "no layer makes more error than its type explains" in text
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    outputs = {row["LeftOp"]: row for row in rows if row["TensorIndex"] == "output:0"}
    assert list(outputs) == [
        "dataset.train.ops",
        "conv_0",
        "relu_0",
        "flatten_0",
        "dense_0",
        "train.loss",
    ]
    assert outputs["dataset.train.ops"]["MaxAbsoluteError"] == "0"
    assert 1e-4 < float(outputs["conv_0"]["RelativeEuclideanDistance"]) < 1e-2


@pytest.mark.slow
def test_runs_are_compared_from_one_state(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    args = [str(runs["B"]), str(runs["A"]), "--step=4", "--layers=dense_*"]
    status, text = told(args, capsys)
    assert status == 0, text
    assert json.loads(told([*args, "--json"], capsys)[1])["culprits"] == []
    assert "the weights of the runs are" in text
    assert "conv_0" not in text.partition("layers by themselves")[2]


@pytest.mark.slow
def test_layer_with_another_epsilon_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["+recipe=lenet5_digits", "model=layers", NORMALISED, "train.steps=3"]
    changed = NORMALISED.replace("batch_norm", "{name: batch_norm, epsilon: 0.01}")
    status, text = told([*recipe, f'--against="{changed}"'], capsys)
    assert status == 1, text
    assert "culprit    batch_norm_0 (batch_norm)" in text


@pytest.mark.slow
def test_dumps_are_compared_by_file(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("A", "B"):
        (tmp_path / name).mkdir()
        assert dump([str(runs[name]), "--step=12", f"--out={tmp_path / name}"]) == 0
    names = [str(tmp_path / name) for name in ("A", "B")]
    status, text = told(names, capsys)
    assert status == 1
    assert "rows are beyond a threshold" in text
    status, facts = told([names[0], names[0], "--json"], capsys)
    assert (status, json.loads(facts)["marked"]) == (0, [])
    file = next((tmp_path / "B").glob("**/conv_0.output.0.*.npy"))
    file.write_bytes(b"")
    with pytest.raises(DataError, match="damaged dump"):
        main(names)


@pytest.mark.parametrize(
    ("args", "error", "problem"),
    [
        ([], UsageError, "compare takes A B"),
        (["A"], UsageError, "compare takes A B"),
        (["A", "B", "--against=seed=2"], UsageError, "compare takes A B"),
        (["A", "--against=seed=2", "stp=4"], UsageError, "needs .recipe=NAME"),
        (["A", "B", "--step=x"], UsageError, "must be a whole number from 0"),
        (["A", "B", "--cosine=2"], UsageError, "must be a number from 0 to 1"),
        (["A", "B", "--max-absolute=0.5"], UsageError, "must be a number from 1 to 5"),
        (["A", "B", "--map=conv"], UsageError, "must be LEFT:RIGHT"),
        (["A", "B", "--what=x"], UsageError, "must be one of input, output, all"),
        (["nowhere", "nothing"], DataError, "must be a run directory or a dump"),
    ],
)
def test_wrong_arguments_are_refused(args: list[str], error: type[Exception], problem: str) -> None:
    """Before a run is read."""
    with pytest.raises(error, match=problem) as caught:
        main(args)
    assert getattr(caught.value, "exit_status", None) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "error", "problem"),
    [
        (["A", "--against=train.precision=bf17"], RecipeError, "train.precision = bf17"),
        (["A", "nowhere"], DataError, "nowhere: there is no such run"),
        (["other", "A"], DataError, "different networks: flatten_0 is flatten|different networks"),
        (["A", "B", "--layers=dens_*"], RecipeError, "did you mean dense_0"),
        (
            ["A", "B", "--map=dens_0:dense_1+x"],
            RecipeError,
            "no layer dens_0; did you mean dense_0",
        ),
        (["A", "B", "--map=dense_0:dense_1+x"], RecipeError, "the right side has no layer x"),
        (["A", "B", "--step=99"], DataError, "must be from 0 to 12"),
    ],
)
def test_bad_input_error_has_one_line(
    args: list[str], error: type[Exception], problem: str, runs: dict[str, Path]
) -> None:
    with pytest.raises(error, match=problem) as caught:
        main([str(runs[arg]) if arg in runs else arg for arg in args])
    assert getattr(caught.value, "exit_status", None) == 2


@pytest.mark.slow
def test_run_without_checkpoints_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes((runs["A"] / "recipe.yaml").read_bytes())
    with pytest.raises(DataError, match="has no checkpoints"):
        main([str(runs["A"]), str(tmp_path)])
