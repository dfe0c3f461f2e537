"""Small run directories of this version, which later versions resume or refuse.

    pip install -e '.[dev,privacy]' && python -m tests.golden.make_runs

builds the last commit's wheel and trains by it, with no variable of the shell but PATH, so that
version, settings and code in provenance.json are those of the release. It writes runs/VERSION/ with
expected.json: the last loss of each run, and of each run resumed for more steps by the version that
made it. A version that exists is refused: its runs never change once it is released. Before that,
`--remake` replaces all of its runs, or those named.

The host's name, the working folder and the commit are replaced in provenance.json, and logs lose
their times. Nothing that a resumed run compares is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.forked import run_forked
from tests.outcome import metrics
from tests.release import build

RUNS = Path(__file__).parent / "runs"
ROOT = RUNS.parents[2]
BUILT = ("pipeline", "hydra_plugins", "conf", "recipes", "examples/project", "pyproject.toml")
"""Files and folders of the wheel."""
STEPS, MORE_STEPS = 12, 18
OPS = "[{name: rescale, factor: 0.00392156862745098, shift: 0.0}]"
COMMON = (
    "monitor.tensorboard=false", "monitor.sample_images=0", "autotune=off",
    "checkpoint.every_steps=6", "checkpoint.keep=1", f"train.steps={STEPS}",
)  # fmt: skip
DIGITS = (
    "+recipe=lenet5_digits", "dataset.name=synthetic", "+dataset.like=digits",
    "+dataset.train_size=96", "+dataset.eval_size=40", f"dataset.train.ops={OPS}",
    f"dataset.eval.ops={OPS}", "train.batch_size=16",
)  # fmt: skip
MLP = (*DIGITS, "model=mlp", "model.hidden=[16]")
TEXT = ("+recipe=gpt_text", "dataset.length=16", "train.batch_size=4", "model.features=8")
RECIPES: Mapping[str, Sequence[str]] = {
    "sinks": (*MLP, "train.sink_size=5"),
    "streamed": (*MLP, "train.feed=stream"),
    "private": (
        *(word for word in MLP if word != "train.batch_size=16"), "train.batch_size=64",
        "privacy={noise: 1.0, delta: 0.001, clip: 1.0, expected_batch_size: 8, seed: 1}",
    ),
    "devices": (*MLP, "parallel.mode=data", "parallel.devices=4"),
    "sweep": ("-m", *MLP, "train.optimizer.lr=0.01,0.02"),
    "folds": (*MLP, "dataset.folds.count=3", "dataset.folds.index=1"),
    "imported": (
        "--plugin", "network.py", *DIGITS, "model=flax", "model.import=network:Perceptron",
    ),
    "plug_in": ("--plugin", "components.py", *MLP, "train.features=[counted_steps]"),
    "text": (*TEXT, "model.hidden=16", "model.heads=2", "model.blocks=1"),
    "table": (
        "+recipe=table", "dataset.shipped=diabetes", "dataset.target=progression",
        "model.hidden=[8]", "train.batch_size=32",
    ),
    "series": (
        "+recipe=forecast_linear", "dataset.package=null", "dataset.root=series.csv",
        "dataset.time_column=time",
    ),
    "fine_tuning": (
        *MLP, "checkpoint.restore=sinks", "train.freeze=[dense_0*]", "train.ema={decay: 0.9}",
    ),
}  # fmt: skip
"""Arguments of the runs by name. A later run may read an earlier one."""


def main() -> int:
    """Add the runs of the last commit's version; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs to remake, else all")
    parser.add_argument("--remake", action="store_true", help="replace unreleased runs")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.names or list(RECIPES)
    if given.write:
        write_runs(given.write, names)
        return 0
    problem = find_problem(names, given.names, given.remake)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        version = install(folder / "package")
        kept = RUNS / version
        if kept.exists() != given.remake:
            need = "exists; --remake replaces it" if kept.exists() else "doesn't exist yet"
            print(f"{kept}: {need}", file=sys.stderr)
            return 2
        new = folder / "new"
        if given.remake:
            shutil.copytree(kept, new)
        command = [sys.executable, "-m", "tests.golden.make_runs", *given.names]
        path = os.pathsep.join([str(folder / "package"), str(ROOT)])
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path}
        made = subprocess.run([*command, "--write", str(new)], cwd=folder, env=environment)
        if made.returncode:
            return made.returncode
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(new, kept)
    print(f"{kept}: {', '.join(names)}")
    return 0


