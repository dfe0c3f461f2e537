"""Bytes that a compiled training step moves, beside the least that the step needs.

    python -m benchmarks.bytes_moved --networks resnet18,lenet5 --precisions float32,bf16

Nothing is timed and no data is read: each recipe is compiled with synthetic samples.

*Moved* are the bytes of operands and results of every operation in the optimized program, each read
or written once: a loop counts as often as it runs, of an array that an operation slices only the
slices. Of a conditional the branch that moves most counts, but of batch norm the branch that moves
least, since means far from zero are seldom. Caches that keep an array between two operations
aren't modelled, so memory sees fewer bytes. `XLA` is the compiler's own `bytes accessed` of the
whole program, which counts a loop once and a call of oneDNN by its operands.

*Least* is what `benchmarks/least_bytes.py` counts.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from benchmarks.least_bytes import count_least_bytes
from benchmarks.measure import add_save, heading, publish, table
from pipeline import load_recipe
from pipeline.backends.graph.hlo_program import (
    FREE,
    MOVES,
    ONEDNN,
    PRODUCTS,
    HloLine,
    HloText,
    read_hlo_text,
)
from pipeline.backends.xla import XlaExecutable
from pipeline.core.reporter import Reporter
from pipeline.models.modules.name_stack import DATA, UPDATE
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.lower import lower

PACKAGES = ("jax", "jaxlib")
CIFAR = ("dataset.name=synthetic", "+dataset.like=cifar10")
NETWORKS: Mapping[str, tuple[str, ...]] = {
    "lenet5": ("lenet5_mnist", "dataset.name=synthetic", "+dataset.like=mnist"),
    "mlp": ("mlp_mnist", "dataset.name=synthetic", "+dataset.like=mnist"),
    "cnn6": ("cnn6_cifar10_speedrun", *CIFAR),
    "resnet18": ("resnet18_cifar10", *CIFAR),
    "resnet50": ("resnet50_cifar10", *CIFAR),
    "gpt_text": ("gpt_text",),
}
"""Recipe and overrides."""
PRECISIONS = {"float32": "O0", "bf16": "bf16"}

PRODUCT = "products"
PATCHES = "patches, tiles and transforms of convolutions"
CONVERSIONS = "conversions of types"
COPIES = "copies and transposes"
OTHER_MOVES = "pads, slices and other moves"
STATISTICS = "batch norm: sums"
NORMALISING = "batch norm: element by element"
SUMS = "other sums and maxima"
ELEMENTS = "other element by element"
SAMPLES = "samples of the batch"
UPDATES = "update"
CHUNKS = "arrays within one chunk"

_BODY = re.compile(r"body=%?([\w.$-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLEE = re.compile(r"to_apply=%?([\w.$-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=([^,\s}]*)")
_NUMBER = re.compile(r"\s*(\d+)\)")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_LAYER = re.compile(r"(conv|dense|batch_norm)\w*_\d+")
_TO_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_VIEWS = frozenset({"bitcast", "get-tuple-element"})
Inside = Literal["", "loop", "call"]


@dataclass(frozen=True)
class Figures:
    """Bytes of a step."""

    moved: Mapping[str, int]
    """By kind of operation."""
    least: Mapping[str, int]
    """By reason."""
    xla: float
    """The compiler's figure of the whole program."""

    @property
    def ratio(self) -> float:
        """Bytes moved for each byte that is needed."""
        return sum(self.moved.values()) / sum(self.least.values())


def count_moved_bytes(text: str) -> Counter[str]:
    """Return the bytes that an iteration of the program's largest loop moves, by kind.

    The loop is one whose length the compiler doesn't know, such as the loop over steps; a program
    without one counts as a whole.
    """
    program = read_hlo_text(text)
    loops = [
        _count_computation(program, body[1])
        for line in program.parse_lines()
        if line.opcode == "while" and not _TRIPS.search(line.arguments)
        if (body := _BODY.search(line.arguments))
    ]
    return max(loops or [_count_computation(program, program.entry)], key=lambda loop: loop.total())


