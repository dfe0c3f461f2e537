"""Figures of a program that is compiled for a chip that is not there: launches, graphs, copies,
memory; each counted from what XLA's compiler wrote."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from pipeline.backends.base import ProgramReport, ProgressClock
from pipeline.backends.compile_program import ProgramSpec, compile_program
from pipeline.backends.gpu.chip_target import ChipTarget
from pipeline.backends.gpu.optimized_hlo import HloFacts, read_hlo
from pipeline.backends.gpu.step_programs import Compile
from pipeline.backends.gpu.thunks import (
    Launches,
    Thunk,
    count_launches,
    outer_loops,
    parse_thunks,
)
from pipeline.core.errors import RunError

MB, GB = 1e6, 1e9
AFTER, BEFORE = "*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt"
"""Lists of launches: with CUDA graphs, written where there are any, and without."""
NO_TILE = "output tile sizes"
"""Part of XLA's message about a product for which it has no tile unless it can time some."""
WITHOUT_TRITON: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
UNTUNED = (
    "compiled without Triton's products, for one of which XLA has no tile unless it times some"
)


@dataclass(frozen=True)
class ProgramFigures:
    """Figures of a program; `step` are launches of one iteration of its loop, or of all of it
    where it has none, and `around` those of a dispatch besides."""

    results: int
    """Arrays that it returns; each should take over the memory of an argument."""
    argument_bytes: int
    temporary_bytes: int
    memory_bytes: int
    """Arguments, results that have memory of their own, and temporaries."""
    chip_bytes: int
    loops: int
    loop_in_graph: bool
    step: Launches
    around: Launches
    hlo: HloFacts

    @property
    def waits_for_host(self) -> bool:
        """Whether each iteration of a loop waits until the host has read its condition."""
        return self.loops > 0 and not self.loop_in_graph and self.hlo.known_steps is None

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {**asdict(self), "waits_for_host": self.waits_for_host}

    def lines(self, name: str) -> tuple[str, ...]:
        """Return the figures as lines for the user."""
        per = "a step" if self.loops else "each"
        return (
            f"{name}, {per}: {_launches(self.step)}; {self._loop()}",
            f"{name}, libraries: {_calls(self.hlo.calls_by_library)}; "
            f"Triton: {_calls(self.hlo.triton)}",
            f"{name}, memory: {self.memory_bytes / GB:,.2f} of the chip's "
            f"{self.chip_bytes / GB:,.0f} GB, {self.temporary_bytes / MB:,.1f} MB of it "
            f"temporaries; {self.hlo.donated} of {self.results} results take over the memory of "
            f"an argument; host callbacks: {self.hlo.callbacks}",
            f"{name}, copies and transposes: {self.hlo.body_moves} in the loop's body"
            f"{_moved(self.hlo.body_moved_bytes)}, {self.hlo.state_moves} of the state in a "
            f"dispatch{_moved(self.hlo.state_moved_bytes)}",
        )

    def _loop(self) -> str:
        if not self.loops:
            return "no loop"
        if self.loop_in_graph:
            return "the loop is in a graph, and ends on the device"
        if self.hlo.known_steps is not None:
            return f"a loop of {self.hlo.known_steps}, as the compiler knows"
        return "a loop whose every iteration waits until the host has read its condition"


def compile_and_look(target: ChipTarget) -> Compile:
    """Return the function that compiles a program for the target and looks at the result."""

    def compiled(spec: ProgramSpec, watch: ProgressClock) -> tuple[Any, ProgramReport]:
        if spec.platforms is None:
            # The host's own: initialisation.
            return compile_program(spec, watch)
        spec, note = replace(spec, cached=False), ""
        try:
            program, report, thunks = _with_launches(spec, watch)
        except RunError as error:
            if NO_TILE not in str(error):
                raise
            spec, note = spec.with_options(WITHOUT_TRITON), f"{spec.name}: {UNTUNED}"
            program, report, thunks = _with_launches(spec, watch)
        found = figures_of(program, thunks, target)
        lines = (*([note] if note else []), *found.lines(spec.name))
        return program, replace(report, figures=found.to_json(), lines=lines)

    return compiled


def _with_launches(
    spec: ProgramSpec, watch: ProgressClock
) -> tuple[Any, ProgramReport, tuple[Thunk, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        dump: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        program, report = compile_program(spec.with_options(dump), watch)
        return program, report, parse_thunks(_read_list(Path(folder)))


def figures_of(program: Any, thunks: tuple[Thunk, ...], target: ChipTarget) -> ProgramFigures:
    """Return the figures of a compiled program and its launches."""
    memory, loops = program.memory_analysis(), outer_loops(thunks)
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    whole = count_launches(thunks)
    step, around = whole, Launches()
    if loops:
        loop, in_graph = loops[0]
        body = [one for one in loop.inside if one.part == "body"]
        step = count_launches(body, in_graph=in_graph)
        around = count_launches([one for one in thunks if one is not loop])
    return ProgramFigures(
        results=len(jax.tree.leaves(program.out_info)),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        memory_bytes=used,
        chip_bytes=target.memory_bytes,
        loops=whole.loops,
        loop_in_graph=bool(loops) and loops[0][1],
        step=step,
        around=around,
        hlo=read_hlo(program.as_text()),
    )


def _read_list(folder: Path) -> str:
    """Return the list of launches, that with CUDA graphs where there is one."""
    for pattern in (AFTER, BEFORE):
        for file in folder.glob(pattern):
            return file.read_text(encoding="utf-8")
    return ""


def _launches(counts: Launches) -> str:
    graphs = f"{counts.graphs} CUDA graphs and {counts.alone} launches beside them"
    return (
        f"{counts.kernels} kernels, {counts.cudnn} cuDNN, {counts.gemm} GEMM, "
        f"{counts.copies} copies, {counts.fills} fills; {graphs}"
    )


def _calls(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"


def _moved(nbytes: int) -> str:
    return f" ({nbytes / MB:,.2f} MB)" if nbytes else ""
