"""SVG drawings, with escaped texts and the colours of pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from xml.etree.ElementTree import Element, SubElement, tostring

TEMPLATES = "templates"
MARGIN = 24.0
"""Margin of a drawing in an SVG file, in pixels."""
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML doesn't allow, such as control characters in a name from a stranger."""


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
