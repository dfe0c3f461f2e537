"""Pictures of docs/gallery.md: twelve results, each by the commands that the page shows.

    python -m benchmarks.gallery [--folder outputs/gallery]

Runs the commands of each result in a folder of its own, unless it is there from an earlier call,
and writes docs/gallery.md with the figures of these runs, and docs/gallery/. Nothing is downloaded.
It takes 4 minutes of processor time.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

from pipeline.core.pages.page import Drawing

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "gallery"
MAX_BYTES = 60_000
"""Of a picture."""
PROGRAM = "python -m pipeline"
TRAINED = "summary.json"
ABOUT = """# Gallery

Twelve results with pictures, each by the commands below it: recipes that ship with the package,
without a download or a GPU. Figures are of one run on two cores of a busy CPU; on another CPU last
digits differ. `python -m benchmarks.gallery` makes all of them again.
"""


@dataclass(frozen=True)
class Result:
    """A result of the gallery. Words in braces are figures of its last run or command."""

    name: str
    title: str
    about: str
    alt: str
    commands: Sequence[str]
    picture: str
    """A file that the commands write: SVG, PNG, or a page, of which the first drawing is taken."""


RESULTS: Sequence[Result] = (
    Result(
        "digits",
        "Handwritten digits in ten seconds",
        "LeNet-5 on 1,438 digits that ship along, accuracy {accuracy:.4f} on 359 others.",
        "Training and evaluation loss over 1,760 steps: evaluation loss ends at {loss:.3f}",
        ("+recipe=lenet5_digits hydra.run.dir=run", "report run --out report"),
        "report/loss.svg",
    ),
    Result(
        "mistakes",
        "Every mistake, as a picture",
        "A report shows the digits that a run reads wrongly, with true and predicted class. "
        "Here after two epochs, at accuracy {accuracy:.4f}.",
        "Digits of 8 by 8 pixels in a grid, each with its true class and a wrong predicted one",
        ("+recipe=lenet5_digits train.epochs=2 hydra.run.dir=run", "report run --out report"),
        "report/mistakes.png",
    ),
    Result(
        "rate",
        "A learning rate before the first run",
        "200 steps at rates from 1e-6 to 10: the loss falls fastest at {rate:.3g}.",
        "Loss over learning rates on a logarithmic axis: flat, then falling, then rising steeply",
        ("find-rate +recipe=lenet5_digits --out rate.html",),
        "rate.html",
    ),
    Result(
        "regression",
        "A number from a table",
        "How diabetes progresses in 442 patients: R2 {r2:.3f} on 88 of them, mean absolute error "
        "{mae:.1f}.",
        "Scatter plot of predicted over true progression of 88 patients around the diagonal",
        ("+recipe=diabetes_mlp hydra.run.dir=run", "report run --out report"),
        "report/scatter.svg",
    ),
    Result(
        "vowels",
        "Sound",
        "Ten vowels as log-mel spectrograms, made by a formula: accuracy {accuracy:.4f} on 300 "
        "others.",
        "Loss of training batches over steps, falling, and of evaluations, ending at {loss:.2f}",
        ("+recipe=audio_vowels hydra.run.dir=run", "report run --out report"),
        "report/loss.svg",
    ),
    Result(
        "towers",
        "Finding the docstring of a function",
        "Two towers, trained by a contrastive loss, find the docstring of a function of Python's "
        "library among 467: recall at 10 is {recall_at_10:.4f}.",
        "Loss of training batches, falling to nearly 0, and of evaluations, level at {loss:.2f}",
        ("+recipe=two_towers_docstrings hydra.run.dir=run", "report run --out report"),
        "report/loss.svg",
    ),
    Result(
        "halves",
        "An image and numbers, in two branches",
        "The upper half of a digit as an image and the sums of the lower rows as numbers: accuracy "
        "{accuracy:.4f}.",
        "Accuracy of evaluations over steps, rising to {accuracy:.2f}",
        ("+recipe=digit_halves hydra.run.dir=run", "report run --out report"),
        "report/metric.svg",
    ),
    Result(
        "better",
        "Is a change better?",
        "Both sides train over the same seeds until a test at 95 % finds one better, or 8 pairs "
        "are trained. Here {verdict}.",
        "Differences in accuracy of {pairs} pairs, their mean as pairs are added, and its interval",
        (
            "better +recipe=breast_cancer_mlp train.epochs=5 --pairs 8 --out better.html -- "
            "optimizer=muon",
        ),
        "better.html",
    ),
    Result(
        "arena",
        "Which optimizer, tuned equally",
        "Three optimizers on a table of cells, three trials each, then six fresh seeds each.",
        "momentum, adamw, the baseline, and lion: an equals sign if no difference is found",
        (
            "arena +recipe=breast_cancer_mlp train.epochs=5 --optimizers momentum,adamw,lion "
            "--trials 3 --seeds 6 --out arena",
        ),
        "arena/arena.html",
    ),
    Result(
        "sinks",
        "What longer sinks gain",
        "Milliseconds of a step by the steps of a launch, as a model of an Ascend 910 has them.",
        "Modelled time of a step over the sink size on a logarithmic axis, falling and then level",
        (
            "-m +recipe=lenet5_digits device=ascend910 'stages=[data,build,compile]' "
            "train.sink_size=1,10,100,1000 hydra.sweep.dir=sweep",
        ),
        "sweep/amortisation.html",
    ),
    Result(
        "timeline",
        "Where a step on an Ascend 910 would spend its time",
        "Each operator on the unit that computes it, modelled; no device is needed.",
        "Lanes of a modelled step: the units of the chip over time, with a block for each operator",
        ("+recipe=lenet5_digits device=ascend910 'stages=[data,build,compile]' hydra.run.dir=run",),
        "run/timeline.html",
    ),
)
SPEED = """## Steps beside other libraries

