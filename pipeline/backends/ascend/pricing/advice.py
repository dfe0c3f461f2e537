"""Recommendations: changes of a step's options that make it faster, each with its price."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from pipeline.backends.ascend.chip.options import ExecutionConfig, OptionError
from pipeline.backends.ascend.pricing.pricing import Pricing
from pipeline.backends.ascend.report.report import Recommendation

LONG_SINK = 1000
"""Steps of a recommended sink."""
BUCKETS = (2, 3, 4)
"""Numbers of all-reduces to try."""
FIRST_SHARES = (0.02, 0.05, 0.1, 0.25)
"""Shares of the gradients in a separate all-reduce for the network's first layers. These gradients
are ready last, so the backward pass doesn't overlap their all-reduce."""

Retrace = Callable[[int], Pricing]
"""A function that traces the same step with another batch size."""
Candidate = tuple[str, str, str, Pricing, ExecutionConfig]
"""Kind, description and override of a change, and the pricing and options that it leads to."""
Variant = tuple[str, str, str, dict[str, Any]]
"""Kind, description and override of a change, and the changed options."""


def advise(
    pricing: Pricing, config: ExecutionConfig, retrace: Retrace | None = None
) -> tuple[Recommendation, ...]:
    """Return the best change of each kind, by predicted gain, largest first.

    `retrace(batch_size)` traces the step with another batch size; None: no other size is tried.
    Changes that the device doesn't support, or doesn't have enough memory for, are skipped.
    """
    before = _compute_samples_per_s(pricing, config, pricing.make_timeline(config).step_us)
    candidates: list[Candidate] = [
        (kind, what, override, pricing, replace(config, **changes))
        for kind, what, override, changes in _list_variants(pricing, config)
    ]
    if retrace is not None:
        size = 2 * pricing.traced.batch_size
        unit = "batch" if config.devices == 1 else "device"
        what = f"{size} samples a {unit} instead of {size // 2}"
        override = f"train.batch_size={size * config.devices}"
        candidates.append(("batch", what, override, retrace(size), config))
    best: dict[str, Recommendation] = {}
    for kind, what, override, changed, options in candidates:
        step_us = _price_change(kind, changed, options)
        if step_us is None:
            continue
        after = _compute_samples_per_s(changed, options, step_us)
        gain = after / before - 1
        if kind not in best or gain > best[kind].gain:
            best[kind] = Recommendation(kind, what, override, step_us / 1e3, after, gain)
    return tuple(sorted(best.values(), key=lambda change: (-change.gain, change.kind)))


def _price_change(kind: str, pricing: Pricing, config: ExecutionConfig) -> float | None:
    """Return the microseconds of a changed step; None if the device can't run it."""
    try:
        changes_memory = kind in ("batch", "precision")
        if changes_memory and pricing.plan_memory(config).verdict == "out of memory":
            return None
        return pricing.make_timeline(config).step_us
    except OptionError:
        return None


def _compute_samples_per_s(pricing: Pricing, config: ExecutionConfig, step_us: float) -> float:
    return pricing.traced.batch_size * config.devices / step_us * 1e6


def _list_variants(pricing: Pricing, config: ExecutionConfig) -> Iterator[Variant]:
    """Yield the changes that keep the batch size."""
    if config.precision in ("O0", "O1", None):
        what = "float16 but for batch normalisation and the loss"
        yield "precision", what, "device.precision=O2", {"precision": "O2"}
    if config.precision in ("O0", "O1", "O2"):
        what = "float16 throughout, batch normalisation included"
        yield "precision", what, "device.precision=O3", {"precision": "O3"}
    if config.mode == "op_by_op":
        changes: dict[str, Any] = {"mode": "graph_sink", "data_sink": False}
        yield "sink", "one launch a step", "device.mode=graph_sink", changes
    if config.mode != "loop_sink" or config.sink_size < LONG_SINK:
        override = f"train.sink=true train.sink_size={LONG_SINK}"
        override += "" if config.mode == "loop_sink" else " device.mode=loop_sink"
        changes = {"mode": "loop_sink", "sink_size": LONG_SINK, "data_sink": True}
        yield "sink", f"a loop of {LONG_SINK:,} steps a launch", override, changes
    if config.devices > 1:
        yield from _list_bucket_variants(pricing, config)
    if config.host_workers is not None:
        for workers in (2 * config.host_workers, 4 * config.host_workers):
            what = f"{workers} processes preparing data instead of {config.host_workers}"
            yield "workers", what, f"device.host_workers={workers}", {"host_workers": workers}
    if not config.auto_tune:
        what = "tiles searched by AutoTune"
        # The best of all tilings is as good as the bank's, and advice must not write to a bank.
        changes = {"auto_tune": "exhaustive", "tune_bank": None}
        yield "auto_tune", what, "device.auto_tune=exhaustive", changes


def _list_bucket_variants(pricing: Pricing, config: ExecutionConfig) -> Iterator[Variant]:
    graph, _ = pricing.tasks(config)
    # The backward pass computes the gradients of the last parameters first.
    by_parameter = sorted(graph.gradients, key=itemgetter(2))[::-1]
    for points in list_split_points([nbytes for _, nbytes, _ in by_parameter]):
        if points != config.fusion:
            what = f"gradients in {len(points) + 1} all-reduces"
            override = f"device.all_reduce_fusion={list(points)}".replace(" ", "")
            yield "buckets", what, override, {"fusion": points}


def list_split_points(sizes: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return variants of the points at which gradients are split into all-reduces.

    `sizes` are the bytes of the gradients, in the order of the parameters. Variants are two to four
    all-reduces of about equal bytes, and two all-reduces of which one is small, for the network's
    first layers. A point is the last parameter of a segment, as in `all_reduce_fusion_config`.
    """
    shares = [tuple(part / count for part in range(1, count)) for count in BUCKETS]
    shares += [(share,) for share in FIRST_SHARES]
    if not sizes:
        return ()
    running = np.cumsum(sizes)
    variants = []
    for variant in shares:
        ends = {int(np.abs(running - share * running[-1]).argmin()) for share in variant}
        points = tuple(sorted(end for end in ends if end < len(sizes) - 1))
        if points and points not in variants:
            variants.append(points)
    return tuple(variants)
