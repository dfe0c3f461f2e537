"""Pages: whole, safe from names of strangers, and usable on a narrow screen.

Drawings are XML that any parser reads, whatever names they show.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree.ElementTree import fromstring

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.pages.charts import Lane, draw_lanes
from pipeline.core.pages.page import (
    MARGIN,
    Beside,
    Block,
    Charts,
    Drawing,
    Legend,
    Matrix,
    Page,
    RowTable,
    Sample,
    SampleGrid,
    Section,
    Words,
    read_template,
    render_page,
    stack_drawings,
)

HOSTILE = "</title></style><script>alert(1)</script>\"'&\ud800"
SHOWN = HOSTILE.replace("\ud800", "?")
BLOCKS: list[Block] = [
    Words(HOSTILE),
    Charts([draw_lanes(HOSTILE, [Lane(HOSTILE, [])], 1.0)]),
    Legend({"blue": HOSTILE}),
    RowTable([{HOSTILE: HOSTILE, "n": 1234, "f1": 0.5}]),
    Matrix([HOSTILE, "b"], [[3, 1], [0, 0]]),
    SampleGrid([Sample(b"png", HOSTILE, HOSTILE, HOSTILE)]),
    Beside([Words(HOSTILE)]),
]
SVG = "{http://www.w3.org/2000/svg}"


class Reader(HTMLParser):
    """Notes the tags of a page and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: type(block).__name__)
def test_untrusted_names_are_escaped_in_each_block(block: Block) -> None:
    page = render_page(Page("test", "page", "", [Section("section", "", [block])]))
    reader = Reader(page)
    assert "script" not in reader.tags
    assert SHOWN.replace("?", "\ufffd" if isinstance(block, Charts) else "?") in reader.texts


def test_untrusted_names_are_escaped_around_the_blocks() -> None:
    section = Section(HOSTILE, HOSTILE, [Words("")])
    page = render_page(Page("test", HOSTILE, HOSTILE, [section], {HOSTILE: HOSTILE}, HOSTILE))
    reader = Reader(page)
    assert "script" not in reader.tags
    assert reader.texts.count(SHOWN) == 8


def test_section_without_blocks_is_not_shown() -> None:
    page = render_page(
        Page("test", "page", "", [Section("empty"), Section("full", "", [BLOCKS[0]])])
    )
    assert "<h2>empty" not in page
    assert "<h2>full" in page


def test_table_rows_are_limited() -> None:
    rows = [{"class": number, "recall": 0.25} for number in range(150)]
    page = render_page(Page("test", "page", "", [Section("rows", "", [RowTable(rows)])]))
    assert page.count("<tr>") == 101
    assert '0.2500<i style="width:12px">' in page


def test_content_policy_allows_only_the_page_script() -> None:
    assert "default-src 'none'; img-src" in render_page(Page("test", "page", ""))
    values = {"content": {}, "importance": "", "uses": [], "links": [], "shared": {}}
    page = render_page(Page("runs", "page", ""), "runs.html", **values)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest.replace('+', '&#43;')}'" in page.replace("+", "&#43;")


def test_page_fits_a_narrow_screen() -> None:
    styles = "".join(read_template(name) for name in ("style.css", "charts.css", "runs.css"))
    widths = [int(px) for px in re.findall(r"(?<!max-)width: (\d+)px", styles)]
    assert widths
    assert max(widths) < 300
    # What is wider, such as a table or a timeline, scrolls by itself.
    assert re.search(r"\.scroll {[^}]*overflow: auto", styles)
    for block in (BLOCKS[1], BLOCKS[3], BLOCKS[4]):
        page = render_page(Page("test", "page", "", [Section("wide", "", [block])]))
        assert re.search(r'<div class="card scroll" tabindex="0">\s*<(table|svg)', page), block
    # Drawings are no wider than the screen, and long words, such as keys, are broken.
    assert re.search(r"svg {[^}]*width: 100%", styles)
    for size in re.findall(r"minmax\((\d+px|min\([^)]*\))", styles):
        assert "100%" in size or int(size.removesuffix("px")) < 300
    for name in ("h1", "p", "footer"):
        assert re.search(rf"(?m)^{name} {{[^}}]*overflow-wrap: anywhere", styles), name


@pytest.mark.slow
def test_jinja2_is_not_imported_before_a_page_is_written() -> None:
    modules = "pipeline.inspect.report.write_report, pipeline.cli.runs.runs, pipeline.cli.profile"
    script = f"import sys, {modules}; print('jinja2' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout.strip() == "False", ran.stderr


@pytest.mark.medium
@given(words=st.text(), tip=st.text(), label=st.text())
def test_any_text_is_escaped(words: str, tip: str, label: str) -> None:
    drawing = Drawing(10, 10, label)
    drawing.add("text", "name", words, tip, x=1)
    (element,) = fromstring(drawing.to_element())[0:1]
    text = element if element.tag == "text" else element[0]
    assert text.get("class") == "name"
    assert len(text.text or "") <= len(words)
    assert fromstring(drawing.to_file_text()).tag == f"{SVG}svg"


def test_numbers_have_six_digits() -> None:
    drawing = Drawing(10, 10, "a")
    drawing.add("circle", r=1 / 3, cx=1_234_567.0)
    assert 'r="0.333333"' in drawing.to_element()
    assert 'cx="1.23457e+06"' in drawing.to_element()


def test_drawing_file_has_margin_and_dark_style() -> None:
    drawing = Drawing(100, 50, "a")
    drawing.add("circle", r=1)
    text = drawing.to_file_text()
    box = fromstring(text).get("viewBox")
    assert box == f"{-MARGIN:g} {-MARGIN:g} {100 + 2 * MARGIN:g} {50 + 2 * MARGIN:g}"
    assert "prefers-color-scheme: dark" in text
    assert "var(--" not in text


def test_stacked_drawings_are_placed_below_each_other() -> None:
    stack = stack_drawings([Drawing(10, 20, "a"), Drawing(30, 40, "b")], "both", gap=5)
    assert (stack.width, stack.height) == (30, 65)
    assert "translate(0,25)" in stack.to_element()


def _luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance of a colour of sRGB, 0 to 255, by WCAG 2.2."""
    shares = [value / 255 for value in colour]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_counts_of_a_matrix_have_contrast_in_light_and_dark_colours() -> None:
    counts = [[50, 50], [0, 100]], [[1, 999], [100, 0]]
    pages = [
        render_page(Page("p", "t", "a", [Section("s", "", [Matrix(["a", "b"], rows)])]))
        for rows in counts
    ]
    strengths = [float(text) for page in pages for text in re.findall(r"--strength:([\d.]+)", page)]
    assert min(strengths) == 0.12
    style = read_template("style.css")
    for scheme in re.findall(r":root {(.*?)}", read_template("colours.css"), re.DOTALL):
        colours = {
            name: tuple(bytes.fromhex(text))
            for name, text in re.findall(r"--(card|ink): #(\w{6});", scheme)
        }
        for side in ("right", "wrong"):
            found = re.search(rf"\.matrix \.{side} {{ background: rgb\((\d+) (\d+) (\d+) /", style)
            assert found is not None
            full = tuple(map(int, found.groups()))
            for share in strengths:
                cell = tuple(
                    card + share * (top - card)
                    for card, top in zip(colours["card"], full, strict=True)
                )
                dark, light = sorted(_luminance(each) for each in (cell, colours["ink"]))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (scheme, side, share)
