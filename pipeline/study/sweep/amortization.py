"""A curve of step time against steps per launch, as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.svg_page import drawing, line, page, text, ticks

WIDTH, HEIGHT = 1056.0, 420.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 8.0, 26.0, 52.0
INSET = 48.0
GRID, AXIS, CURVE = "#e3e6e5", "#9aa4aa", "#2b5c8f"

Point = tuple[int, float]


def write_amortisation(
    points: Sequence[Point], path: Path, *, title: str = "What longer sinks buy"
) -> None:
    """Write modelled steps in ms, by sink size, as an HTML page with one drawing.

    Raises:
        ValueError: no point, a sink of no step, or a time that is not above zero and finite.
    """
    if not points:
        raise ValueError("no sink size to draw")
    for size, ms in points:
        if size < 1 or not (math.isfinite(ms) and ms > 0):
            raise ValueError(f"sink of {size} steps at {ms} ms: both should be above zero")
    write_whole(path, amortisation(sorted(points), title))


def amortisation(points: Sequence[Point], title: str) -> str:
    """Return the page's text; points are sorted by sink size."""
    (first, first_ms), (last, last_ms) = points[0], points[-1]
    words = (
        f"A step takes {first_ms:.3g} ms in sinks of {first:,} and {last_ms:.3g} ms in sinks of "
        f"{last:,}: {first_ms / last_ms:.2f} times as fast."
    )
    return page(
        title,
        (
            f"<h1>{escape(title)}</h1>",
            f"<p>{escape(words)}</p>",
            "<h2>Milliseconds a step, by steps per launch</h2>",
            drawing(WIDTH, HEIGHT, "Time of a step against sink size", tuple(_marks(points))),
            "<footer>All times are modelled, none was measured on a device.</footer>",
        ),
    )


def _marks(points: Sequence[Point]) -> Iterator[str]:
    most = max(ms for _, ms in points) * 1.08
    low, high = math.log10(points[0][0]), math.log10(points[-1][0])
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(size: float, ms: float) -> tuple[float, float]:
        along = (math.log10(size) - low) / (high - low) if high > low else 0.5
        return LEFT + INSET + along * (wide - 2 * INSET), TOP + (1 - ms / most) * tall

    floor = TOP + tall
    for ms in ticks(most, 6):
        _, y = place(points[0][0], ms)
        yield line(LEFT, y, WIDTH - RIGHT, y, GRID)
        yield text(LEFT - 12, y + 4, f"{ms:g}", anchor="end", quiet=True)
    yield line(LEFT, floor, WIDTH - RIGHT, floor, AXIS)
    spots = [place(size, ms) for size, ms in points]
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in spots)
    yield f'<polyline points="{path}" fill="none" stroke="{CURVE}" stroke-width="2.5"/>'
    for (size, ms), (x, y) in zip(points, spots, strict=True):
        yield line(x, floor, x, floor + 5, AXIS)
        yield text(x, floor + 22, f"{size:,}", anchor="middle", size=13)
        yield _dot(x, y, f"sink of {size}: {ms:.3f} ms")
        yield text(x + 6, y - 10, f"{ms:.3g}", size=13)
    yield text(LEFT + wide / 2, HEIGHT - 8, "steps per launch", anchor="middle", quiet=True)


def _dot(x: float, y: float, tip: str) -> str:
    place = f'cx="{x:.2f}" cy="{y:.2f}" r="5"'
    return f'<circle {place} fill="{CURVE}"><title>{escape(tip)}</title></circle>'
