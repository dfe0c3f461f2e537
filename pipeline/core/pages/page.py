"""Pages: one HTML file each, without links to other files or the net."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.core.pages.drawing import Drawing, read_template

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_ROWS = 100
"""Rows of a table on a page; files have all."""
HEADS = {"f1": "F1", "mae": "MAE", "rmse": "RMSE", "r2": "R²"}
"""Heads of columns that are written in another way."""
GENERATOR = '<meta name="generator" content="recipe-pipeline {}">'
"""Mark by which a page of a kind is recognized."""


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    kind: ClassVar[str] = "words"
    text: str


@dataclass(frozen=True)
class Charts:
    """Charts side by side if there is room; `pairs` leave room for two."""

    kind: ClassVar[str] = "charts"
    drawings: Sequence[Drawing]
    pairs: bool = False


@dataclass(frozen=True)
class Legend:
    """Words by the colour that they explain."""

    kind: ClassVar[str] = "legend"
    colours: Mapping[str, str]


@dataclass(frozen=True)
class RowTable:
    """Rows of equal keys. Precision, recall and F1 have a bar each."""

    kind: ClassVar[str] = "table"
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Matrix:
    """Counts by true (rows) and predicted class, shaded by the share in the row."""

    kind: ClassVar[str] = "matrix"
    names: Sequence[str]
    counts: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Beside:
    """Blocks beside each other if there is room."""

    kind: ClassVar[str] = "beside"
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Sample:
    """A sample: its picture as PNG, what was predicted and what is true."""

    png: bytes
    predicted: str
    label: str
    name: str

    @property
    def png_text(self) -> str:
        """Return the picture as base64."""
        return base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True)
class SampleGrid:
    """Samples in a grid."""

    kind: ClassVar[str] = "samples"
    samples: Sequence[Sample]


Block = Words | Charts | Legend | RowTable | Matrix | Beside | SampleGrid


@dataclass(frozen=True)
class Section:
    """A heading, a sentence and blocks. Without blocks it isn't shown."""

    title: str
    about: str = ""
    blocks: Sequence[Block] = ()


@dataclass(frozen=True)
class Page:
    """A title, a sentence, the figures that matter most, sections and a footer.

    `kind` names what wrote the page.
    """

    kind: str
    title: str
    about: str
    sections: Sequence[Section] = ()
    figures: Mapping[str, str] = field(default_factory=dict)
    footer: str = ""


def render_page(page: Page, template: str = "page.html", **values: Any) -> str:
    """Return a page as HTML, whose text is escaped wherever a template writes it.

    The policy of the page allows no script. A character without bytes in UTF-8, such as half of a
    pair, becomes a question mark.
    """
    html_template = _templates().get_template(template)
    return html_template.render(page=page, **values).encode("utf-8", "replace").decode()


def _sha256(script: str) -> str:
    """Return the digest by which a policy allows a script."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    templates = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        loader=FunctionLoader(read_template),
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    templates.filters["sha256"] = _sha256
    templates.globals.update(
        generator=GENERATOR, heads=HEADS, max_rows=MAX_ROWS, read_template=read_template
    )
    return templates
