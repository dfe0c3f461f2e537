"""Only platforms and the devices' components know which device is which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.core.host.platforms import CPU, GPU, PLATFORMS, Platform, get_platform

ROOT = Path(__file__).parents[3] / "pipeline"
NAMES = re.compile(r'''[=!]= ?"(cpu|gpu|ascend)"|"(cpu|gpu|ascend)" ?[=!]=|in \("(cpu|gpu)"''')


def test_platforms_are_selected_by_their_jax_name() -> None:
    assert get_platform("cpu") is CPU
    assert get_platform("gpu") is GPU
    assert len({platform.name for platform in PLATFORMS}) == len(PLATFORMS)


def test_unknown_platform_has_default_properties() -> None:
    assert get_platform("abacus") == Platform("abacus")
    assert not get_platform("abacus").is_traceable


@pytest.mark.medium
def test_no_code_compares_with_a_device_name() -> None:
    wrong = {
        f"{file.relative_to(ROOT)}: {found[0]}"
        for file in ROOT.rglob("*.py")
        if (found := NAMES.search(file.read_text()))
    }
    assert wrong == set()
