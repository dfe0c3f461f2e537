"""Job files, by which a scheduler runs a recipe: a template and a row of `ENGINES` for each engine.

A trial run of the recipe's first steps measures start, stop and memory. Every file has a time
limit, the memory, the time between a signal and the kill, and a rule that runs the same command
again after exit status 75 only. The command continues the newest run of its recipe.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.config.overrides import get_key
from pipeline.core.errors import RunError, get_exit_status
from pipeline.core.files.paths import CONF
from pipeline.core.host.launchers import DEFAULT_PORT, LaunchName
from pipeline.core.plugins.loading import list_loaded_plugins, to_flags
from pipeline.engine.monitors.live_status import STATUS

POLL_S = 0.05
"""Seconds between two checks for the run's status."""
NO_LOCAL = ("launch.processes=null", "launch.restarts=0", "launch.min_processes=null")
"""Overrides that reset the keys that only `launch=local` may set."""
WITHOUT_EFFECTS = (
    "launch=none",
    *NO_LOCAL,
    "train.resume=null",
    "train.callbacks=[]",
    "checkpoint.prefix=null",
    "checkpoint.directory=null",
)
"""Overrides of a run in one process that writes and reports only in its directory."""


@dataclass(frozen=True)
class TrialRun:
    """Measurements of a run in one process on this machine."""

    start_s: float
    """Seconds until the first steps were done."""
    stop_s: float | None
    """Seconds from the signal until the end, with a checkpoint; None if it ended by itself."""
    memory_bytes: int
    """Peak memory of the process."""


def make_run_arguments(overrides: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return a run's arguments: flags of loaded plug-ins, and overrides with `changes` of keys."""
    changed_keys = {get_key(change) for change in changes}
    unchanged = [override for override in overrides if get_key(override) not in changed_keys]
    return [*to_flags([plugin.source for plugin in list_loaded_plugins()]), *unchanged, *changes]


def run_trial(overrides: Sequence[str]) -> TrialRun:
    """Start a run in a temporary folder, and stop it after its first steps. Raises RunError."""
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        arguments = make_run_arguments(overrides, [*WITHOUT_EFFECTS, f"hydra.run.dir={folder}"])
        command = [sys.executable, "-m", "pipeline", *arguments]
        started_at = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                # WNOWAIT leaves the process to `wait4`, which returns its memory.
                options = os.WEXITED | os.WNOHANG | os.WNOWAIT
                status_file = Path(folder, STATUS)
                while not os.waitid(os.P_PID, process.pid, options) and not status_file.exists():
                    time.sleep(POLL_S)
                start_s = time.monotonic() - started_at
                os.kill(process.pid, signal.SIGTERM)
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            except BaseException:
                process.kill()
                raise
        stop_s = time.monotonic() - started_at - start_s
    is_stopped = process.returncode == get_exit_status("stopped")
    if not is_stopped and process.returncode != 0:
        raise RunError(f"a run of this recipe ends here with exit status {process.returncode}")
    return TrialRun(start_s, stop_s if is_stopped else None, 1024 * usage.ru_maxrss)


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