The time of a training step on a CPU, by alternating runs; [performance](performance.md) has the
setup.

![Time of a training step on a CPU as a multiple of this pipeline's: PyTorch, torch.compile, Keras
and flax take up to 4.2 times as long](speed.svg)

    python -m benchmarks.speed_chart    # of benchmarks/results, which benchmarks.train measures
"""
"""The twelfth result, whose picture README has too."""


def run_commands(result: Result, folder: Path) -> None:
    """Run the commands of a result in its folder, and keep their figures in figures.json.

    Raises RuntimeError for a command that fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    facts: Mapping[str, Any] = {}
    for command in result.commands:
        words = shlex.split(command)
        is_command = words[0][0] not in "+-"
        words = [words[0], "--json", *words[1:]] if is_command else words
        program = [sys.executable, "-m", "pipeline", *words]
        ended = subprocess.run(program, cwd=folder, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{command}: {ended.stderr[-2000:]}")
        facts = json.loads(ended.stdout) if is_command else {}
    summary = folder / "run" / TRAINED
    metrics = json.loads(summary.read_text("utf-8"))["metrics"] if summary.exists() else {}
    figures = {"facts": facts, "metrics": metrics}
    (folder / "figures.json").write_text(json.dumps(figures, indent=1), "utf-8")


def read_figures(folder: Path) -> dict[str, Any]:
    """Return the figures of a result by name."""
    figures = json.loads((folder / "figures.json").read_text("utf-8"))
    return {**(figures["facts"] or {}), **(figures["metrics"] or {})}


def extract_drawing(page: str, label: str) -> str:
    """Return the text of an SVG file with the first drawing of a page. Raises ValueError."""
    found = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    if found is None:
        raise ValueError("the page has no drawing")
    root = fromstring(found[0])
    left, top, right, bottom = map(float, root.attrib["viewBox"].split())
    drawing = Drawing(right + left, bottom + top, label)
    drawing.marks.extend(root)
    return drawing.to_file_text()


def write_picture(result: Result, folder: Path) -> Path:
    """Copy the picture of a result into docs/gallery/, and return its path. Raises ValueError."""
    source = folder / result.picture
    PICTURES.mkdir(exist_ok=True)
    if source.suffix == ".html":
        target = PICTURES / f"{result.name}.svg"
        label = result.alt.format(**read_figures(folder))
        target.write_text(extract_drawing(source.read_text("utf-8"), label), "utf-8")
    else:
        target = PICTURES / f"{result.name}{source.suffix}"
        shutil.copyfile(source, target)
    if target.stat().st_size > MAX_BYTES:
        raise ValueError(f"{target}: has {target.stat().st_size:,} bytes, must be {MAX_BYTES:,}")
    return target


def format_result(result: Result, picture: Path, figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a result's section."""
    yield f"## {result.title}"
    yield textwrap.fill(result.about.format(**figures), 100)
    yield f"![{result.alt.format(**figures)}]({picture.relative_to(PAGE.parent)})"
    yield "\n".join(f"    {PROGRAM} {command}" for command in result.commands)


def main() -> None:
    """Make the results that aren't in the folder, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "gallery")
    given = parser.parse_args()
    parts = [ABOUT.rstrip()]
    for result in RESULTS:
        folder = given.folder / result.name
        if not (folder / "figures.json").exists():
            print(result.name, flush=True)
            run_commands(result, folder)
        parts += format_result(result, write_picture(result, folder), read_figures(folder))
    parts.append(SPEED)
    PAGE.write_text("\n\n".join(parts), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
