"""Two processes under the variables of each engine train one network, a process of one alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import load_recipe
from pipeline.core.errors import RecipeError
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions
from tests import outcome
from tests.forked import start_forked
from tests.stages.launch.engines import ENGINES

TINY = (
    "model=mlp",
    "model.hidden=[12]",
    "monitor.tensorboard=false",
    "stages=[data,build,compile,train]",
    "train.sink_size=10",
    "train.steps=20",
    "parallel.mode=data",
    "parallel.shards=2",
)


def open_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train(engine: str, size: int, cache: Path, folder: Path) -> list[str]:
    """Run the recipe in `size` processes of an engine; return their lines."""
    port = open_port()
    said = [folder / f"{engine}_{size}_{rank}.txt" for rank in range(size)]
    processes = []
    for rank, lines in enumerate(said):
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(cache.parent),
            **ENGINES[engine](rank, size, port),
        }
        words = ["+recipe=lenet5_digits", *TINY, f"hydra.run.dir={engine}_{size}"]
        processes.append(start_forked(words, folder, environment, [lines] * 2))
    for process in processes:
        process.join(240)
    texts = [lines.read_text() for lines in said]
    assert [process.exitcode for process in processes] == [0] * size, texts
    return texts


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_engines_train_one_network(cache: Path, tmp_path: Path) -> None:
    train("torchrun", 1, cache, tmp_path)
    expected = outcome.metrics(tmp_path / "torchrun_1")
    assert len(expected) == 20
    for engine in ENGINES:
        if engine != "torchrun":
            assert "rank_size" not in train(engine, 1, cache, tmp_path)[0].replace(
                "rank_size 1", ""
            )
            assert outcome.metrics(tmp_path / f"{engine}_1") == expected, engine
        texts = train(engine, 2, cache, tmp_path)
        assert "rank_id 0 of rank_size 2" in texts[0], engine
        assert "rank_id 1 of rank_size 2" in texts[1], engine
        assert outcome.metrics(tmp_path / f"{engine}_2") == expected, engine


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_connected_processes_train_several_runs(cache: Path, tmp_path: Path) -> None:
    """As Ray Train's workers, which jax.distributed connects first; devices are open already."""
    script = (
        "import sys, jax\n"
        "from pathlib import Path\n"
        "from pipeline import load_recipe\n"
        "from pipeline.stages.run import run\n"
        "from pipeline.stages.runner.context import RunOptions\n"
        "rank, port, cache, *words = sys.argv[1:]\n"
        "jax.distributed.initialize(f'127.0.0.1:{port}', 2, int(rank))\n"
        "jax.devices()\n"
        "recipe = load_recipe('lenet5_digits', [*words, f'cache.root={cache}'])\n"
        "print([run(recipe, RunOptions(run_dir=Path(name))).steps for name in ('a', 'b')])\n"
    )
    port = open_port()
    words = [str(port), str(cache), *TINY]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), *words],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "[20, 20]" in texts[1]
    assert outcome.metrics(tmp_path / "a") == outcome.metrics(tmp_path / "b")


@pytest.mark.slow
def test_unreachable_first_process_is_reported() -> None:
    """JAX would end this process by an abort."""
    script = (
        "import sys\n"
        "from pipeline import load_recipe\n"
        "from pipeline.core.host.launchers import RankPlace\n"
        "from pipeline.stages.launch import join\n"
        "join.meet = lambda *_: None\n"
        "join.CONNECT_S = 1\n"
        "recipe = load_recipe('lenet5_digits', ['parallel.mode=data'])\n"
        "join._connect(RankPlace(1, 2, sys.argv[1]), recipe.launch, None)\n"
    )
    address = f"127.0.0.1:{open_port()}"
    command = [sys.executable, "-c", script, address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    problem = f"error: process 1 of 2: can't connect to the others at {address} in 1 s; one"
    assert problem in ended.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_recipe_for_one_process_is_refused(
    engine: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N processes would train N copies."""
    for name, value in ENGINES[engine](0, 2, 29_500).items():
        monkeypatch.setenv(name, value)
    alone = ("parallel.mode=none", "parallel.shards=null", f"cache.root={cache}")
    with pytest.raises(RecipeError) as refused:
        run(load_recipe("lenet5_digits", [*TINY, *alone]), RunOptions())
    assert "parallel.mode = none: must be data, since " in str(refused.value)
    assert "has started 2 processes; or set launch=none" in str(refused.value)
