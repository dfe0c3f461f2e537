"""Facts of a program for a GPU, read from its optimized HLO."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.backends.graph.hlo_text import HloLine, read_hlo_text

_TRITON = re.compile(r'"kind":"(__triton\w*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BODY = re.compile(r"body=%?([\w.$-]+)")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")

MOVES = frozenset({"copy", "transpose", "copy-start"})
VIEWS = frozenset({"bitcast", "get-tuple-element", "tuple", "parameter", "reshape", "constant"})
"""Opcodes that may be in a computation of moves besides `MOVES`."""
HOST = frozenset({"infeed", "outfeed", "send", "recv"})
"""Opcodes of transfers between host and device."""
CALLBACK = "callback"
"""Part of the target's name in a custom call to the host."""


@dataclass(frozen=True)
class HloFacts:
    """Facts of a program. `calls_by_library` has counts by "target dtype", `triton` by kind.

    `donated` counts arguments whose memory a result reuses. `body_moves` counts copies and
    transposes in a loop, `state_moves` the copies and transposes of the state into or out of a
    dispatch; arrays of fewer than two dimensions don't count. `known_steps` is the trip count of
    the loop, None if the compiler hasn't determined it. `callbacks` counts uses of the host.
    """

    donated: int
    body_moves: int
    body_moved_bytes: int
    state_moves: int
    state_moved_bytes: int
    known_steps: int | None
    calls_by_library: Mapping[str, int]
    triton: Mapping[str, int]
    callbacks: int


def read_hlo(text: str) -> HloFacts:
    """Read the facts from a program's text. Lines that aren't instructions are ignored."""
    program = read_hlo_text(text)
    lines = list(program.parse_lines())
    moving_computations = {
        name for name, body in program.computations.items() if _only_moves(body.values())
    }
    main = program.computations.get(program.entry, {})
    bodies = {
        body[1]
        for line in lines
        if line.opcode == "while" and (body := _BODY.search(line.arguments))
    }
    in_loops = [
        line
        for name, body in program.computations.items()
        if name in bodies
        for line in body.values()
        if _is_move(line, moving_computations)
    ]
    _, _, aliases = program.header.partition("input_output_alias={")
    aliases = aliases.partition("entry_computation_layout")[0]
    donated = {int(alias[1]) for alias in _ALIAS.findall(aliases)}
    moves = (line for line in main.values() if _is_move(line, moving_computations))
    state_lines = [
        line
        for line in moves
        # The state is read from a donated argument, or written to a result or a loop's input.
        if _is_output(line, main) or any(_is_donated(name, main, donated) for name in line.operands)
    ]
    trips = [trip[1] for line in main.values() if (trip := _TRIPS.search(line.arguments))]
    calls = (
        f"{line.target.lstrip('_')} {line.arrays[0].dtype}"
        for line in lines
        if line.opcode == "custom-call" and line.target is not None and line.arrays
    )
    triton = (match[1] for line in lines if (match := _TRITON.search(line.arguments)))
    return HloFacts(
        donated=len(donated),
        body_moves=len(in_loops),
        body_moved_bytes=sum(line.nbytes for line in in_loops),
        state_moves=len(state_lines),
        state_moved_bytes=sum(line.nbytes for line in state_lines),
        known_steps=int(trips[0]) if trips else None,
        calls_by_library=dict(sorted(Counter(calls).items())),
        triton=dict(sorted(Counter(triton).items())),
        callbacks=sum(line.opcode in HOST or CALLBACK in (line.target or "") for line in lines),
    )


def _only_moves(lines: Iterable[HloLine]) -> bool:
    opcodes = {line.opcode for line in lines}
    return bool(opcodes & MOVES) and opcodes <= MOVES | VIEWS


def _is_move(line: HloLine, moving_computations: set[str]) -> bool:
    """Return whether an instruction only moves an array of two dimensions or more."""
    # The arrays of a fusion with several results may have different ranks.
    rank = len(line.arrays[0].sizes) if line.arrays else 0
    if rank < 2 and not (line.opcode == "fusion" and len(line.arrays) > 1):
        return False
    return line.opcode in MOVES or line.called_computation in moving_computations


def _is_output(line: HloLine, main: Mapping[str, HloLine]) -> bool:
    """Return whether a value is a result or a loop's input, through tuples and bitcasts."""
    readers = [reader for reader in main.values() if line.name in reader.operands]
    return any(
        reader.opcode == "while"
        or reader.is_root
        or (reader.opcode in ("tuple", "bitcast") and _is_output(reader, main))
        for reader in readers
    )


def _is_donated(name: str, main: Mapping[str, HloLine], donated: set[int]) -> bool:
    """Return whether a value is a donated argument or a loop's result, through views."""
    line = main.get(name)
    if line is None:
        return False
    if line.opcode == "parameter":
        number = line.arguments.partition(")")[0]
        return number.isdigit() and int(number) in donated
    if line.opcode in ("bitcast", "get-tuple-element"):
        return any(_is_donated(operand, main, donated) for operand in line.operands)
    # A loop's results reuse the donated memory, so a move of a result moves the state out.
    return line.opcode == "while"
