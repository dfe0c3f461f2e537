"""What XLA launches for a GPU that is not there: six networks, before and after.

    python -m benchmarks.gpu_compile --networks lenet5,resnet18 --variants before,auto

Compiles the training loop alone, for `device.target`. A variant is a way to compile it:

    before   one loop whose length the compiler doesn't know, the state in JAX's layouts
    auto, step, loop, off   as `device.graphs` says, 64 steps of known number, layouts of the
             compiler's choice

Needs the `gpu-compile` extra, no GPU, no data. Nothing is timed but the compilation. The exit
status is 1 where a variant other than `before` has something that a dispatch should be free of.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from benchmarks.measure import add_save, heading, publish, table
from pipeline import load_recipe, run
from pipeline.backends.base import CompileInputs, Executable, ProgressClock
from pipeline.backends.compile_program import ProgramSpec
from pipeline.backends.gpu.chip_target import ChipTarget
from pipeline.backends.gpu.gpu_backend import AbsentGpuBackend
from pipeline.backends.gpu.program_figures import compile_for_target
from pipeline.backends.gpu.step_programs import (
    MAX_PROGRAM_STEPS,
    Chip,
    make_carry_shapes,
    make_compiler_options,
    make_train_spec,
)
from pipeline.backends.step_loops import make_train_loop
from pipeline.backends.xla import pad_to_block

PACKAGES = ("jax", "jaxlib", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
SYNTHETIC = ("dataset.name=synthetic", "+dataset.like=cifar10")
NETWORKS: Mapping[str, tuple[str, ...]] = {
    "lenet5": ("+recipe=lenet5_digits",),
    "resnet9": ("+recipe=resnet9_cifar10_speedrun", *SYNTHETIC, "train.precision=bf16"),
    "resnet18": (
        *("+recipe=resnet18_cifar10", *SYNTHETIC),
        *("train.precision=bf16", "train.batch_size=128"),
    ),
    "resnet50": (
        *("+recipe=resnet50_cifar10", *SYNTHETIC),
        *("train.precision=bf16", "train.batch_size=256"),
    ),
    "mobilenet_v2": (
        *("+recipe=resnet50_cifar10", "model=mobilenet_v2", *SYNTHETIC),
        *("train.precision=bf16", "train.batch_size=256"),
    ),
    "vit_tiny": (
        *("+recipe=resnet50_cifar10", "model=vit_tiny", *SYNTHETIC),
        *("train.precision=bf16", "train.batch_size=256"),
    ),
}
VARIANTS = ("before", "auto", "step", "loop", "off")


@dataclass(frozen=True)
class Compiled:
    """A compiled training loop: seconds it took, and its figures as in compiled.json."""

    compile_s: float
    figures: Mapping[str, Any]


def main() -> int:
    """Compile and print a Markdown table; the exit status is 1 where a program has a flaw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--variants", default="before,auto,step,loop")
    parser.add_argument("--target", default="h200")
    parser.add_argument("overrides", nargs="*", help="of each recipe, as train.batch_size=16")
    add_save(parser, "gpu_compile.md")
    args = parser.parse_args()
    rows = []
    flaws = []
    for name in args.networks.split(","):
        work = inputs_of(name, args.target, args.overrides)
        for variant in args.variants.split(","):
            compiled = compile_variant(variant, *work)
            rows.append(row_of(name, variant, compiled))
            if variant != "before":
                flaws += [f"{name}, {variant}: {flaw}" for flaw in flaws_of(compiled.figures)]
            print(rows[-1], flush=True)
    command = f"python -m benchmarks.gpu_compile --variants {args.variants}"
    title = heading(f"Launches on a chip that is not there: {args.target}", command, PACKAGES)
    publish(title + _table(rows), args.save)
    print("\n".join(flaws) or "no flaw")
    return 1 if flaws else 0


