"""Chart of README: the time of a training step beside that of other libraries.

`python -m benchmarks.speed_chart` draws docs/speed.svg from benchmarks/results/train_*_float32.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.pages.page import Drawing

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHART = ROOT / "docs" / "speed.svg"
TASKS = {
    "lenet5": "LeNet-5, MNIST, batch 32",
    "mlp": "MLP, 3 layers, batch 64",
    "resnet18": "ResNet-18, CIFAR-10, batch 128",
    "vit": "ViT, 6 blocks, batch 64",
    "gpt": "GPT, 4 blocks, batch 16",
}
"""Names of the tasks by the names of their files."""
CONTESTANTS = {
    "ours": ("this pipeline", "blue"),
    "torch": ("PyTorch", "orange"),
    "torch_compile": ("torch.compile", "amber"),
    "keras": ("Keras on JAX", "purple"),
    "jax_loop": ("flax loop", "slate"),
}
"""Names and colours of what is drawn, in this order."""

SETUP = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d); (?P<processor>[^(,;]+) \(.*?\), (?P<cores>\d+) cores"
)
"""Beginning of the line with date and machine."""

WIDTH = 700
LEFT = 215
UNIT = 100
"""Pixels before the bars, and of the time of this pipeline's step."""
BAR = 10
GAP = 3
GROUP_GAP = 14
TOP = 62
"""Pixels above the first group: the title and the legend."""


@dataclass(frozen=True)
class StepTimes:
    """Median times of a task's step by contestant, in ms, and the date and the machine."""

    medians_ms: Mapping[str, float]
    date: str
    machine: str


def read_step_times(text: str) -> StepTimes:
    """Read the results that `benchmarks.train` has printed."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| contestant | ms/step"))
    medians_ms = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, median = [cell.strip() for cell in line.split("|")[1:3]]
        medians_ms[name.partition(":")[0]] = float(median)
    setup = next(filter(None, (SETUP.match(line) for line in lines)))
    return StepTimes(medians_ms, setup["date"], f"{setup['cores']} cores of {setup['processor']}")


def draw_chart(tasks: Mapping[str, StepTimes]) -> Drawing:
    """Draw the times of each task's step, as multiples of this pipeline's."""
    rows = sum(1 for times in tasks.values() for name in CONTESTANTS if name in times.medians_ms)
    height = TOP + rows * (BAR + GAP) + len(tasks) * GROUP_GAP + 12
    title = "Time of a training step on a CPU"
    chart = Drawing(WIDTH, height, f"{title}: {', '.join(TASKS.values())}")
    chart.add("text", "title", f"{title}, as a multiple of this pipeline's", x=0, y=12)
    place = 0.0
    for words, colour in CONTESTANTS.values():
        chart.add("rect", colour, x=place, y=26, width=10, height=10)
        chart.add("text", "", words, x=place + 15, y=35)
        place += 45 + 6.6 * len(words)
    y = float(TOP)
    for task, times in tasks.items():
        first = y
        for name, (_, colour) in CONTESTANTS.items():
            if name not in times.medians_ms:
                continue
            ratio = times.medians_ms[name] / times.medians_ms["ours"]
            tip = f"{times.medians_ms[name]:.3g} ms"
            chart.add("rect", colour, tip=tip, x=LEFT, y=y, width=UNIT * ratio, height=BAR)
            words = f"{times.medians_ms[name]:,.3g} ms" if name == "ours" else f"{ratio:.1f}x"
            chart.add("text", "", words, x=LEFT + UNIT * ratio + 6, y=y + BAR - 0.5)
            y += BAR + GAP
        chart.add("text", "ink end", TASKS[task], x=LEFT - 10, y=(first + y - GAP) / 2 + 4)
        y += GROUP_GAP
    dates = dict.fromkeys(times.date for times in tasks.values())
    machines = dict.fromkeys(times.machine for times in tasks.values())
    facts = f"{', '.join(machines)}, {', '.join(dates)}, float32, medians of alternating rounds"
    chart.add("text", "", facts, x=0, y=height - 2)
    return chart


def draw_results() -> str:
    """Return the text of the chart of the committed results."""
    tasks = {}
    for task in TASKS:
        text = (RESULTS / f"train_{task}_float32.md").read_text(encoding="utf-8")
        tasks[task] = read_step_times(text)
    return draw_chart(tasks).to_file_text()


if __name__ == "__main__":
    CHART.write_text(draw_results(), encoding="utf-8")
    print(CHART)
