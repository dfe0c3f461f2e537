"""Profiles as a table for a terminal: a measured profile beside a modelled one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.core.files.value_text import bytes_text
from pipeline.inspect.profiler.step_profile import StepProfile, StepVerdict

ROWS = 12
NAME_WIDTH = 34
"""Width, in characters, of the column of names."""
KILO = 1e3
GIGA = 1e9


def profile_table(
    profiles: Sequence[StepProfile], verdict: StepVerdict, rows: int | None = ROWS
) -> str:
    """Return profiles and verdict as text, with at most `rows` layers and operators; None: all."""
    lines: list[str] = []
    for profile in profiles:
        lines += [*_format_head(profile), ""]
    lines += [*_format_phases(profiles), "", *_format_layers(profiles, rows), ""]
    for profile in profiles:
        lines += [*_format_operators(profile, rows), ""] if profile.operators else []
    return "\n".join([*lines, f"Verdict: {verdict}"])


def _format_head(profile: StepProfile) -> Iterator[str]:
    is_measured = profile.source == "measured"
    steps = f"{profile.steps} traced steps" if is_measured else "MODELLED, not measured"
    yield f"{profile.recipe} on {profile.device}, batch {profile.batch_size:,}: {steps}"
    traced_ms = profile.traced_step_ms
    traced = "" if traced_ms is None else f" ({_format_ms(traced_ms)} traced)"
    yield f"  step       {_format_ms(profile.step_ms)} ms{traced}{_format_rates(profile)}"
    if profile.iteration is not None:
        times = profile.iteration
        yield (
            f"  iteration  {_format_ms(times.iteration)} ms = data tail "
            f"{_format_ms(times.data_tail)} + forward and backward {_format_ms(times.fp_bp)} + "
            f"update tail {_format_ms(times.update_tail)}"
        )
    if profile.host is not None:
        host = profile.host
        yield (
            f"  host       {_format_ms(host.device)} ms in the program, {_format_ms(host.wait)} "
            f"waiting for data, {_format_ms(host.between)} between dispatches "
            f"({host.share(host.between):.1%}); "
            f"{host.dispatches:,} dispatches of {host.steps:,} untraced steps"
        )
        yield from _format_preparation(profile.feed)
    if profile.shares:
        shares = (f"{name} {share:.1%}" for name, share in profile.shares.items() if share)
        yield f"  shares     {', '.join(shares)}"
    if profile.memory:
        cells = (f"{name} {bytes_text(count)}" for name, count in profile.memory.items())
        yield f"  memory     {', '.join(cells)}"
    if profile.coverage is not None:
        coverage = profile.coverage
        yield (
            f"  coverage   {coverage.named:.1%} of the operators' time has a layer or a phase; "
            f"parts are {coverage.parts_of_step:.1%} of the traced steps; "
            f"{coverage.overlap:.2f} operators at once"
        )


def _format_rates(profile: StepProfile) -> str:
    peaks = profile.peaks
    if peaks is None or not profile.step_ms:
        return ""
    seconds = profile.step_ms / KILO
    flops = profile.flops / seconds
    nbytes = profile.nbytes / seconds
    return (
        f"; {flops / GIGA:,.1f} GFLOP/s, {flops / peaks.flops:.0%} of {peaks.flops / GIGA:,.0f}; "
        f"{nbytes / GIGA:,.1f} GB/s, {nbytes / peaks.bytes_per_s:.0%} of "
        f"{peaks.bytes_per_s / GIGA:,.1f}"
    )


def _format_preparation(feed: Mapping[str, object]) -> Iterator[str]:
    """Yield the time that a streaming loader takes to prepare each column of a batch."""
    ms_by_column = feed.get("prepare_ms_per_step")
    if feed.get("kind") != "stream" or not isinstance(ms_by_column, Mapping) or not ms_by_column:
        return
    ordered = sorted(ms_by_column.items(), key=lambda item: -item[1])
    slowest, _ = ordered[0]
    costs = ", ".join(f"{name} {_format_ms(ms)}" for name, ms in ordered)
    yield f"  data       ms a step to prepare, all threads: {costs}; slowest {slowest}"


def _format_phases(profiles: Sequence[StepProfile]) -> Iterator[str]:
    yield _format_row("phase", [head for profile in profiles for head in _name_columns(profile)])
    for name in dict.fromkeys(phase.phase for profile in profiles for phase in profile.phases):
        cells = []
        for profile in profiles:
            match = next((phase for phase in profile.phases if phase.phase == name), None)
            cells += ["", ""] if match is None else [_format_ms(match.ms), f"{match.share:.1%}"]
        yield _format_row(name, cells)


def _name_columns(profile: StepProfile) -> tuple[str, str]:
    return ("ms" if profile.source == "measured" else "modelled ms"), "share"


def _format_layers(profiles: Sequence[StepProfile], rows: int | None) -> Iterator[str]:
    first = profiles[0]
    heads = ["forward", "backward", "ms", "share", "GFLOP/s", "GB/s"]
    other_profiles = profiles[1:]
    heads += [head for profile in other_profiles for head in _name_columns(profile)]
    yield _format_row("layer", heads)
    for layer in first.layers[:rows]:
        cells = [_format_ms(layer.forward_ms), _format_ms(layer.backward_ms), _format_ms(layer.ms)]
        rates = ["", ""]
        if layer.ms:
            seconds = layer.ms / KILO
            rates = [f"{amount / seconds / GIGA:,.1f}" for amount in (layer.flops, layer.nbytes)]
        cells += [f"{layer.share:.1%}", *rates]
        for other in other_profiles:
            match = next((row for row in other.layers if row.layer == layer.layer), None)
            cells += ["", ""] if match is None else [_format_ms(match.ms), f"{match.share:.1%}"]
        yield _format_row(layer.layer, cells)
    hidden_layers = first.layers[rows:] if rows is not None else ()
    if hidden_layers:
        ms = sum(layer.ms for layer in hidden_layers)
        share = sum(layer.share for layer in hidden_layers)
        yield _format_row(f"{len(hidden_layers)} others", ["", "", _format_ms(ms), f"{share:.1%}"])


def _format_operators(profile: StepProfile, rows: int | None) -> Iterator[str]:
    heads = ["ms", "share", "calls", "of FLOP/s", "of GB/s", "phase"]
    yield _format_row("operator", heads) + "  layer, kind"
    for operator in profile.operators[:rows]:
        cells = [_format_ms(operator.ms), f"{operator.share:.1%}", f"{operator.calls:g}"]
        cells += [
            "" if share is None else f"{share:.0%}"
            for share in (operator.of_flops, operator.of_bytes)
        ]
        place = f"{operator.layer}, {operator.kind}" if operator.layer else operator.kind
        yield f"{_format_row(operator.name, [*cells, operator.phase])}  {place}"


def _format_row(name: str, cells: Sequence[str]) -> str:
    name = name if len(name) <= NAME_WIDTH else f"...{name[3 - NAME_WIDTH :]}"
    return "  " + (f"{name:<{NAME_WIDTH}}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()


def _format_ms(ms: float) -> str:
    return f"{ms:,.4f}" if ms < 1 else f"{ms:,.3f}" if ms < 100 else f"{ms:,.1f}"
