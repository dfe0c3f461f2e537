"""Changes of CONTRIBUTING.md, made in a copy of the package: they take these files, no others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pipeline", "conf", "recipes", "hydra_plugins")

OPTIMIZER = '''

@component("optimizer")
class SignDescent(OptimizerSpec):
    """Descent by the sign of each gradient: p <- p - lr * sign(g)."""

    name: Literal["sign_descent"] = "sign_descent"

    def build(self) -> optax.GradientTransformation:
        """Return the direction sign(g)."""
        import optax

        return optax.scale_by_sign()
'''
FEATURE = '''"""Twice the loss of a step, as a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.api import FeatureSpec, StepFeature, component


@component("feature")
class DoubledLossSpec(FeatureSpec):
    """Records twice the loss of each step."""

    name: Literal["doubled_loss"] = "doubled_loss"

    def build(self, context):
        return DoubledLoss()


@dataclass(frozen=True)
class DoubledLoss(StepFeature):
    """A column of every step."""

    name = "doubled_loss"
    columns: tuple[str, ...] = ("doubled_loss",)

    def make_columns(self, state, gradients, outcome):
        return (2 * gradients.loss,)
'''
DEVICE = '''"""A device that is the host's processor under another name."""

from __future__ import annotations

from typing import Literal

from pipeline.backends.devices.xla import Cpu
from pipeline.core.registry import component


@component("device")
class Copied(Cpu):
    """The host's processor."""

    name: Literal["copied"] = "copied"

    def open(self, parallel):
        return Cpu().open(parallel)
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package and its configuration."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def edit(file: Path, old: str, new: str) -> None:
    """Replace a text that stands in a file once."""
    text = file.read_text()
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new))


def train(package: Path, cache: Path, *overrides: str) -> Path:
    """Train a tiny network by the copy's own command, and return the run directory."""
    command = [
        sys.executable, "-m", "pipeline", "+recipe=lenet5_digits", "model=mlp", "model.hidden=[8]",
        "train.steps=4", "train.batch_size=16", "monitor.tensorboard=false",
        "monitor.sample_images=0", f"cache.root={cache}", "hydra.run.dir=run", *overrides,
    ]  # fmt: skip
    ran = subprocess.run(
        command, cwd=package, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(package)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    run_dir = next(key for key in reversed(command) if key.startswith("hydra.run.dir="))
    return package / run_dir.partition("=")[2]


@pytest.mark.slow
def test_documented_changes_need_only_the_named_files(package: Path, cache: Path) -> None:
    # An optimizer: a class, and its file in conf.
    with (package / "pipeline/training/optimizers/first_order.py").open("a") as file:
        file.write(OPTIMIZER)
    (package / "conf/optimizer/sign_descent.yaml").write_text(
        "# @package train.optimizer\nname: sign_descent\nlr: 0.01\nweight_decay: 0.0\n"
        "decay_rules: []\n"
    )
    # A column of every step: a feature.
    (package / "pipeline/training/features/components/doubled_loss.py").write_text(FEATURE)
    # The name of a checkpoint.
    names = package / "pipeline/checkpoint/checkpoint_folder.py"
    edit(names, "    return root / str(step)\n", '    return root / f"step-{step}"\n')
    edit(names, 're.compile(r"(0|', 're.compile(r"step-(0|')
    edit(
        names,
        "    return int(path.name) if STEP.fullmatch(path.name) else None\n",
        "    match = STEP.fullmatch(path.name)\n    return int(match[1]) if match else None\n",
    )
    # A device.
    (package / "pipeline/backends/devices/copied.py").write_text(DEVICE)
    (package / "conf/device/copied.yaml").write_text("name: copied\n")
    # The rule by which a batch is split into microbatches: every n-th sample.
    edit(
        package / "pipeline/training/parallel/microbatches.py",
        "        return array.reshape(num_microbatches, -1, *array.shape[1:])\n",
        "        return array.reshape(-1, num_microbatches, *array.shape[1:]).swapaxes(0, 1)\n",
    )

    run_dir = train(
        package,
        cache,
        "optimizer=sign_descent",
        "device=copied",
        "train.accumulate_steps=2",
        "train.features=[doubled_loss]",
        "checkpoint.every_steps=2",
    )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    losses = [line["loss"] for line in lines]
    assert [line["doubled_loss"] / 2 for line in lines] == pytest.approx(losses)
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} >= {"step-2", "step-4"}
    resumed = train(
        package, cache, "optimizer=sign_descent", "device=copied", "train.accumulate_steps=2",
        "train.features=[doubled_loss]", "checkpoint.every_steps=2", "train.resume=run",
    )  # fmt: skip
    assert (resumed / "checkpoints/step-4").is_dir()


@pytest.mark.slow
def test_shipped_features_work_from_outside_of_the_package(package: Path, cache: Path) -> None:
    """Nothing in the package knows a feature of `train.features` by name."""
    folder = package / "pipeline/training/features/components"
    plugins = []
    for name in ("weight_averages", "accumulate_labels"):
        plugin = package / f"own_{name}.py"
        (folder / f"{name}.py").rename(plugin)
        plugins += ["--plugin", str(plugin)]
    features = "train.features=[{name: lookahead, steps: 2}, {name: accumulate_labels, labels: 20}]"
    run_dir = train(package, cache, features, "hydra.run.dir=outside", *plugins)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["accumulated_labels"] for line in lines] == [16, 32, 16, 32]


def test_files_of_the_table_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## To change one thing")[2].partition("\n## ")[0]
    paths = re.findall(r"`((?:pipeline|conf|recipes|tests)/[^`]*)`", table)
    assert len(paths) > 10
    missing = [path for path in paths if "<" not in path and not (ROOT / path).exists()]
    assert missing == []
