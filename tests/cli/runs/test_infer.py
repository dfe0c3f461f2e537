from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import ExifTags, Image

from pipeline.cli.runs.infer import _compute_in_batches
from pipeline.core.errors import DataError, PipelineError, RunError, UsageError
from pipeline.data.columns import Task
from pipeline.models.weights.files.weight_files import write_weights
from pipeline.stages.export.export import read_export
from pipeline.stages.export.prediction import make_predict
from pipeline.stages.record.trained_run import TrainedRun, read_trained_run
from tests import outcome
from tests.command_line import export, infer
from tests.conftest import ROOT, compose_tiny
from tests.whole_run import run

OPS = (
    "[{name: resize, size: [32, 32]}, {name: rescale, factor: 0.004, shift: 0.0}, {name: hwc2chw}]"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """LeNet-5 trained on made-up digits whose ops put channels first."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    ops = [f"dataset.train.ops={OPS}", f"dataset.eval.ops={OPS}"]
    run(compose_tiny(cache, *ops, "train.steps=60", "train.optimizer.lr=0.02"), run_dir)
    return run_dir


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    folder = trained.parent / "exported"
    assert export([str(trained), str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def samples(trained: Path) -> tuple[np.ndarray, np.ndarray]:
    """The evaluation split as it is read."""
    recipe = read_trained_run(trained).recipe
    columns = recipe.dataset.read(Path()).eval.columns
    return np.asarray(columns["image"][:]), np.asarray(columns["label"][:])


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def infer_json(
    capsys: pytest.CaptureFixture[str], source: Path, *files: Path
) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert infer([str(source), *map(str, files), "--json", "--top=10"]) == 0
    return lines(capsys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "export"])
def test_predictions_match_evaluation_of_the_run(
    kind: str,
    trained: Path,
    exported: Path,
    samples: tuple[np.ndarray, np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All evaluation images, in 64s padded at the end, give the accuracy of the run."""
    images, labels = samples
    many = np.concatenate([images, images])
    np.save(tmp_path / "many.npy", many)
    answers = infer_json(capsys, trained if kind == "run" else exported, tmp_path / "many.npy")
    assert len(answers) == len(many) == 80
    right = np.array([answer["label"] for answer in answers]) == np.concatenate([labels, labels])
    metrics = outcome.read_summary(trained)["metrics"]
    assert np.mean(right) == pytest.approx(metrics["accuracy"])
    assert metrics["accuracy"] > 0.3
    assert answers[0]["class"] == str(answers[0]["label"])
    correct = [
        next(top["probability"] for top in answer["top"] if top["label"] == label)
        for answer, label in zip(answers, labels, strict=False)
    ]
    assert -np.mean(np.log(correct)) == pytest.approx(metrics["loss"], rel=1e-3)
    assert answers[7]["file"] == f"{tmp_path / 'many.npy'}[7]"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "export"])
