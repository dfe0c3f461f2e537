"""Job files, by which a scheduler runs a recipe: a template and a row of `ENGINES` for each engine.

Every file has a time limit, the memory, the time between a signal and the kill, and a rule that
runs the same command again after exit status 75 only. The command continues the newest run of its
recipe.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.core.files.paths import CONF
from pipeline.core.host.launchers import DEFAULT_PORT, LaunchName

MAX_NAME_LENGTH = 40
"""Longest name of a job. Kubernetes appends to it and allows 63 characters in all."""
GIB = 1 << 30
TEMPLATES = CONF / "job"
IMAGE = "recipe-pipeline"
"""The image that is built by the command in the Containerfile's first line."""


@dataclass(frozen=True)
class Engine:
    """A scheduler, and the features of its jobs."""

    template: str
    """Name of a file in `TEMPLATES`."""
    launch: LaunchName
    """Value of the recipe's `launch` for the variables that the scheduler sets."""
    image: str | None = None
    """The default image; None if jobs run in the environment of the machines."""
    shares_files: bool = False
    """Whether jobs have the files of the machine that submits them."""
    names_gpus: bool = False
    """Whether a job can request a kind of GPU."""

    @property
    def file(self) -> Path:
        """The template's path."""
        return TEMPLATES / self.template


ENGINES: Mapping[str, Engine] = {
    "slurm": Engine("slurm.sh.j2", "slurm", shares_files=True, names_gpus=True),
    "jobset": Engine("jobset.yaml.j2", "jax", image=IMAGE),
    "trainjob": Engine("trainjob.yaml.j2", "jax", image=IMAGE),
    "ray": Engine("ray.py.j2", "env"),
    "skypilot": Engine("skypilot.yaml.j2", "skypilot", image=IMAGE, names_gpus=True),
}
"""Engines by the value of `--to`."""


@dataclass(frozen=True)
class JobLimits:
    """The time of a job, and the memory of each of its processes."""

    time_s: int
    """Seconds until the job is stopped."""
    grace_s: int
    """Seconds from the signal to stop until a process is killed."""
    memory_gib: int
    notes: Sequence[str]
    """Comments for the job file on the origin of the figures."""


@dataclass(frozen=True)
class JobRequest:
    """The processes of a job, and their resources."""

    recipe: str
    """Name of the recipe."""
    arguments: Sequence[str]
    """Arguments of `python -m pipeline`."""
    processes: int
    """Tasks of Slurm, pods of Kubernetes, workers of Ray or nodes of SkyPilot."""
    cores: int
    """Cores of a process."""
    gpus: int
    """GPUs of a process."""
    gpu_kind: str | None
    """The engine's name for the kind of GPU; None for any kind."""
    image: str | None
    limits: JobLimits

    @property
    def name(self) -> str:
        """The recipe's name as a DNS label, which every engine accepts."""
        label = re.sub(r"[^a-z0-9]+", "-", self.recipe.lower())[:MAX_NAME_LENGTH].strip("-")
        return label if label[:1].isalpha() else f"job-{label}".strip("-")


def render_job(engine: Engine, request: JobRequest) -> str:
    """Return the text of a job file."""
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        loader=FileSystemLoader(TEMPLATES),
    )
    environment.filters.update(
        ceil=math.ceil,
        join_words=shlex.join,
        quote_word=shlex.quote,
        # JSON of a printable text is the same text in YAML and in Python.
        quote_text=partial(json.dumps, ensure_ascii=False),
    )
    template = environment.get_template(engine.template)
    return template.render(job=request, port=DEFAULT_PORT)
