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
    """Facts of a program. Moves are copies and transposes of arrays of two or more dimensions."""

    donated: int
    """Number of arguments whose memory a result uses again."""
    body_moves: int
    """Number of moves in the bodies of loops."""
    body_moved_bytes: int
    state_moves: int
    """Number of moves of the state into or out of a dispatch."""
    state_moved_bytes: int
    known_steps: int | None
    """Trip count of the loop; None if the compiler hasn't determined it."""
    calls_by_library: Mapping[str, int]
    """Number of custom calls by "target dtype"."""
    triton: Mapping[str, int]
    """Number of Triton's kernels by kind."""
    callbacks: int
    """Number of transfers and calls between device and host."""


def read_hlo(text: str) -> HloFacts:
    """Read the facts from a program's text. Lines that aren't instructions are ignored."""
    program = read_hlo_text(text)
    lines = list(program.parse_lines())
    moving_computations = {
        name for name, body in program.computations.items() if _only_moves(body.values())
    }
    main = program.computations.get(program.entry, {})
    loops = [line for line in lines if line.opcode == "while"]
    body_names = {name for line in loops for name in _BODY.findall(line.arguments)}
    bodies = [body for name, body in program.computations.items() if name in body_names]
    body_lines = [line for body in bodies for line in body.values()]
    body_moves = [line for line in body_lines if _is_move(line, moving_computations)]
    _, _, aliases = program.header.partition("input_output_alias={")
    aliases = aliases.partition("entry_computation_layout")[0]
    donated = {int(number) for _, number in _ALIAS.findall(aliases)}
    # The state is read from a donated argument, or written to a result or a loop's input.
    main_moves = [line for line in main.values() if _is_move(line, moving_computations)]
    state_moves = [
        line
        for line in main_moves
        if _is_output(line, main) or any(_is_donated(name, main, donated) for name in line.operands)
    ]
    trips = [trip for line in main.values() for trip in _TRIPS.findall(line.arguments)]
    calls = [
        f"{line.target.lstrip('_')} {line.arrays[0].dtype}"
        for line in lines
        if line.opcode == "custom-call" and line.target and line.arrays
    ]
    triton = [kind for line in lines for kind in _TRITON.findall(line.arguments)]
    return HloFacts(
        donated=len(donated),
        body_moves=len(body_moves),
        body_moved_bytes=sum(line.nbytes for line in body_moves),
        state_moves=len(state_moves),
        state_moved_bytes=sum(line.nbytes for line in state_moves),
        known_steps=int(trips[0]) if trips else None,
        calls_by_library=dict(sorted(Counter(calls).items())),
        triton=dict(sorted(Counter(triton).items())),
        callbacks=sum(line.opcode in HOST or CALLBACK in line.target for line in lines),
    )


def _only_moves(lines: Iterable[HloLine]) -> bool:
    opcodes = {line.opcode for line in lines}
    return bool(opcodes & MOVES) and opcodes <= MOVES | VIEWS


def _is_move(line: HloLine, moving_computations: set[str]) -> bool:
    """Return whether an instruction only moves an array of two dimensions or more, or several."""
    rank = len(line.arrays[0].sizes) if line.arrays else 0
    if rank < 2 and not (line.opcode == "fusion" and len(line.arrays) > 1):
        return False
    return line.opcode in MOVES or line.called_computation in moving_computations


def _is_output(line: HloLine, main: Mapping[str, HloLine]) -> bool:
    """Return whether a value, or a tuple or bitcast of it, is a result or a loop's input."""
    readers = [reader for reader in main.values() if line.name in reader.operands]
    return any(
        reader.opcode == "while"
        or reader.is_root
        or (reader.opcode in ("tuple", "bitcast") and _is_output(reader, main))
        for reader in readers
    )


def _is_donated(name: str, main: Mapping[str, HloLine], donated: set[int]) -> bool:
    """Return whether a value is, or views, a donated argument or a loop's result."""
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
