"""Pages, each of which is an HTML file without links to other files or the net."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.pages.drawing import Drawing, read_template

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_ROWS = 100
"""Most rows of a table on a page."""
HEADS = {"f1": "F1", "mae": "MAE", "rmse": "RMSE", "r2": "R²"}
"""Heads of columns, by key, whose spelling differs from the keys."""
GENERATOR = '<meta name="generator" content="recipe-pipeline {}">'
"""Element by which a command recognizes a page that it wrote. `{}` is the page's kind."""


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Charts:
    """Charts side by side if there is room, with two in a row if `pairs` is true."""

    drawings: Sequence[Drawing]
    pairs: bool = False


@dataclass(frozen=True)
class Legend:
    """Explanations by colour: the name of a colour of the style, or `#rrggbb`."""

    colours: Mapping[str, str]


@dataclass(frozen=True)
class RowTable:
    """Rows with the same keys. Precision, recall and F1 are also shown as bars."""

    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Matrix:
    """Counts by true (rows) and predicted class (columns), shaded by the share in the row."""

    names: Sequence[str]
    counts: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Beside:
    """Blocks beside each other if there is room."""

    blocks: Sequence[Block]


@dataclass(frozen=True)
class Sample:
    """A sample with its picture as PNG, its predicted class and its label."""

    png: bytes
    predicted: str
    label: str
    name: str

    @property
    def png_text(self) -> str:
        """The picture as base64."""
        return base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True)
class SampleGrid:
    """Samples in a grid."""

    samples: Sequence[Sample]
    parts: Sequence[str] = ()
    """Names of the three parts side by side, if pictures are three times as wide as high."""


Block = Words | Charts | Legend | RowTable | Matrix | Beside | SampleGrid


@dataclass(frozen=True)
class Section:
    """A heading, a sentence and blocks. A section without blocks isn't shown."""

    title: str
    about: str = ""
    blocks: Sequence[Block] = ()


@dataclass(frozen=True)
class Page:
    """A title, a sentence, the most important figures, sections and a footer.

    `kind` names the command that writes the page.
    """

    kind: str
    title: str
    about: str
    sections: Sequence[Section] = ()
    figures: Mapping[str, str] = field(default_factory=dict)
    footer: str = ""


def render_page(page: Page, template: str = "page.html", **values: Any) -> str:
    """Return a page as HTML, with escaped texts, and a policy that forbids other scripts.

    A character that UTF-8 can't encode, such as half of a surrogate pair, becomes a question mark.
    """
    html_template = _make_environment().get_template(template)
    return html_template.render(page=page, **values).encode("utf-8", "replace").decode()


def write_page(path: Path, page: Page) -> None:
    """Write a page atomically. Raises RunError if it can't be written."""
    with convert_write_errors(path):
        write_whole(path, render_page(page))


def _sha256(script: str) -> str:
    """Return the digest by which a page's policy allows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


@cache
def _make_environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        loader=FunctionLoader(read_template),
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters["sha256"] = _sha256
    environment.globals.update(
        generator=GENERATOR, heads=HEADS, max_rows=MAX_ROWS, read_template=read_template
    )
    return environment
