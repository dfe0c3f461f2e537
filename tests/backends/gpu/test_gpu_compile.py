"""What XLA makes of a run for an H200 that is not there; larger networks are checked by
`python -m benchmarks.gpu_compile`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.files.bounded_read import read_json
from pipeline.core.host.cuda import find_plugin
from pipeline.stages.record.run_directory import COMPILED
from tests.conftest import compose_tiny
from tests.whole_run import run

Compose = Callable[..., Recipe]
ABSENT = ("device=gpu", "device.target=h200", "stages=[data,build,compile]")
pytestmark = pytest.mark.skipif(
    find_plugin() is None, reason="needs the extra gpu-compile: pip install -e '.[gpu-compile]'"
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[dict[str, Any], str]:
    """The figures of LeNet-5's programs, and what was printed of them."""
    run_dir = tmp_path_factory.mktemp("h200")
    run(compose_tiny(cache, *ABSENT, "train.sink_size=4"), run_dir)
    figures: dict[str, Any] = read_json(run_dir / COMPILED)
    return figures, (run_dir / "run.log").read_text()


def test_state_is_updated_in_place_without_the_host(
    compiled: tuple[dict[str, Any], str],
) -> None:
    figures, _ = compiled
    assert list(figures) == ["4 training steps", "training step", "evaluation"]
    for name, one in figures.items():
        hlo = one["hlo"]
        assert hlo["callbacks"] == 0
        assert hlo["donated"] == one["results"], name
        assert hlo["state_moves"] == hlo["body_moves"] == 0, name
        assert not one["waits_for_host"]
        assert 0 < one["memory_bytes"] < one["chip_bytes"] == 150_000_000_000
    assert [one["loops"] for one in figures.values()] == [1, 0, 0]
    assert figures["4 training steps"]["hlo"]["known_steps"] == 4


def test_printed_figures_match_the_compiled_program(compiled: tuple[dict[str, Any], str]) -> None:
    figures, said = compiled
    step = figures["training step"]["step"]
    assert step["cudnn"] == 5
    launches = f"{step['kernels']} kernels, 5 cuDNN, {step['gemm']} GEMM"
    assert f"training step, each: {launches}" in said
    assert "a loop of 4 iterations, without waits for the host" in said
    assert "copies and transposes: 0 in the loop's body, 0 of the state in a dispatch" in said
    assert "NVIDIA H200, which is described and not there" in said


def test_unsupported_chip_is_reported(tiny: Compose, tmp_path: Path) -> None:
    from pipeline.backends.gpu.chip_target import FOLDER

    own = tmp_path / "own.yaml"
    text = (FOLDER / "h200.yaml").read_text()
    own.write_text(text.replace("threads_per_warp: 32", "threads_per_warp: 7"))
    with pytest.raises(RunError, match=r"^compiling training step: "):
        run(tiny(*ABSENT, f"device.target={own}", "train.sink=false"), tmp_path / "run")
