"""Self-contained HTML pages with SVG drawings: no script, no other file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fbfbf9; color: #1d2429; font: 15px/1.5 "Inter", "Segoe UI",
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 32px 56px; }
h1 { font-size: 24px; line-height: 1.25; font-weight: 650; margin: 0 0 4px; }
h2 { font-size: 13px; font-weight: 650; margin: 36px 0 10px; color: #4c575f; }
p { margin: 0; color: #4c575f; max-width: 76ch; }
.drawing { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.drawing svg { min-width: 720px; }
svg text { font-family: inherit; fill: #1d2429; }
svg .quiet { fill: #5d6971; }
svg .light { fill: #ffffff; pointer-events: none; }
dl { display: flex; flex-wrap: wrap; gap: 14px 44px; margin: 22px 0 0; }
dt { font-size: 12.5px; color: #5d6971; }
dd { margin: 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 12px 0 0; padding: 0;
  list-style: none; font-size: 13.5px; color: #38434a; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 7px;
  border-radius: 2px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: right; font-weight: 600; font-size: 12.5px; color: #5d6971; padding: 4px 12px;
  border-bottom: 1px solid #c9cfd2; }
td { text-align: right; padding: 5px 12px; border-bottom: 1px solid #e6e8e7;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; padding-left: 0; overflow-wrap: anywhere; }
th:last-child, td:last-child { padding-right: 0; }
footer { margin-top: 32px; font-size: 13px; color: #5d6971; }
""".strip()


def page(title: str, body: Sequence[str]) -> str:
    """Return a whole HTML document; `body` is markup already escaped."""
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body><main>",
            *body,
            "</main></body>",
            "</html>",
            "",
        )
    )


def drawing(width: float, height: float, label: str, marks: Sequence[str]) -> str:
    """Return an SVG that scrolls on a narrow screen; `label` describes it to a screen reader."""
    head = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
    return "\n".join(('<div class="drawing">', head, *marks, "</svg>", "</div>"))


def rectangle(x: float, y: float, width: float, height: float, colour: str, tip: str = "") -> str:
    """Return a filled rectangle, with the text that a pointer over it shows."""
    shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    if not tip:
        return f'{shape} fill="{colour}"/>'
    return f'{shape} fill="{colour}"><title>{escape(tip)}</title></rect>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    """Return a straight line."""
    ends = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 12,
    anchor: str = "start",
    quiet: bool = False,
    light: bool = False,
) -> str:
    """Return text whose baseline is at y; `light` for a dark ground."""
    kind = ' class="quiet"' if quiet else ' class="light"' if light else ""
    place = f'x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}"'
    return f"<text {place}{kind}>{escape(words)}</text>"


def ticks(end: float, most: int = 8) -> tuple[float, ...]:
    """Return round values from 0 to at most `end`, no more than `most` steps."""
    if end <= 0:
        return (0.0,)
    rough = end / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * (1 - 1e-9))
    return tuple(number * step for number in range(math.floor(end / step * (1 + 1e-9)) + 1))
