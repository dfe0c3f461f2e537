"""The annexes: parts of the package that the core never imports but through their doors.

    python -m tests.annexes

Deletes each annex in a copy of the package, then all of them at once, trains the default recipe
there for some steps, and uses what is absent. Prints a table; the exit status is 1 if something
fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("pipeline", "conf", "recipes")
"""Folders that a copy has."""
TRAIN = ("train.steps=4", "monitor.tensorboard=false", "hydra.run.dir=run")
"""Arguments of a short run of the default recipe."""
FILES = ("network.onnx", "network.npz")
WEIGHT_FILES = {
    "keras_file": ".h5",
    "mindspore_file": ".ckpt",
    "tensorflow_checkpoint": ".index",
    "torch_file": ".pt",
}
"""Suffixes of weight files by the module that reads them."""
PROGRAM = """
import sys
from pipeline.__main__ import main
separator = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
status = main(sys.argv[1:separator])
print("status", status, flush=True)
for word in sys.argv[separator + 1:]:
    print("status", main(word.split("\\t")), file=sys.stderr, flush=True)
"""
"""Runs the command line with the arguments before --, and once for each word after it, whose
arguments are separated by tabs."""


@dataclass(frozen=True)
class Annex:
    """A part of the package, and what is refused without it."""

    doors: tuple[str, ...]
    """Modules outside of the annex that may import it. The registry and the lists of features find
    others by name."""
    use: tuple[str, ...]
    """Arguments that need the annex."""
    names: str
    """What the message about its absence names."""


ANNEXES: Mapping[str, Annex] = {
    "backends.ascend": Annex(
        ("backends.devices.ascend", "inspect.profiler.ascend_profile"),
        ("device=ascend910",),
        "ascend",
    ),
    "backends.gpu": Annex(
        ("backends.devices.xla",),
        ("device=gpu", "device.target=h100_sxm", "stages=[data,build,compile]"),
        "backends.gpu",
    ),
    "backends.planner": Annex(
        ("stages.plan_devices",),
        ("parallel.mode=auto", "parallel.devices=2"),
        "backends.planner",
    ),
    "checkpoint.mirror": Annex(
        ("checkpoint.mirror_writer", "stages.runner.run_mirror"),
        ("checkpoint.mirror=mirror", *TRAIN[:2]),
        "checkpoint.mirror",
    ),
    "cli.convert.model": Annex((), ("convert", "model", *FILES), "cli.convert.model"),
    "cli.convert.records": Annex(
        (), ("convert", "records", "out", "dataset=digits"), "cli.convert.records"
    ),
    "cli.convert.weights": Annex((), ("convert", "weights", *FILES), "cli.convert.weights"),
    **{
        f"conf/job/{template}": Annex(
            ("stages.launch.job_file",), ("job", "--to", template.partition(".")[0]), template
        )
        for template in (
            "jobset.yaml.j2",
            "ray.py.j2",
            "skypilot.yaml.j2",
            "slurm.sh.j2",
            "trainjob.yaml.j2",
        )
    },
    "config.foreign": Annex(("cli.adopt",), ("adopt", "config.yaml"), "config.foreign"),
    "data.records": Annex(
        ("cli.convert.records", "data.sources.example_files"),
        ("dataset=records", "dataset.root=folder", "train.steps=1"),
        "records",
    ),
    "engine.callbacks.trackers": Annex((), ("train.callbacks=[mlflow]", "train.steps=4"), "mlflow"),
    "inspect.autopsy": Annex(
        ("cli.runs.autopsy", "inspect.step.step_bundle"),
        ("autopsy", "run"),
        "inspect.autopsy",
    ),
    "inspect.bisect": Annex(("cli.runs.bisect",), ("bisect", "run", "run"), "inspect.bisect"),
    "inspect.compare": Annex(("cli.runs.compare",), ("compare", "run", "run"), "inspect.compare"),
    "inspect.forecast": Annex(
        ("cli.forecast", "inspect.custom_step"),
        ("forecast", "+recipe=lenet5_digits"),
        "inspect.forecast",
    ),
    "inspect.fuzz": Annex(("cli.runs.fuzz",), ("fuzz", "run"), "inspect.fuzz"),
    "inspect.leakage": Annex(("cli.runs.leakage",), ("leakage", "run"), "inspect.leakage"),
    "inspect.profiler": Annex(
        ("cli.profile", "inspect.custom_step"),
        ("profile", "+recipe=lenet5_digits"),
        "inspect.profiler",
    ),
    "inspect.report": Annex(
        ("api.loaded_run", "cli.folds", "cli.runs.fuzz", "cli.runs.report"),
        ("report", "run"),
        "inspect.report",
    ),
    "inspect.receipts": Annex(
        ("cli.runs.receipt", "cli.runs.verify"),
        (*TRAIN, "receipt.every_steps=2"),
        "inspect.receipts",
    ),
    "inspect.step": Annex(
        ("cli.runs.bisect", "cli.runs.step"), ("step", "run", "1"), "inspect.step"
    ),
    "inspect.without": Annex(("cli.runs.without",), ("without", "1", "run"), "inspect.without"),
    "models.torch_graph": Annex(
        (
            "cli.convert.model",
            "models.networks.foreign_networks",
        ),
        ("model=onnx", "model.file=network.onnx", "train.steps=1"),
        "models.torch_graph",
    ),
    **{
        f"models.weights.files.{name}": Annex(
            ("models.weights.files.weight_files",),
            (f"checkpoint.restore=weights{suffix}", *TRAIN[:2]),
            name,
        )
        for name, suffix in WEIGHT_FILES.items()
    },
    "stages.export.onnx": Annex(
        ("cli.runs.export",), ("export", "run", "network", "--to", "onnx"), "export.onnx"
    ),
    "stages.fork": Annex(
        ("cli.runs.fork", "study.sweep.shared_steps"), ("fork", "run@1"), "stages.fork"
    ),
    "study": Annex(
        (
            "cli.arena",
            "cli.better",
            "cli.find_rate",
            "cli.folds",
            "cli.recommend",
            "cli.runs.bisect",
            "cli.runs.runs",
            "cli.test",
            "cli.train",
            "inspect.bisect",
            "inspect.report.origin",
            "inspect.report.report_files",
        ),
        ("-m", "seed=1,2"),
        "study",
    ),
    "study.final_value": Annex(("study.sweep.jobs",), ("run_features=[estimate]",), "estimate"),
    "training.optimizers.thor": Annex((), ("+recipe=lenet5_mnist_thor",), "thor"),
}
"""The annexes by the name of their folder or module below `pipeline`; a job engine by its template.
"""


def copy_without(annexes: Iterable[str], folder: Path) -> None:
    """Make a copy of the package, of links to its files, without some annexes."""
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, copy_function=os.link)
    for name in annexes:
        if "/" in name:
            (folder / name).unlink()
            continue
        path = folder / "pipeline" / Path(*name.split("."))
        if path.is_dir():
            shutil.rmtree(path)
        elif path.parent.exists():  # else of an annex that is deleted already
            path.with_suffix(".py").unlink()
    for suffix in WEIGHT_FILES.values():
        (folder / f"weights{suffix}").write_bytes(b"0123")


def describe_absence(folder: Path, annexes: Iterable[str]) -> dict[str, str]:
    """Train the default recipe with the copy of the package in a folder, then use each annex.

    Returns what is wrong, by `default recipe` and by annex; "" is nothing.
    """
    annexes = tuple(annexes)
    uses = ["\t".join(ANNEXES[name].use) for name in annexes]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *TRAIN, "--", *uses],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    is_done = "status 0" in result.stdout
    answers = {"default recipe": "" if is_done else (result.stdout + result.stderr)[-2000:]}
    # Texts between two statuses belong to the second.
    texts = result.stderr.split("status ")
    for number, name in enumerate(annexes):
        text = texts[number].partition("\n")[2] if number else texts[0]
        status = texts[number + 1][:1] if number + 1 < len(texts) else "none"
        answers[name] = _judge_refusal(text, status, ANNEXES[name].names)
    return answers


def _judge_refusal(text: str, status: str, name: str) -> str:
    """Return what is wrong with the message and the status of a use of something absent."""
    lines = [line for line in text.splitlines() if line.strip()]
    # A recipe's problem has a line as its head.
    problems = [line for line in lines if line != "error: the recipe has a problem:"]
    if status != "2" or len(problems) != 1 or name not in problems[0]:
        return f"status {status}, {len(problems)} lines: {text.strip()[-2000:]}"
    return ""


def main() -> int:
    """Print what fails without each annex, and without all; return the exit status."""
    failures = 0
    for annexes in (*((name,) for name in ANNEXES), tuple(ANNEXES)):
        with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:
            copy_without(annexes, Path(folder))
            wrong = {
                key: text for key, text in describe_absence(Path(folder), annexes).items() if text
            }
        failures += len(wrong)
        title = annexes[0] if len(annexes) == 1 else "all"
        print(f"{title:28}{wrong or 'trains; refused in one line'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
