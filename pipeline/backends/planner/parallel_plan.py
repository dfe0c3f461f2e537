"""A plan: the mesh, what cuts parameters, layers' outputs and batches, and what that costs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.backends.planner.blocks import Region, StepBlocks
from pipeline.backends.planner.decisions import Decided
from pipeline.backends.planner.layouts import Layout, Mesh, seen_by
from pipeline.core.files.value_text import join_first
from pipeline.models.layers.path_patterns import covers
from pipeline.training.parallel.parallel_spec import AXES

Axes = tuple[tuple[str, ...], ...]
"""For each dimension of an array the axes of the mesh that cut it, the outermost first."""


@dataclass(frozen=True, slots=True)
class CutRule:
    """Axes for what a pattern covers, as in `parallel.specs` and `parallel.constraints`."""

    pattern: str
    axes: Axes


@dataclass(frozen=True)
class ParallelPlan:
    """A way to compute a step on several devices, and its modelled price.

    `specs` cut parameters, others are whole; `constraints` cut the outputs of layers, each rule
    of the layers it matches and of none below them. `batch` are the axes that cut the samples
    of most of the step; the batch's arrays are cut by them.
    """

    mesh: Mesh
    batch: tuple[str, ...]
    specs: tuple[CutRule, ...] = ()
    constraints: tuple[CutRule, ...] = ()
    step_ms: float = 0.0
    memory_bytes: float = 0.0
    collective_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes a step in collectives by kind, each as `layouts.Collective` counts them."""

    @property
    def is_data_parallel(self) -> bool:
        """Whether every device holds all parameters and computes a part of the batch."""
        return not self.specs and not self.constraints and bool(self.batch)

    @property
    def strategy(self) -> str:
        """The plan in a few words: what is cut along which axis."""
        if self.mesh.devices == 1:
            return "one device"
        if self.is_data_parallel:
            return "data parallel"
        words = [f"batch by {'+'.join(self.batch)}" if self.batch else "batch whole"]
        if not self.specs:
            return f"{words[0]}, parameters whole"
        # Rules of weights say more than rules of biases and scales, which follow.
        named = sorted(self.specs, key=lambda rule: -len(rule.axes))
        words += [f"{rule.pattern} {axes_text(rule.axes)}" for rule in named]
        return join_first(words, 3)


def axes_text(axes: Axes) -> str:
    """Axes as a recipe writes them: [null, model]."""
    return f"[{', '.join('+'.join(names) or 'null' for names in axes)}]"


def plan_of(
    blocks: StepBlocks,
    mesh: Mesh,
    decided: Decided,
    step_us: float,
    memory_bytes: float,
    collective_bytes: Mapping[str, float],
) -> ParallelPlan:
    """The plan of what was decided about the blocks of a step."""
    cuts = dict(_parameter_cuts(blocks, decided))
    outputs = {
        output.layer: axes_of(
            seen_by(decided.regions[output.region], output.groups), len(output.groups)
        )
        for output in blocks.outputs
    }
    largest = largest_region(blocks)
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    data_parallel = not any(map(any, cuts.values())) and all(
        all(cut[axis] == use.operator.samples for axis in axes)
        for use, cut in zip(blocks.operators, decided.cuts, strict=True)
    )
    return ParallelPlan(
        mesh=mesh,
        batch=axes_of_samples(blocks.regions[largest], decided.regions[largest]),
        specs=tuple(rules(cuts, only_cut=True)),
        constraints=() if data_parallel else tuple(rules(outputs)),
        step_ms=step_us / 1e3,
        memory_bytes=memory_bytes,
        collective_bytes=dict(collective_bytes),
    )


def axes_of(layout: Layout, rank: int) -> Axes:
    """The axes that cut each dimension of an array, from its layout."""
    return tuple(
        tuple(AXES[axis] for axis, at in enumerate(layout) if at == dim) for dim in range(rank)
    )


def _parameter_cuts(blocks: StepBlocks, decided: Decided) -> Iterator[tuple[str, Axes]]:
    for use, cut in zip(blocks.operators, decided.cuts, strict=True):
        weight = blocks.weights[use.weight]
        layout = decided.shared.get(use.weight)
        if layout is None:
            layout = tuple(None if d is None else use.operator.dims[d].weight for d in cut)
        yield weight.path, axes_of(layout, len(weight.shape))
    for parameter in blocks.parameters:
        layout = seen_by(decided.regions[parameter.region], parameter.groups)
        yield parameter.path, axes_of(layout, len(parameter.shape))


def largest_region(blocks: StepBlocks) -> int:
    """The number of the region with most activations."""

    def saved_bytes(number: int) -> int:
        return sum(extent.nbytes for extent in blocks.regions[number].saved)

    return max(range(len(blocks.regions)), key=saved_bytes)


def axes_of_samples(region: Region, layout: Layout) -> tuple[str, ...]:
    """The axes that cut the samples of a region, from its layout."""
    if region.samples is None:
        return ()
    return tuple(AXES[axis] for axis, group in enumerate(layout) if group == region.samples)


def rules(cuts: Mapping[str, Axes], *, only_cut: bool = False) -> Iterator[CutRule]:
    """Rules that give each path its axes, few patterns for many paths of equal axes.

    A pattern covers a path or all below it, and the last rule that covers a path wins; so if a
    path has others below it with other axes, its rule comes before theirs. With `only_cut` arrays
    that are whole need no rule.
    """
    paths = {path: tuple(path.split("/")) for path in cuts}
    done: set[str] = set()
    general: list[CutRule] = []
    special: list[CutRule] = []
    for path, axes in cuts.items():
        if path in done or (only_cut and not any(axes)):
            continue
        for pattern in (*_patterns(path), path):
            covered = [other for other, parts in paths.items() if covers(pattern, parts)]
            if all(cuts[other] == axes for other in covered):
                done.update(covered)
                special.append(CutRule(pattern, axes))
                break
        else:
            done.add(path)
            general.append(CutRule(path, axes))
    yield from sorted(general, key=lambda rule: rule.pattern.count("/"))
    yield from special


def _patterns(path: str) -> Sequence[str]:
    """Patterns for a path and those that differ in numbers: in all of them, then in fewer."""
    numbers = list(re.finditer(r"\d+", path))
    patterns = []
    for count in range(len(numbers), 0, -1):
        text = path
        for number in reversed(numbers[:count]):
            text = f"{text[: number.start()]}*{text[number.end() :]}"
        patterns.append(text)
    return patterns
