"""Facts of a program for a GPU, read from the HLO that XLA's compiler ends with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.backends.graph.hlo_text import HloLine, read_hlo_text

_TRITON = re.compile(r'"kind":"(__triton\w*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")

MOVES = frozenset({"copy", "transpose", "copy-start"})
VIEWS = frozenset({"bitcast", "get-tuple-element", "tuple", "parameter", "reshape", "constant"})
HOST = frozenset({"infeed", "outfeed", "send", "recv"})
CALLBACK = "callback"
CONVOLUTION = "__cudnn$conv"


@dataclass(frozen=True)
class HloFacts:
    """Facts of a program.

    `donated` counts arguments whose memory a result takes over. `body_moves` and `state_moves` are
    copies and transposes of arrays of two dimensions or more: those in a loop, and those that
    only bring the state in or out of a dispatch. `known_steps` is the length of the loop, where
    the compiler knows it. The counters are by target and type.
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
    """Read the facts of a program; lines that are not understood are left out."""
    program = read_hlo_text(text)
    computations, lines = program.computations, list(program.lines())
    pure = {name for name, inside in computations.items() if _only_moves(inside.values())}
    main = computations.get(program.entry, {})
    bodies = _bodies(computations)
    in_loops = [
        line for name in bodies for line in computations[name].values() if _moves(line, pure)
    ]
    donated = {int(found[1]) for found in _ALIAS.findall(_aliases(program.header))}
    of_state = [
        line for line in main.values() if _moves(line, pure) and _is_border(line, main, donated)
    ]
    trips = [found[1] for line in main.values() if (found := _TRIPS.search(line.arguments))]
    return HloFacts(
        donated=len(donated),
        body_moves=len(in_loops),
        body_moved_bytes=sum(line.nbytes for line in in_loops),
        state_moves=len(of_state),
        state_moved_bytes=sum(line.nbytes for line in of_state),
        known_steps=int(trips[0]) if trips else None,
        calls_by_library=_count(_calls(lines)),
        triton=_count(found[1] for line in lines if (found := _TRITON.search(line.arguments))),
        callbacks=sum(_is_callback(line) for line in lines),
    )


def _aliases(header: str) -> str:
    _, _, after = header.partition("input_output_alias={")
    return after.partition("entry_computation_layout")[0]


def _only_moves(lines: Iterable[HloLine]) -> bool:
    opcodes = {line.opcode for line in lines}
    return bool(opcodes & MOVES) and opcodes <= MOVES | VIEWS


def _moves(line: HloLine, pure: set[str]) -> bool:
    """Whether an instruction only moves an array of two dimensions or more."""
    rank = len(line.arrays[0].sizes) if line.arrays else 0
    if rank < 2 and not (line.opcode == "fusion" and len(line.arrays) > 1):
        return False
    return line.opcode in MOVES or line.called in pure


def _bodies(computations: Mapping[str, Mapping[str, HloLine]]) -> set[str]:
    """Return the computations that loops repeat."""
    found = set()
    for inside in computations.values():
        for line in inside.values():
            if line.opcode == "while" and (body := re.search(r"body=%?([\w.$-]+)", line.arguments)):
                found.add(body[1])
    return found & set(computations)


def _is_border(line: HloLine, main: Mapping[str, HloLine], donated: set[int]) -> bool:
    """Whether a move reads an argument that is donated, or writes a result or a loop's start."""
    readers = [one for one in main.values() if line.name in one.operands]
    if any(one.opcode == "while" or one.is_root or _leads_out(one, main) for one in readers):
        return True
    return any(_is_donated(operand, main, donated) for operand in line.operands)


def _leads_out(one: HloLine, main: Mapping[str, HloLine]) -> bool:
    """Whether a tuple or a view is a result, or what a loop starts from."""
    if one.opcode not in ("tuple", "bitcast"):
        return False
    readers = [other for other in main.values() if one.name in other.operands]
    return one.is_root or any(
        other.opcode == "while" or other.is_root or _leads_out(other, main) for other in readers
    )


def _is_donated(name: str, main: Mapping[str, HloLine], donated: set[int]) -> bool:
    line = main.get(name)
    if line is None:
        return False
    if line.opcode == "parameter":
        number = line.arguments.partition(")")[0]
        return number.isdigit() and int(number) in donated
    if line.opcode in ("bitcast", "get-tuple-element"):
        return any(_is_donated(one, main, donated) for one in line.operands)
    # What a loop leaves is turned over on its way out.
    return line.opcode == "while"


def _calls(lines: Iterable[HloLine]) -> Iterator[str]:
    """Yield the calls of cuDNN and of other libraries, each with the type of its result."""
    for line in lines:
        if line.opcode == "custom-call" and line.target is not None and line.arrays:
            yield f"{line.target.lstrip('_')} {line.arrays[0].dtype}"


def _is_callback(line: HloLine) -> bool:
    return line.opcode in HOST or CALLBACK in (line.target or "")


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
