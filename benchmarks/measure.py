"""What every comparison needs: alternating rounds, the machine, versions, and Markdown tables."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from pipeline.core.host.cuda import read_cuda_versions

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")


def alternate(contestants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Let each contestant have its turn, `rounds` times over; every other round runs backwards.

    What drifts meanwhile (clock, temperature, neighbours) meets all of them alike.
    """
    results: dict[str, list[T]] = {name: [] for name in contestants}
    for index in range(rounds):
        turn = list(contestants)
        for name in turn if index % 2 == 0 else reversed(turn):
            results[name].append(contestants[name]())
    return results


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> str:
    """Processor, cores, the vector instructions that decide, and memory, in one line."""
    facts = _cpu_facts()
    flags = facts.get("flags", "").split()
    sets = [name for name in INSTRUCTION_SETS if name in flags]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    name = facts.get("model name", platform.processor() or platform.machine())
    family = f" (family {facts['cpu family']}, model {facts['model']})" if "model" in facts else ""
    return (
        f"{name}{family}, {usable_cores()} cores, {' '.join(sets) or platform.machine()}, "
        f"{memory_gib:.0f} GiB, {platform.system()} {platform.release()}"
    )


def gpus() -> str:
    """Return the GPUs with their driver, CUDA and cuDNN, in one line; empty without a GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    names = "; ".join(process.stdout.strip().splitlines())
    libraries = {name: text for name, text in read_cuda_versions().items() if name != "driver"}
    versions_text = ", ".join(f"{name} {text}" for name, text in libraries.items())
    return f"{names} ({versions_text})" if versions_text else names


def _cpu_facts() -> dict[str, str]:
    """Return the first processor of /proc/cpuinfo; empty without that file."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def versions(packages: Iterable[str]) -> str:
    """Python and the packages that are installed, in one line."""
    parts = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            parts.append(f"{package} not installed")
    return ", ".join(parts)


def today() -> str:
    """The date, as 2026-01-31."""
    return datetime.date.today().isoformat()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def heading(title: str, command: str, packages: Iterable[str]) -> str:
    """How a result begins: what it is, the command that made it, when, where, with what."""
    where = "; ".join(filter(None, (machine(), gpus())))
    return f"# {title}\n\n    {command}\n\n{today()}; {where}; {versions(packages)}\n"


def add_save(parser: argparse.ArgumentParser, name: str) -> None:
    """The option `--save [FILE]`, by default under that name among the results."""
    parser.add_argument(
        "--save", type=Path, nargs="?", const=RESULTS / name, help="default: %(const)s"
    )


def publish(text: str, save: Path | None) -> None:
    """Print a result, and save it where asked to."""
    print(text)
    if save:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(text, encoding="utf-8")
        print(f"saved as {save}", file=sys.stderr)
