"""Two processes under the variables of each engine train one network, a process of one alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline import load_recipe
from pipeline.core.errors import RecipeError
from pipeline.stages.run import run
from tests import outcome
from tests.stages.launch.engine_runs import ENGINES, TINY

ROOT = Path(__file__).parents[3]


def start(folder: Path, cache: Path, size: int) -> Sequence[str]:
    """Run the recipe once by each engine; return the lines of the processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.stages.launch.engine_runs"),
                *(str(rank), str(size), str(port), str(cache)),
            ],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, said
    return said


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_each_engine_trains_one_network(cache: Path, tmp_path: Path) -> None:
    """They also run one after the other in the same processes."""
    two = start(tmp_path / "two", cache, 2)
    start(tmp_path / "one", cache, 1)
    expected = outcome.metrics(tmp_path / "one/torchrun")
    assert len(expected) == 20
    for engine in ENGINES:
        for size in ("one", "two"):
            assert outcome.metrics(tmp_path / size / engine) == expected, (engine, size)
        assert outcome.arrays(tmp_path / "two" / engine).keys()
    assert two[0].count("2 devices in 2 processes") == len(ENGINES)


@pytest.mark.parametrize("engine", ENGINES)
def test_recipe_for_one_process_is_refused(
    engine: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N processes would train N copies."""
    for name, value in ENGINES[engine](0, 2, 29_500).items():
        monkeypatch.setenv(name, value)
    recipe = load_recipe("lenet5_digits", [*TINY, "parallel.mode=none", "parallel.shards=null"])
    with pytest.raises(RecipeError) as refused:
        run(recipe)
    assert "parallel.mode = none: must be data, since " in str(refused.value)
    assert "has started 2 processes; or set launch=none" in str(refused.value)