def _count_computation(program: HloText, name: str, inside: Inside = "") -> Counter[str]:
    """Return the bytes of a computation and all that it calls, by kind.

    `inside` is whether it is the body of a loop over chunks, or called by one.
    """
    total = Counter[str]()
    body = program.computations.get(name, {})
    for line in body.values():
        if line.opcode in FREE:
            continue
        if line.opcode == "while" and (loop := _BODY.search(line.arguments)):
            trips = _TRIPS.search(line.arguments)
            inner = _count_computation(program, loop[1], "loop")
            total.update({kind: n * int(trips[1] if trips else 1) for kind, n in inner.items()})
        elif line.opcode == "call" and (callee := _CALLEE.search(line.arguments)):
            total.update(_count_computation(program, callee[1], "call" if inside else ""))
        elif line.opcode == "conditional":
            names = ",".join(map("".join, _BRANCHES.findall(line.arguments)))
            branches = [
                _count_computation(program, name.strip().lstrip("%"), inside)
                for name in names.split(",")
            ]
            choose = min if _find_layer(line) == "batch_norm" else max
            taken: Counter[str] = choose(branches, key=lambda branch: branch.total())
            total.update(taken)
        else:
            called = program.computations.get(line.called_computation or "", {})
            passing, staying = _count_line(line, body, called, inside)
            total[_name_kind(line, called)] += passing
            total[CHUNKS] += staying
    return total


def _count_line(
    line: HloLine, body: Mapping[str, HloLine], called: Mapping[str, HloLine], inside: Inside
) -> tuple[int, int]:
    """Return the bytes that an operation reads and writes, and of these apart the arrays that don't
    outlive an iteration of a loop over chunks. `called` is a fusion's computation."""
    operands = [body[name] for name in line.operands if name in body]
    written = line.nbytes
    if line.opcode in _TO_SLICES:
        read = [line.nbytes, *(0 for _ in operands[1:])]
    elif line.opcode == "dynamic-update-slice":
        written = operands[1].nbytes
        read = [0, written, *(0 for _ in operands[2:])]
    elif called:
        read = _count_operands(operands, called)
        written = sum(_count_written(root, called) for root in called.values() if root.is_root)
    else:
        names = [operand.name for operand in operands]
        # An operand that is listed twice is read once.
        read = [x.nbytes * (x.name not in names[:i]) for i, x in enumerate(operands)]
    staying = sum(
        nbytes
        for operand, nbytes in zip(operands, read, strict=True)
        if _is_local(operand, body, inside)
    )
    results = {name for root in body.values() if root.is_root for name in root.operands}
    if inside == "call" or (inside == "loop" and line.name not in results and not line.is_root):
        staying += written
    return sum(read) + written - staying, staying


def _is_local(operand: HloLine, body: Mapping[str, HloLine], inside: Inside) -> bool:
    """Return whether an operand is computed in the same iteration of a loop over chunks."""
    while operand.opcode == "bitcast" and operand.operands[0] in body:
        operand = body[operand.operands[0]]
    return inside == "call" or (inside == "loop" and operand.opcode not in FREE)


def _count_operands(operands: Sequence[HloLine], called: Mapping[str, HloLine]) -> list[int]:
    """Return the bytes that a fusion reads of each operand."""
    users: dict[str, list[HloLine]] = {}
    for inner in called.values():
        for name in inner.operands:
            users.setdefault(name, []).append(inner)
    parameters = {
        int(match[1]): inner
        for inner in called.values()
        if inner.opcode == "parameter" and (match := _NUMBER.match(inner.arguments))
    }
    return [
        min(operand.nbytes, _count_read(parameters[i], users, operand.nbytes))
        for i, operand in enumerate(operands)
    ]


def _count_read(value: HloLine, users: Mapping[str, list[HloLine]], nbytes: int) -> int:
    """Return the bytes that a fusion reads of an operand of `nbytes`."""
    read = 0
    for user in users.get(value.name, ()):
        is_first = user.operands[:1] == (value.name,)
        if user.opcode in _VIEWS:
            read += _count_read(user, users, nbytes)
        elif user.opcode in _TO_SLICES and is_first:
            read += user.nbytes
        elif not (user.opcode == "dynamic-update-slice" and is_first):
            return nbytes
    return read


def _count_written(root: HloLine, called: Mapping[str, HloLine]) -> int:
    """Return the bytes that a fusion writes as its result: of an updated array the update."""
    if root.opcode == "tuple":
        return sum(_count_written(called[name], called) for name in root.operands)
    if root.opcode in _VIEWS and root.operands[0] in called:
        return _count_written(called[root.operands[0]], called)
    if root.opcode == "dynamic-update-slice":
        return called[root.operands[1]].nbytes
    return root.nbytes


def _find_scope(line: HloLine) -> str:
    return match[1] if (match := _SCOPE.search(line.arguments)) else ""


def _find_layer(line: HloLine) -> str:
    """Return the kind of the innermost layer of an operation: conv, dense, batch_norm or ""."""
    layers: list[str] = _LAYER.findall(_find_scope(line))
    return layers[-1] if layers else ""


