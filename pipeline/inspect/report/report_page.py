"""The page of a report: one HTML file without scripts, links to other hosts or other files.

Names of classes, numbers and recipes come from data: each is escaped where it is written.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from pipeline.inspect.report.charts import CHART_STYLE, COLOURS, DARK_COLOURS
from pipeline.inspect.report.evaluated import ClassCounts

MAX_ROWS = 100
"""Classes in a table of the page; files have all."""
MAX_MATRIX = 30
"""Classes of a confusion matrix on the page."""
MAX_CONFUSIONS = 10
HEADS = {"f1": "F1", "mae": "MAE", "rmse": "RMSE", "r2": "R²"}
"""Heads of columns that are written in another way."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

STYLE = f"""
:root {{ color-scheme: light dark; {COLOURS} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK_COLOURS} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Arial, sans-serif; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 32px 20px 56px; }}
h1 {{ font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 16px; margin: 36px 0 10px; }}
p {{ margin: 0 0 10px; color: var(--quiet); max-width: 76ch; overflow-wrap: anywhere; }}
.figures {{ display: flex; flex-wrap: wrap; gap: 12px 36px; margin: 20px 0 0; }}
.figures dt {{ font-size: 13px; color: var(--quiet); }}
.figures dd {{ margin: 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr));
  gap: 14px; }}
.card {{ background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px; }}
.pairs {{ grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }}
svg {{ display: block; width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }}
table.wide {{ width: 100%; }}
th {{ text-align: right; font-weight: 600; font-size: 13px; color: var(--quiet);
  padding: 4px 10px; border-bottom: 1px solid var(--rule); }}
td {{ text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--rule); }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
td:first-child {{ overflow-wrap: anywhere; min-width: 5em; }}
.share {{ position: relative; }}
.share i {{ position: absolute; right: 6px; bottom: 2px; height: 2px; background: var(--first); }}
.matrix th, .matrix td {{ padding: 0; border: 1px solid var(--ground); text-align: center; }}
.matrix tbody td {{ width: 34px; min-width: 34px; height: 30px; font-size: 12px; }}
.matrix thead th {{ vertical-align: bottom; border: 0; padding-bottom: 6px; }}
.matrix thead span {{ writing-mode: vertical-rl; transform: rotate(180deg); max-height: 110px;
  overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }}
.matrix tbody th {{ text-align: right; padding-right: 8px; white-space: nowrap; border: 0;
  max-width: 130px; overflow: hidden; text-overflow: ellipsis;
  position: sticky; left: 0; background: var(--card); }}
.matrix .none {{ color: transparent; }}
.beside {{ display: flex; flex-wrap: wrap; gap: 14px; align-items: flex-start; }}
.beside > * {{ max-width: 100%; }}
.beside > :last-child {{ flex: 1 1 300px; }}
.samples {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(116px, 1fr));
  gap: 12px; }}
.samples figure {{ margin: 0; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; padding: 8px; font-size: 13px; line-height: 1.35; }}
.samples img {{ display: block; width: 100%; aspect-ratio: 1; object-fit: contain;
  image-rendering: pixelated; margin-bottom: 6px; background: var(--ground); }}
.samples b {{ color: var(--bad); font-weight: 600; overflow-wrap: anywhere; }}
.samples span {{ display: block; color: var(--quiet); overflow-wrap: anywhere; }}
@media (max-width: 480px) {{
  main {{ padding: 20px 14px 40px; }}
  th, td {{ padding: 4px 6px; }}
  .matrix tbody td {{ width: 27px; min-width: 27px; height: 27px; font-size: 11px; }}
}}
footer {{ margin-top: 36px; font-size: 13px; color: var(--quiet); overflow-wrap: anywhere; }}
{CHART_STYLE}
""".strip()


@dataclass(frozen=True)
class Mistake:
    """A sample that was predicted wrong: its picture as PNG, and what to say of it."""

    png: bytes
    predicted: str
    label: str
    index: int
    detail: str


GENERATOR = '<meta name="generator" content="recipe-pipeline report">'
"""The mark by which a report is known as one."""


def page(title: str, body: Sequence[str]) -> str:
    """A whole document; `body` is markup, escaped where it is not ours."""
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            GENERATOR,
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
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


def heading(title: str, about: str, figures: Mapping[str, str]) -> list[str]:
    """The title, a sentence, and the figures that matter most."""
    items = [f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in figures.items()]
    return [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(about)}</p>",
        f'<dl class="figures">{"".join(items)}</dl>',
    ]