def inputs_of(
    name: str, target: str, overrides: list[str]
) -> tuple[CompileInputs, Chip, ChipTarget]:
    """Return what a run of a network would compile, and the chip."""
    taken: list[tuple[CompileInputs, Chip, ChipTarget]] = []

    class TakenError(Exception):
        """The run has come to the compiler."""

    def take(backend: AbsentGpuBackend, work: CompileInputs, watch: ProgressClock) -> Executable:
        chip = Chip(backend.device, backend.placement.device, backend.target)
        taken.append((work, chip, backend.target))
        raise TakenError

    recipe, *recipe_overrides = NETWORKS[name]
    stages = ["device=gpu", f"device.target={target}", "stages=[data,build,compile]"]
    loaded = load_recipe(recipe.removeprefix("+recipe="), [*recipe_overrides, *stages, *overrides])
    original = AbsentGpuBackend.compile
    AbsentGpuBackend.compile = take  # type: ignore[method-assign, assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(loaded, Path(folder))
    except TakenError:
        pass
    finally:
        AbsentGpuBackend.compile = original  # type: ignore[method-assign]
    return taken[0]


def compile_variant(variant: str, work: CompileInputs, chip: Chip, target: ChipTarget) -> Compiled:
    """Compile the training loop in one way."""
    if variant == "before":
        spec = _spec_before(work, chip)
    else:
        options = make_compiler_options(variant, deterministic=True)  # type: ignore[arg-type]
        spec = make_train_spec(work, chip, options, 0 if variant == "loop" else MAX_PROGRAM_STEPS)
    started_at = time.perf_counter()
    _, report = compile_for_target(target, spec, _watch)
    return Compiled(time.perf_counter() - started_at, report.figures or {})


def _spec_before(work: CompileInputs, chip: Chip) -> ProgramSpec:
    """The loop of other devices: its length is an argument, and nothing says how the state lies."""
    sharding = SingleDeviceSharding(chip.device)
    carry = make_carry_shapes(work, chip)
    inputs = chip.to_shapes(work.train.get_window(0).inputs)
    rates = chip.to_shapes(pad_to_block(work.learning_rates))
    args = carry.loop, inputs, rates, carry.position, carry.position
    loop = make_train_loop(work.step.step, jax.lax.while_loop)
    return ProgramSpec("training loop", loop, args, donated=0, out_shardings=sharding)


@contextmanager
def _watch(name: str) -> Iterator[None]:
    yield


def flaws_of(figures: Mapping[str, Any]) -> list[str]:
    """Return what a dispatch has and should not have."""
    hlo = figures["hlo"]
    is_present = {
        f"{hlo['callbacks']} host callbacks": hlo["callbacks"],
        f"{hlo['donated']} of {figures['results']} arrays donated": (
            hlo["donated"] != figures["results"]
        ),
        f"{hlo['state_moves']} copies or transposes of the state": hlo["state_moves"],
        f"{hlo['body_moves']} copies or transposes in the loop": hlo["body_moves"],
        f"{figures['loops']} loops": figures["loops"] != 1,
        "a loop that waits for the host": figures["waits_for_host"],
    }
    return [flaw for flaw, is_there in is_present.items() if is_there]


def row_of(name: str, variant: str, compiled: Compiled) -> list[str]:
    """A row of the table."""
    figures = compiled.figures
    step = figures["step"]
    hlo = figures["hlo"]
    convolutions = [f"{n} {t}" for t, n in hlo["calls_by_library"].items() if "conv" in t]
    return [
        name,
        variant,
        f"{compiled.compile_s:.0f}",
        f"{step['kernels']:,} / {step['cudnn']:,} / {step['gemm']:,}",
        f"{step['graphs']:,} + {step['alone']:,}",
        "all in one" if figures["loop_in_graph"] else "no",
        "yes" if figures["waits_for_host"] else "no",
        f"{hlo['state_moves']:,} ({hlo['state_moved_bytes'] / 1e6:,.1f} MB)",
        f"{hlo['body_moves']:,}",
        f"{hlo['donated']} of {figures['results']}",
        f"{figures['loops']}",
        f"{hlo['callbacks']}",
        f"{figures['memory_bytes'] / 1e9:,.2f}",
        f"{figures['temporary_bytes'] / 1e6:,.0f}",
        f"{sum(hlo['triton'].values())}",
        str(len(convolutions)),
    ]


HEADER = (
    *("network", "variant", "compile, s", "kernels / cuDNN / GEMM a step"),
    *("graphs + launches beside them, a step", "loop in a graph", "host asked every step"),
    *("moves of the state a dispatch", "copies in the body", "donated", "loops", "callbacks"),
    *("memory, GB", "temporaries, MB", "Triton", "kinds of cuDNN calls"),
)


def _table(rows: list[list[str]]) -> str:
    return "\n" + table(HEADER, rows)


if __name__ == "__main__":
    sys.exit(main())
