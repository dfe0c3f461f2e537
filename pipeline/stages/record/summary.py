"""summary.json: the outcome of a run, for other programs to read."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.value_text import count_noun
from pipeline.core.plugins.parts import COMPONENTS, list_entries

Status = Literal["done", "pruned", "stopped", "failed"]
FORMER_EPOCHS = "passes"
MAX_METRICS = 3
"""Most metrics in the line of a summary."""


@dataclass
class Summary:
    """The fields of summary.json, which the stages set.

    `steps`, `epochs` and `sinks` count all training, also before a resume. Times are of this
    process. `modelled` is empty on devices that aren't emulated.
    """

    recipe: str
    device: str
    seed: int
    stages: tuple[str, ...]
    run_dir: str | None
    status: Status = "done"
    reason: str | None = None
    exit_status: int = 0
    steps: int = 0
    epochs: float = 0.0
    """Readings of the training split."""
    sinks: int = 0
    sink: dict[str, Any] = field(default_factory=dict)
    feed: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    """With `train.memory`: samples at once, needed and usable bytes, a line for each halving."""
    data: dict[str, Any] = field(default_factory=dict)
    """`image`: shape and dtype of an image before map ops; `classes`: names in label order;
    `samples`: sizes of splits; `targets`: task, means, deviations; `table`: columns; `text`."""
    parameters: int | None = None
    loss_scale: dict[str, float] = field(default_factory=dict)
    bad_steps: dict[str, Any] = field(default_factory=dict)
    """The policy `on_nan`, the number of steps that it left out, and the rollbacks."""
    metrics: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    """`temperature` of the classes, and the calibration errors; {} without a fitted one."""
    privacy: dict[str, Any] = field(default_factory=dict)
    """`epsilon` at `delta`, the noise, and how samples were drawn; {} if the run isn't private."""
    time: dict[str, float | None] = field(default_factory=dict)
    modelled: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    """Figures of the recipe's recorded reference beside the run's; empty without one."""
    versions: dict[str, str] = field(default_factory=dict)
    resumed_from: dict[str, Any] | None = None
    logs: dict[str, Any] = field(default_factory=dict)
    """For each damaged log, by name: the first `missing` ranges of steps, the number of
    `missing_lines`, whether the other lines are `verified`, and the `restored` ranges."""

    def __repr__(self) -> str:
        """Return status, first metrics and folder in one line; `vars` has all fields."""
        items = self.metrics.items()
        metrics = [f"{name} {value:.4g}" for name, value in items if isinstance(value, float)]
        status = f"{self.status} ({self.reason})" if self.reason else self.status
        parts = (f"{self.recipe}: {status}", count_noun(self.steps, "step"), *metrics[:MAX_METRICS])
        return f"<{', '.join(parts)}; {self.run_dir}>"

    def write(self, run_dir: Path) -> None:
        """Write summary.json; a reader sees the earlier file or the new one, both complete."""
        # Programs that read run directories know `epochs` by its former name, too.
        tree = {**asdict(self), FORMER_EPOCHS: self.epochs}
        write_whole(run_dir / "summary.json", format_json(tree, indent=2) + "\n")


def read_summary(run_dir: Path) -> Summary:
    """Read the summary of a run that has ended. Raises RunError if it can't be read."""
    try:
        tree = read_json(run_dir / "summary.json")
        return Summary(**{key: value for key, value in tree.items() if key != FORMER_EPOCHS})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{run_dir}: has no summary of the run: {error}") from error


START_UP = {
    "imports and recipe": "start_s",
    "data": "data_s",
    "build": "build_s",
    "first data": "first_window_s",
    "compile": "compile_s",
    "sinks": "sinks_s",
    "outlook": "outlook_s",
    "first dispatch": "first_dispatch_s",
}
"""Keys in `Summary.time` of the parts of start-up, by name."""


def describe_start_up(time: Mapping[str, float | None]) -> str:
    """Return the time to the first step and its parts, as a line for the log."""
    first_step_s = time["first_step_s"] or 0.0
    parts = {name: time.get(key) or 0.0 for name, key in START_UP.items()}
    parts["other"] = first_step_s - sum(parts.values())
    text = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
    return f"first step after {first_step_s:.2f} s: {text}"


DECISIVE_PACKAGES = ("recipe-pipeline", "flax", "grain", "numpy", "optax", "pillow", "scipy")
"""Packages whose versions can change a run's numbers, besides the backend's packages."""


def list_versions(backend: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of packages that may change a run's numbers or that add components.

    `backend` has the versions of the backend's packages.
    """
    packages = {name: find_version(name) for name in DECISIVE_PACKAGES}
    dists = (entry.dist for _, entry in list_entries(COMPONENTS))
    components = {dist.name: dist.version for dist in dists if dist is not None}
    return {"python": platform.python_version(), **packages, **components, **backend}


def find_version(name: str) -> str:
    """Return the version of a package; "not installed" without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