def test_inverted_image_has_one_warning(
    kind: str, trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The made-up digits are neither dark nor bright, so the recorded brightness is replaced."""
    source = tmp_path / "source"
    shutil.copytree(trained if kind == "run" else exported, source)
    file = source / ("summary.json" if kind == "run" else "model.json")
    tree = json.loads(file.read_text())
    entry = tree["data"] if kind == "run" else tree
    assert 100 < entry["brightness"]["mean"] < 150
    entry["brightness"] = {"mean": 33.0, "std": 10.0, "largest": 255.0}
    file.write_text(json.dumps(tree))
    images = np.zeros((4, 8, 8, 1), np.uint8)
    images[:, 2:4, :5] = 210
    np.save(tmp_path / "usual.npy", images)
    np.save(tmp_path / "inverted.npy", 255 - images[:3])
    assert infer([str(source), str(tmp_path / "usual.npy")]) == 0
    assert capsys.readouterr().err == ""
    assert infer([str(source), str(tmp_path / "inverted.npy"), str(tmp_path / "usual.npy")]) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 7
    (line,) = output.err.splitlines()
    counts = "3 of 7 images look inverted"
    assert line.startswith(f"warning    {counts}, such as {tmp_path / 'inverted.npy'}[0]: the mean")


@pytest.mark.slow
def test_run_and_export_agree(
    trained: Path, exported: Path, samples: tuple[np.ndarray, np.ndarray]
) -> None:
    network, images = read_trained_run(trained), samples[0]
    expected = np.asarray(jax.jit(make_predict(network))(network.arrays, images))
    program = read_export(exported)
    for count in (1, 3, 40):
        found = np.asarray(program.program.call(program.arrays, images[:count]))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected[:count], rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_export_describes_itself(exported: Path) -> None:
    about = json.loads((exported / "model.json").read_text())
    assert about["inputs"][-1] == {"name": "image", "shape": ["batch", 8, 8, 1], "dtype": "uint8"}
    assert about["outputs"] == [{"name": "logits", "shape": ["batch", 10], "dtype": "float32"}]
    assert (about["model"], about["step"], len(about["classes"])) == ("lenet5", 60, 10)
    assert [entry["name"] for entry in about["inputs"][:-1]] == sorted(
        name for name in outcome.arrays(exported.parent / "run") if name.startswith("params/")
    )
    assert "stablehlo.dot_general" in (exported / "model.mlir").read_text()


@pytest.mark.slow
def test_example_in_document_runs(exported: Path) -> None:
    document = (ROOT / "docs" / "weights.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    said = subprocess.run(
        [sys.executable, "-c", f"{example}\nprint(logits.shape, logits.dtype)"],
        cwd=exported.parent,
        capture_output=True,
        text=True,
    )
    assert (said.returncode, said.stdout) == (0, "(5, 10) float32\n"), said.stderr


@pytest.mark.slow
def test_images_are_decoded_as_in_the_dataset(
    trained: Path,
    samples: tuple[np.ndarray, np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    image = samples[0][0]
    Image.fromarray(image[..., 0]).save(tmp_path / "grey.png")
    Image.fromarray(np.repeat(image, 3, axis=-1)).save(tmp_path / "rgb.png")
    np.save(tmp_path / "one.npy", image)
    np.save(tmp_path / "flat.npy", image[..., 0])
    np.savez(tmp_path / "one.npz", image=image[None])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = Image.fromarray(np.rot90(image[..., 0]))
    turned.save(tmp_path / "turned.webp", exif=exif, lossless=True)
    names = ("grey.png", "rgb.png", "turned.webp", "one.npy", "flat.npy", "one.npz")
    files = [tmp_path / name for name in names]
    answers = infer_json(capsys, trained, *files)
    assert [answer.pop("file") for answer in answers] == [str(file) for file in files]
    assert answers == [answers[0]] * 6
    larger = Image.fromarray(image[..., 0]).resize((16, 16), Image.Resampling.NEAREST)
    larger.save(tmp_path / "large.bmp")
    (answer,) = infer_json(capsys, trained, tmp_path / "large.bmp")
    assert answer["label"] == answers[0]["label"]


@pytest.mark.slow
def test_prediction_has_one_line(
    trained: Path, samples: tuple[np.ndarray, np.ndarray], tmp_path: Path, capsys: Any
) -> None:
    np.save(tmp_path / "one.npy", samples[0][0])
    capsys.readouterr()
    infer([str(trained / "checkpoints"), str(tmp_path / "one.npy"), "--top=2"])
    said = capsys.readouterr().out
    name, _, told = said.partition(": ")
    assert name == str(tmp_path / "one.npy")
    first, second = (entry.split() for entry in told.split(", "))
    assert float(first[1]) > float(second[1]) > 0
    assert {first[0], second[0]} <= {str(label) for label in range(10)}


STEERING = "\x1b[2Jcat\nb.png: dog 1.0000"


@pytest.mark.slow
def test_control_characters_in_names_are_escaped(
    exported: Path, samples: tuple[np.ndarray, np.ndarray], tmp_path: Path, capsys: Any
) -> None:
    folder = shutil.copytree(exported, tmp_path / "exported")
    about = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**about, "classes": [STEERING] * 10}))
    file = tmp_path / "a\x1b[31m\nb.npy"
    np.save(file, samples[0][0])
    capsys.readouterr()
    infer([str(folder), str(file)])
    said = capsys.readouterr().out
    assert said.removesuffix("\n").isprintable()
    assert said.startswith(f"{tmp_path}/a\\x1b[31m\\nb.npy: \\x1b[2Jcat\\nb.png: dog 1.0000 ")
    (answer,) = infer_json(capsys, folder, file)
    assert (answer["class"], answer["file"]) == (STEERING, str(file))


def refused(source: Path, *files: Path | str) -> str:
    with pytest.raises(PipelineError) as error:
        infer([str(source), *map(str, files)])
    assert isinstance(error.value, DataError | UsageError)
    return str(error.value)


@pytest.mark.slow
def test_non_image_files_are_refused(trained: Path, tmp_path: Path) -> None:
    assert "a.heic: must end in one of .png" in refused(trained, tmp_path / "a.heic")
    assert "there is no such file" in refused(trained, tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(b"no image")
    assert "can't be read as samples: cannot identify image file" in refused(
        trained, tmp_path / "a.png"
    )
    for array, message in (
        (
            np.zeros((9, 8, 1), np.uint8),
            "it has shape (9, 8, 1); must be (8, 8, 1) or (n, 8, 8, 1)",
        ),
        (np.zeros((1, 2, 8, 8, 1), np.uint8), "it has shape (1, 2, 8, 8, 1); must be"),
        (np.zeros((8, 8, 1), np.float32), "it is float32; must be uint8 as in training"),
        (np.zeros((0, 8, 8, 1), np.uint8), "it holds no samples"),
        (np.zeros((8, 8, 1), object), "holds objects; must be plain numbers"),
    ):
        np.save(tmp_path / "a.npy", array)
        assert message in refused(trained, tmp_path / "a.npy")
    np.savez(tmp_path / "a.npz", x=np.zeros(1), y=np.zeros(1))
    assert "it holds 2 arrays, x, y; must be one" in refused(trained, tmp_path / "a.npz")


@pytest.mark.medium
def test_wrong_arguments_are_refused(trained: Path, tmp_path: Path) -> None:
    assert "infer takes RUN_DIR or FOLDER, and FILE ..." in refused(trained)
    assert "--fast: there is no such option" in refused(trained, "a.png", "--fast")
    assert "--json: takes no value; infer takes" in refused(trained, "a.png", "--json=1")
    assert "--top 0: must be a whole number from 1" in refused(trained, "a.png", "--top=0")
    assert "...: must be a whole" in refused(trained, "a.png", f"--top={5000 * '1'}")
    assert "isn't a run directory; it holds no recipe.yaml" in refused(tmp_path, "a.png")
    with pytest.raises(UsageError, match=r"export takes RUN_DIR \.\.\. FOLDER"):
        export([str(trained)])


@pytest.mark.slow
def test_network_with_logits_per_row_is_refused(
    monkeypatch: pytest.MonkeyPatch, trained: Path, tmp_path: Path
) -> None:
    samples = read_trained_run(trained).samples
    rows = (lambda images: np.zeros((len(images), 8, 3), np.float32), samples)
    monkeypatch.setattr("pipeline.cli.runs.infer._load_network", lambda source: rows)
    np.save(tmp_path / "a.npy", np.zeros((8, 8, 1), np.uint8))
    assert "returns logits of shape (8, 3) for a sample" in refused(trained, tmp_path / "a.npy")


@pytest.mark.slow
def test_outputs_that_are_not_finite_are_refused(
    monkeypatch: pytest.MonkeyPatch, trained: Path, tmp_path: Path
) -> None:
    samples = read_trained_run(trained).samples
    diverged = (lambda images: np.full((len(images), 10), np.nan, np.float32), samples)
    monkeypatch.setattr("pipeline.cli.runs.infer._load_network", lambda source: diverged)
    np.save(tmp_path / "a.npy", np.zeros((8, 8, 1), np.uint8))
    assert "returns NaN or infinity; did its training" in refused(trained, tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("logits", "task", "is_valid"),
    [
        ([-np.inf, 1.0], "classification", True),
        ([-np.inf, -np.inf], "classification", False),
        ([-np.inf, 1.0], "regression", False),
        ([np.inf, 1.0], "classification", False),
    ],
)
def test_negative_infinity_is_only_permitted_beside_a_finite_logit(
    logits: list[float], task: Task, is_valid: bool
) -> None:
    outputs = _compute_in_batches(lambda images: np.array([logits]), np.zeros((1, 8, 8, 1)), task)
    if is_valid:
        assert next(outputs).tolist() == logits
    else:
        with pytest.raises(DataError, match="returns NaN or infinity"):
            next(outputs)


def test_csv_path_equal_to_an_input_is_refused(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    np.save(file, np.zeros((8, 8, 1), np.uint8))
    before = file.read_bytes()
    with pytest.raises(DataError, match="is also an input; name another file"):
        infer([str(trained), str(file), f"--csv={file}"])
    assert file.read_bytes() == before


@pytest.mark.slow
def test_export_folder_with_suffix_of_another_format_is_refused(
    trained: Path, tmp_path: Path
) -> None:
    """A folder called net.onnx is what nobody means."""
    for name in ("net.onnx", "net.SAFETENSORS", "net.pt"):
        with pytest.raises(UsageError, match=r"export writes a folder, .* name a folder"):
            export([str(trained), str(tmp_path / name)])
    assert not list(tmp_path.iterdir())
    assert export([str(trained), str(tmp_path / "net.v2")]) == 0


@pytest.mark.slow
def test_export_does_not_overwrite_a_foreign_folder(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="has other files than an export's"):
        export([str(trained), str(tmp_path)])
    with pytest.raises(RunError, match="can't be written"):
        export([str(trained), str(tmp_path / "notes.txt" / "deeper")])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_partial_export_is_refused_and_can_be_completed(
    trained: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written over another, it must not pass for it: program and weights may be of two runs."""
    folder = shutil.copytree(exported, tmp_path / "exported")

    def refuse(*_: object) -> None:
        raise RunError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("pipeline.stages.export.export.write_weights", refuse)
        with pytest.raises(RunError, match="disk is full"):
            export([str(trained), str(folder)])
    assert "isn't a run directory" in refused(folder, "a.png")
    assert export([str(trained), str(folder)]) == 0
    assert {file.name for file in folder.iterdir()} == {file.name for file in exported.iterdir()}


@pytest.mark.medium
def test_damaged_export_is_refused(exported: Path, tmp_path: Path) -> None:
    for name in ("model.bin", "model.json", "weights.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        for file in exported.iterdir():
            (folder / file.name).write_bytes(b"?" * 99 if file.name == name else file.read_bytes())
        assert str(folder / name) in refused(folder, "a.png")
    write_weights(tmp_path / "model.bin" / "weights.safetensors", {"w": np.zeros(1, np.float32)})
    (tmp_path / "model.bin" / "model.bin").write_bytes((exported / "model.bin").read_bytes())
    assert "weights.safetensors doesn't fit model.bin" in refused(tmp_path / "model.bin", "a.png")


@pytest.mark.slow
def test_killed_run_is_listed_with_its_dataset(trained: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in ("recipe.yaml", "checkpoints"):
        (run_dir / name).symlink_to(trained / name)
    whole, killed = read_trained_run(trained), read_trained_run(run_dir)
    assert isinstance(killed, TrainedRun)
    assert killed.samples == replace(whole.samples, brightness=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["export", "infer"])
def test_command_error_has_one_line(
    name: str, forked: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    said = forked([name, "nowhere", "x.png"])
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith("error: nowhere: there is no such run, looked in ")
    assert said.stderr.count("\n") == 1


@pytest.mark.slow
def test_weights_of_another_recipe_are_refused(trained: Path, tmp_path: Path) -> None:
    """A new run in the directory of an earlier one, say, of which the checkpoints were left."""
    shutil.copytree(trained, tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("\nseed: 1\n", "\nseed: 5\n"))
    with pytest.raises(DataError, match=r"of another recipe than .*recipe.yaml: seed = 5: was 1$"):
        export([str(tmp_path / "run"), str(tmp_path / "exported")])
    assert not (tmp_path / "exported").exists()