def find_problem(names: Sequence[str], given: Sequence[str], remake: bool) -> str:
    """Return why no runs can be made of these arguments and this checkout, or ""."""
    if unknown := [name for name in names if name not in RECIPES]:
        return f"{unknown[0]}: must be one of {', '.join(RECIPES)}"
    if given and not remake:
        return f"{given[0]}: a new version has all runs; --remake replaces those named"
    command = ["git", "status", "--porcelain", "--", *BUILT]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return f"{listed.split()[1]}: differs from the last commit, which is built" if listed else ""


def install(folder: Path) -> str:
    """Unpack the wheel of the last commit into a folder; return its version."""
    built = folder.with_name("built")
    (wheel,) = (built / name for name in build(built) if name.endswith(".whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return wheel.name.split("-")[1]


def write_runs(kept: Path, names: Sequence[str]) -> None:
    """Make runs in a folder of other runs, and write what resuming each of them gives."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_inputs(folder)
        if "fine_tuning" in names and "sinks" not in names:
            shutil.copytree(kept / "sinks", folder / "sinks")
        for name in names:
            print(name, flush=True)
            make_run(folder, name)
        normalise(folder)
        for name in names:
            shutil.rmtree(kept / name, ignore_errors=True)
            shutil.copytree(folder / name, kept / name)
    write_expected(kept)


def write_expected(kept: Path) -> None:
    """Write the losses of the runs of a version, and those after this version resumed them."""
    expected = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "runs"
        shutil.copytree(kept, folder)
        copy_inputs(folder)
        for name in RECIPES:
            loss = read_loss(folder / name)
            resume_run(folder, name)
            expected[name] = {"loss": loss, "resumed_loss": read_loss(folder / name)}
    (kept / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def copy_inputs(folder: Path) -> None:
    """Copy the files that the runs read: a plug-in, a network and a series."""
    for file in RUNS.iterdir():
        if file.is_file():
            shutil.copy(file, folder)


def make_run(folder: Path, name: str) -> None:
    """Train a run below the folder. Raises RuntimeError if it fails."""
    place = "hydra.sweep.dir" if name == "sweep" else "hydra.run.dir"
    call(folder, [*RECIPES[name], *COMMON, f"{place}={name}"])


def resume_run(folder: Path, name: str) -> str:
    """Continue a run, of a sweep its first job, for more steps; return what was printed.

    Raises RuntimeError if the run is refused.
    """
    left_out = ("-m", "checkpoint.restore=sinks")  # a resumed run has its weights
    words = [word for word in (*RECIPES[name], *COMMON[:-1]) if word not in left_out]
    words = ["train.optimizer.lr=0.01" if "lr=0.01," in word else word for word in words]
    run_dir = find_run(folder / name).relative_to(folder)
    return call(folder, [*words, f"train.steps={MORE_STEPS}", f"train.resume={run_dir}"])


def find_run(folder: Path) -> Path:
    """Return the first directory of a run at or below a folder."""
    return min(file.parent for file in folder.rglob("metrics.jsonl"))


def read_loss(folder: Path) -> float:
    """Return the last loss of a run, or of the first job of a sweep."""
    return float(metrics(find_run(folder))[-1]["loss"])


def call(folder: Path, arguments: Sequence[str]) -> str:
    """Run `python -m pipeline` in a folder; return what it printed. Raises RuntimeError."""
    environment = {"XDG_CACHE_HOME": str(folder / ".cache"), "PATH": "/usr/bin:/bin"}
    if path := os.environ.get("PYTHONPATH"):
        environment["PYTHONPATH"] = path
    ended = run_forked(arguments, folder, environment)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {ended.stderr or ended.stdout}")
    return ended.stdout + ended.stderr


def normalise(folder: Path) -> None:
    """Replace what names the machine in the files of runs."""
    for file in folder.rglob("provenance.json"):
        tree: dict[str, Any] = json.loads(file.read_text())
        for process in tree["processes"]:
            process["folder"] = "."
            _, _, words = process["command"].partition(" -m pipeline")
            process["command"] = f"python -m pipeline{words}"
            process["machine"] = {**process["machine"], "host": "host", "system": "Linux"}
            process["code"].pop("git", None)
        file.write_text(json.dumps(tree, indent=2) + "\n")
    for pattern in (".lock", "run.log", "*.html", ".stdout", ".stderr"):
        for file in folder.rglob(pattern):
            file.unlink()


if __name__ == "__main__":
    sys.exit(main())
