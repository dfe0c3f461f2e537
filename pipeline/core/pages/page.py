"""Pages and their drawings, each an HTML file without links to other files or the net.

Drawings are SVG, with escaped texts and the colours of pages.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, SubElement, tostring

from pipeline.core.files.atomic_write import convert_write_errors, write_whole

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_ROWS = 100
"""Most rows of a table on a page."""
HEADS = {"f1": "F1", "mae": "MAE", "rmse": "RMSE", "r2": "R²"}
"""Heads of columns, by key, whose spelling differs from the keys."""
GENERATOR = '<meta name="generator" content="recipe-pipeline {}">'
"""Element by which a command recognizes a page that it wrote. `{}` is the page's kind."""
TEMPLATES = "templates"
MARGIN = 24.0
"""Margin of a drawing in an SVG file, in pixels."""
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML doesn't allow, such as control characters in a name from a stranger."""


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


class Drawing:
    """An SVG drawing of `width` x `height` pixels.

    `label` is the text for screen readers, `kind` the CSS classes, separated by spaces.
    """

    def __init__(self, width: float, height: float, label: str, kind: str = "") -> None:
        self.width = width
        self.height = height
        self.marks = Element("g")
        self.label = label
        self._kind = kind

    def add(
        self, name: str, kind: str = "", words: str = "", tip: str = "", **attributes: float | str
    ) -> None:
        """Add the SVG element `name` with the CSS classes `kind` and the text `words`.

        `tip` is shown when the pointer is over the element. Numbers are written with six digits.
        """
        element = SubElement(self.marks, name, {"class": kind} if kind else {})
        for key, value in attributes.items():
            element.set(key, value if isinstance(value, str) else f"{value:.6g}")
        if words:
            element.text = NO_XML.sub("\ufffd", words)
        if tip:
            SubElement(element, "title").text = NO_XML.sub("\ufffd", tip)

    def to_element(self, margin: float = 0, **attributes: str) -> str:
        """Return the drawing as an element of a page, with a margin in pixels."""
        box = (-margin, -margin, self.width + 2 * margin, self.height + 2 * margin)
        root = Element("svg", attributes, viewBox=" ".join(f"{edge:g}" for edge in box), role="img")
        root.set("aria-label", NO_XML.sub("\ufffd", self.label))
        if self._kind:
            root.set("class", self._kind)
        root.extend(self.marks)
        return tostring(root, "unicode")

    def to_file_text(self) -> str:
        """Return the text of an SVG file, whose colours are light or dark as the viewer's theme."""
        element = self.to_element(MARGIN, xmlns="http://www.w3.org/2000/svg")
        start_tag, _, content = element.partition(">")
        corner = f'x="-{MARGIN:g}" y="-{MARGIN:g}"'
        background = f'<rect class="ground" {corner} width="100%" height="100%"/>'
        return f"{start_tag}><style>{_make_file_style()}</style>{background}{content}\n"


def stack_drawings(drawings: Sequence[Drawing], label: str, gap: float = 16) -> Drawing:
    """Return a drawing of several drawings from top to bottom, `gap` pixels apart."""
    height = sum(drawing.height + gap for drawing in drawings) - gap
    stack = Drawing(max(drawing.width for drawing in drawings), height, label)
    top = 0.0
    for drawing in drawings:
        drawing.marks.set("transform", f"translate(0,{top:g})")
        stack.marks.append(drawing.marks)
        top += drawing.height + gap
    return stack


@cache
def read_template(name: str) -> str:
    """Return the text of a file in the folder of templates."""
    return files(__package__).joinpath(TEMPLATES, name).read_text("utf-8")


@cache
def _make_file_style() -> str:
    """Return the style of an SVG file. It has no CSS variables, which few viewers support."""
    light, dark = re.findall(r":root {(.*?)}", read_template("colours.css"), re.DOTALL)
    rules = [_replace_variables(read_template("charts.css"), colours) for colours in (light, dark)]
    return f"\n{rules[0]}@media (prefers-color-scheme: dark) {{\n{rules[1]}}}\n"


def _replace_variables(rules: str, colours: str) -> str:
    values = dict(re.findall(r"--([\w-]+): ([^;]+);", colours))
    return re.sub(r"var\(--([\w-]+)\)", lambda name: values[name[1]], rules)
