"""Targets: the shipped one, files of one's own, and what is wrong with others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.backends.gpu.chip_target import FOLDER, read_target
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError

Compose = Callable[..., Recipe]
COMPILING = "stages=[data,build,compile]"


def test_shipped_target_is_written_in_the_compiler_format() -> None:
    target = read_target("h200")
    text = target.to_text()
    assert (target.cores, target.memory_bytes) == (132, 150_000_000_000)
    assert text.count("{") == text.count("}") == 4
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text
    assert 'device_description_str: "NVIDIA H200"' in text
    assert "memory_bandwidth: 4814000000000" in text


def test_target_is_read_from_a_custom_file(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text((FOLDER / "h200.yaml").read_text().replace("NVIDIA H200", "NVIDIA H100 SXM"))
    assert read_target(str(own)).chip == "NVIDIA H100 SXM"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "can't be read: No such file or directory"),
        ("- 1", "must have keys and values, as"),
        ("a: [", "isn't YAML: "),
        ("chip: A\n", "compute_capability: missing; it needs a value; "),
        ("chip: '\"'\n", "chip = "),
    ],
)
def test_problem_of_a_file_is_reported(content: str | None, problem: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    if content is not None:
        own.write_text(content)
    with pytest.raises(ValueError, match=r"own\.yaml: ") as caught:
        read_target(str(own))
    assert problem in str(caught.value)


def test_capability_that_ends_the_compiler_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text((FOLDER / "h200.yaml").read_text().replace('"9.0"', '"3.5"'))
    with pytest.raises(ValueError, match=r"compute_capability: must be at least 5\.0"):
        read_target(str(own))


def test_unknown_key_of_a_target_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text((FOLDER / "h200.yaml").read_text() + "core: 3\n")
    with pytest.raises(ValueError, match=r"core = 3: there is no such key; did you mean cores\?"):
        read_target(str(own))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["device.target=h200"],
            "device.target = h200: is a chip to compile for, on which nothing runs; stages must be "
            "[data,build,compile], and has train, checkpoint, eval",
        ),
        (
            ["device.target=h300", COMPILING],
            "device.target = h300: there is no such target; did you mean h200? Choose from h200; "
            "or name a YAML file like h200.yaml",
        ),
        (
            ["device.target=h200", COMPILING, "parallel.mode=data"],
            "parallel.mode = data: must be none with device.target",
        ),
        (
            ["device.target=h200", COMPILING, "train.mode=eager"],
            "train.mode = eager: must be graph with device.target, which compiles the step",
        ),
    ],
)
def test_target_is_allowed_only_for_compiling(
    overrides: list[str], problem: str, tiny: Compose
) -> None:
    with pytest.raises(RecipeError) as caught:
        tiny("device=gpu", *overrides)
    assert list(caught.value.problems) == [problem]


def test_gpu_device_has_graphs_and_deterministic_keys(tiny: Compose) -> None:
    device = tiny("device=gpu").device
    assert (device.graphs, device.deterministic) == ("auto", True)  # type: ignore[attr-defined]
    assert tiny("device=gpu", "device.graphs=off").device.graphs == "off"  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match=r"device.graphs = all: must be"):
        tiny("device=gpu", "device.graphs=all")