def _name_kind(line: HloLine, called: Mapping[str, HloLine]) -> str:
    opcodes = {inner.opcode for inner in called.values()} or {line.opcode}
    scope = _find_scope(line)
    if UPDATE in scope:
        return UPDATES
    if DATA in scope:
        return SAMPLES
    if opcodes & PRODUCTS or ONEDNN in line.arguments or line.opcode == "custom-call":
        return PRODUCT
    layer = _find_layer(line)
    if "convert" in opcodes and opcodes <= MOVES:
        return CONVERSIONS
    if opcodes <= FREE | {"copy", "transpose", "reshape"}:
        return COPIES
    if layer == "conv":
        return PATCHES
    if opcodes <= MOVES:
        return OTHER_MOVES
    is_sum = any(opcode.startswith(("reduce", "select-and")) for opcode in opcodes)
    if layer == "batch_norm":
        return STATISTICS if is_sum else NORMALISING
    return SUMS if is_sum else ELEMENTS


def measure(network: str, precision: str) -> Figures:
    """Compile a network's recipe and count."""
    name, *overrides = NETWORKS[network]
    recipe = load_recipe(name, [*overrides, f"train.precision={PRECISIONS[precision]}"])
    with open(os.devnull, "w", encoding="utf-8") as null_file:
        reporter = Reporter(None, Console(file=null_file))
        backend = recipe.device.open(recipe.parallel)
        dataset = load_data(recipe, reporter)
        built = build(recipe, dataset, reporter)
        least = count_least_bytes(built, dataset, recipe.train.batch_size)
        built = lower(recipe, dataset, built, backend, None, reporter)
        executable = compile_programs(recipe, dataset, built, backend, reporter)
    assert isinstance(executable, XlaExecutable)
    program: Any = executable.programs.train
    xla_bytes = program.cost_analysis().get("bytes accessed", 0.0)
    return Figures(count_moved_bytes(executable.program_text), least, xla_bytes)


def format_report(figures: Mapping[tuple[str, str], Figures], command: str) -> str:
    """Return a Markdown table by network, and one by kind of operation."""
    rows = []
    for (network, precision), figure in figures.items():
        moved, least = sum(figure.moved.values()), sum(figure.least.values())
        within = figure.moved.get(CHUNKS, 0)
        bare = f"{(moved - within) / least:.1f}x"
        counts = [f"{n / 1e6:,.1f}" for n in (moved, within, figure.xla, least)]
        rows.append([network, precision, *counts, f"{figure.ratio:.1f}x", bare])
    columns = ["moved", "of these in chunks", "XLA", "least", "moved / least", "without chunks"]
    totals = Counter[str]()
    for figure in figures.values():
        totals.update(figure.moved)
    by_kind = [
        [kind, *(f"{figure.moved.get(kind, 0) / 1e6:,.1f}" for figure in figures.values())]
        for kind, _ in totals.most_common()
    ]
    names = [f"{network}, {precision}" for network, precision in figures]
    reasons = dict.fromkeys(reason for figure in figures.values() for reason in figure.least)
    by_reason = [
        [reason, *(f"{figure.least.get(reason, 0) / 1e6:,.1f}" for figure in figures.values())]
        for reason in reasons
    ]
    return "\n".join(
        [
            heading("Bytes that a step moves", command, PACKAGES),
            "MB a step; `benchmarks/bytes_moved.py` has the rule. Arrays within one chunk live\n"
            "for an iteration of a loop whose arrays are made for the cache.\n",
            table(["network", "type", *columns], rows),
            "Moved, by kind of operation:\n",
            table(["MB", *names], by_kind),
            "Least, by reason:\n",
            table(["MB", *names], by_reason),
        ]
    )


def main() -> None:
    """Count and print Markdown tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    add_save(parser, "bytes_moved.md")
    args = parser.parse_args()
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
    figures = {}
    for network in args.networks.split(","):
        for precision in args.precisions.split(","):
            figures[network, precision] = figure = measure(network, precision)
            print(f"{network}, {precision}: {figure.ratio:.2f}x", file=sys.stderr, flush=True)
            if args.save:
                # On a busy machine ResNet-50 takes minutes to compile: what is counted stays.
                args.save.write_text(_report_counted(figures), encoding="utf-8")
    publish(_report_counted(figures), args.save)


def _report_counted(figures: Mapping[tuple[str, str], Figures]) -> str:
    """Return the tables of what is counted, with the command that counts it."""
    networks, precisions = (",".join(dict.fromkeys(names)) for names in zip(*figures, strict=True))
    options = f"--networks {networks} --precisions {precisions}"
    return format_report(figures, f"python -m benchmarks.bytes_moved {options}")


if __name__ == "__main__":
    main()
