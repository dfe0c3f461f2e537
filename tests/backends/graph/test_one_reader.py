"""Programs are read in one place: jaxprs by jaxpr, HLO by hlo_program, traces by trace_file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "pipeline"
READERS = {
    # Whoever walks over equations binds the constants of a jaxpr.
    r"\.constvars\b": {"jaxpr.py"},
    # Parameters with what an equation calls.
    r'"(call_jaxpr|fun_jaxpr|cond_jaxpr|num_consts|ft_in)"': {"jaxpr.py"},
    # An instruction of HLO, and its element types.
    r"\(\.\*\?\[\\\]\)\}\]\)": {"hlo_program.py"},
    r"custom_call_target=": {"hlo_program.py"},
    r'"ph":': {"trace_file.py"},
    r"(?i)KEY_BYTES =|MASK_BYTES =": {"array_values.py"},
}
"""Patterns, and the modules that may have them."""


@pytest.mark.parametrize("pattern", READERS)
def test_program_formats_are_read_only_in_the_listed_modules(pattern: str) -> None:
    modules = {file.name for file in ROOT.rglob("*.py") if re.search(pattern, file.read_text())}
    assert modules == READERS[pattern]


def test_backends_and_planner_do_not_import_recipes() -> None:
    """Not in functions and not under TYPE_CHECKING either."""
    above = re.compile(r"(from|import) pipeline\.(config|runner|stages|profiler|observe)\b")
    wrong = {
        str(file.relative_to(ROOT)): found[0]
        for folder in ("backends", "planner")
        for file in (ROOT / folder).rglob("*.py")
        if (found := above.search(file.read_text()))
    }
    assert wrong == {}


def test_ascend_model_is_imported_only_by_its_device_component() -> None:
    """The planner and stages get rates and estimates by the device's component."""
    model = re.compile(r"(from|import) pipeline\.backends\.ascend\.")
    wrong = {
        str(file.relative_to(ROOT))
        for folder in ("planner", "stages")
        for file in (ROOT / folder).rglob("*.py")
        if model.search(file.read_text())
    }
    assert wrong == set()
    component = re.compile(r"(from|import) pipeline\.backends\.devices\b")
    backends = (file for file in (ROOT / "backends" / "ascend").rglob("*.py"))
    assert [file.name for file in backends if component.search(file.read_text())] == []
