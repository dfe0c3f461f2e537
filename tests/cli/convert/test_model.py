"""`convert model`: modules of PyTorch become recipes that need no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import yaml

from pipeline.core.errors import RecipeError, UsageError
from tests.command_line import convert
from tests.models.torch_graph.onnx.golden_onnx import FOLDER as ONNX
from tests.models.torch_graph.onnx.golden_onnx import model, node, tensor

NETS = """
import torch
from torch import nn


class Plain(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Dropout(0.25), nn.Linear(4 * 16 * 16, num_classes),
        )


class Odd(Plain):
    def forward(self, x):
        return super().forward(torch.roll(x, 1, 3))
"""

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
Command = Callable[..., CompletedProcess[str]]


def test_usage_is_printed() -> None:
    with pytest.raises(UsageError, match=r"TARGET is missing; convert model takes MODULE TARGET"):
        convert(["model", "my_nets:Plain"])
    with pytest.raises(UsageError, match=r"net\.txt: must end in \.yaml or \.torch\.json"):
        convert(["model", "my_nets:Plain", "net.txt"])
    with pytest.raises(UsageError, match="wide: must be a whole number from 1"):
        convert(["model", "my_nets:Plain", "net.yaml", "wide"])
    with pytest.raises(UsageError, match="depth=3: is an option: --argument depth=3"):
        convert(["model", "my_nets:Plain", "net.yaml", "depth=3"])


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(["model", "--help"]) == 0
    assert "usage: python -m pipeline convert model" in capsys.readouterr().out


def test_python_module_requires_plugin_flag(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"convert model my_nets:Plain: .*add --plugin"):
        convert(["model", "my_nets:Plain", str(tmp_path / "net.yaml")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.medium
def test_onnx_file_becomes_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ONNX / "residual.onnx"
    target = tmp_path / "net.yaml"
    assert convert(["model", str(file), str(target), "3", "12", "12"]) == 0
    assert f"written    {target}: recipe of 8 layers" in capsys.readouterr().out
    layers = yaml.safe_load(target.read_text())["model"]["layers"]
    assert layers[1] == {"name": "batch_norm", "momentum": 0.8}
    assert [layer["name"] for layer in layers if isinstance(layer, dict)][3] == "residual"


@pytest.mark.medium
def test_onnx_file_becomes_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "net.yaml"
    assert convert(["model", str(ONNX / "perceptron.onnx"), str(target)]) == 0
    assert "written as a graph instead" in capsys.readouterr().out
    assert (tmp_path / "net.torch.json").exists()


@pytest.mark.medium
def test_name_of_an_onnx_output_may_be_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the names that PyTorch numbers."""
    weight = tensor("w", np.ones((6, 6), np.float32))
    nodes = [node("MatMul", ["x", "w"], "384"), node("Relu", ["384"], "y")]
    (tmp_path / "net.onnx").write_bytes(model(nodes, [weight]))
    target = tmp_path / "net.torch.json"
    arguments = ["--argument", "output=384"]
    assert convert(["model", str(tmp_path / "net.onnx"), str(target), *arguments]) == 0
    assert "differ from the file's by 0.0e+00" in capsys.readouterr().out
    assert "relu" not in target.read_text()


def test_bad_onnx_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    file.write_bytes(b"no network")
    with pytest.raises(RecipeError, match=r"net\.onnx: it "):
        convert(["model", str(file), str(tmp_path / "net.yaml")])
    residual = str(ONNX / "residual.onnx")
    with pytest.raises(RecipeError, match="takes no --argument but output=NAME"):
        convert(["model", residual, str(tmp_path / "net.yaml"), "--argument", "classes=3"])
    with pytest.raises(RecipeError, match="takes at most 3 SIZEs, not 4"):
        convert(["model", residual, str(tmp_path / "net.yaml"), "3", "8", "8", "8"])
    assert list(tmp_path.iterdir()) == [file]


@needs_torch
@pytest.mark.slow
def test_known_modules_become_trainable_layers(command: Command, tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text(NETS)
    said = command(
        ["--plugin", "my_nets.py", "convert", "model", "my_nets:Plain", "net.yaml", "1", "32", "32"]
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert "written    net.yaml: recipe of 6 layers, its weights in net.safetensors" in said.stdout
    recipe = yaml.safe_load((tmp_path / "net.yaml").read_text())
    assert recipe["model"]["layers"] == [
        {"name": "conv", "features": 4, "kernel": 3, "padding": 1, "bias": True},
        "relu",
        {"name": "max_pool", "kernel": 2},
        "flatten",
        {"name": "dropout", "rate": 0.25},
        {"name": "dense", "features": "$classes"},
    ]
    ran = command(["+recipe=net.yaml", "dataset=digits", "train.steps=3", "monitor.loss_every=0"])
    assert ran.returncode == 0, ran.stderr
    assert "8 of 8 arrays" in ran.stdout or "4 of 4 arrays" in ran.stdout


@needs_torch
@pytest.mark.slow
def test_unknown_module_is_named_and_graph_is_written(command: Command, tmp_path: Path) -> None:
    (tmp_path / "my_nets.py").write_text(NETS)
    said = command(
        ["--plugin", "my_nets.py", "convert", "model", "my_nets:Odd", "net.yaml", "1", "32", "32"]
    )
    assert said.returncode == 0, said.stderr
    assert "isn't a known layer: aten.roll.default; written as a graph instead" in said.stdout
    assert (tmp_path / "net.torch.json").exists()
    ran = command(["+recipe=net.yaml", "dataset=digits", "train.steps=3", "monitor.loss_every=0"])
    assert ran.returncode == 0, ran.stderr