def section(title: str, about: str, markup: Sequence[str]) -> list[str]:
    """A heading, a sentence and markup; nothing where there is no markup."""
    if not markup:
        return []
    said = [f"<p>{escape(about)}</p>"] if about else []
    return [f"<h2>{escape(title)}</h2>", *said, *markup]


def charts(drawn: Sequence[str | None], *, pairs: bool = False) -> list[str]:
    """Charts side by side where there is room; `pairs` leave room for two."""
    cards = [f'<div class="card">{chart}</div>' for chart in drawn if chart is not None]
    kind = "charts pairs" if pairs else "charts"
    return [f'<div class="{kind}">{"".join(cards)}</div>'] if cards else []


def beside(*blocks: Sequence[str]) -> list[str]:
    """Blocks beside each other where there is room."""
    drawn = ["\n".join(block) for block in blocks if block]
    return [f'<div class="beside">{"".join(drawn)}</div>'] if drawn else []


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows as a table; shares between 0 and 1 have four digits and a bar."""
    if not rows:
        return []
    head = "".join(f"<th>{escape(HEADS.get(key, key))}</th>" for key in rows[0])
    lines = [
        "<tr>" + "".join(_cell(key, value) for key, value in row.items()) + "</tr>"
        for row in rows[:MAX_ROWS]
    ]
    body = "".join(lines)
    return [
        '<div class="card scroll"><table class="wide">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    ]


def _cell(key: str, value: Any) -> str:
    if isinstance(value, float) and key in ("precision", "recall", "f1"):
        bar = f'<i style="width:{max(0.0, value) * 48:.0f}px"></i>'
        return f'<td class="share">{value:.4f}{bar}</td>'
    if isinstance(value, float):
        return f"<td>{value:.6g}</td>"
    if isinstance(value, int):
        return f"<td>{value:,}</td>"
    return f"<td>{escape(str(value))}</td>"


def matrix(counts: ClassCounts, names: Sequence[str]) -> list[str]:
    """The confusion matrix, each row shaded by its shares; none above `MAX_MATRIX` classes."""
    confusion = counts.confusion
    if confusion is None or len(names) > MAX_MATRIX:
        return []
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    head = "".join(f'<th title="{escape(n)}"><span>{escape(n)}</span></th>' for n in names)
    lines = []
    for row, name in enumerate(names):
        cells = "".join(
            _matrix_cell(int(confusion[row, column]), float(shares[row, column]), row == column)
            for column in range(len(names))
        )
        lines.append(f'<tr><th title="{escape(name)}">{escape(name)}</th>{cells}</tr>')
    return [
        '<div class="card scroll"><table class="matrix">'
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    ]


def _matrix_cell(count: int, share: float, right: bool) -> str:
    if not count:
        return '<td class="none">0</td>'
    # A single mistake of a thousand is still to be seen.
    strength = 0.12 + 0.88 * share
    colour = "35,100,170" if right else "200,80,31"
    ink = ";color:#fff" if strength > 0.55 else ""
    return f'<td style="background:rgba({colour},{strength:.2f}){ink}">{count:,}</td>'


def confusions(counts: ClassCounts, names: Sequence[str]) -> list[dict[str, Any]]:
    """The most frequent confusions, the share being of the samples of the true class."""
    if counts.confusion is None:
        return []
    wrong = counts.confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_CONFUSIONS]
    cells = [divmod(int(cell), len(names)) for cell in order]
    return [
        {
            "true": names[true],
            "predicted as": names[guess],
            "count": int(wrong[true, guess]),
            "of the class": f"{wrong[true, guess] / max(1, counts.actual[true]):.1%}",
        }
        for true, guess in cells
        if wrong[true, guess]
    ]


def samples(mistakes: Sequence[Mistake]) -> list[str]:
    """Pictures of samples with what was predicted, what is true and the sample's place."""
    figures = [
        "<figure>"
        f'<img alt="sample {mistake.index}" src="data:image/png;base64,'
        f'{base64.b64encode(mistake.png).decode("ascii")}">'
        f"<b>{escape(mistake.predicted)}</b>"
        f"<span>{escape(mistake.label)}</span><span>{escape(mistake.detail)}</span></figure>"
        for mistake in mistakes
    ]
    return [f'<div class="samples">{"".join(figures)}</div>'] if figures else []
