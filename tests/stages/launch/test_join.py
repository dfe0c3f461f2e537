"""Two processes under the variables of each engine train one network, a process of one alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pipeline import load_recipe
from pipeline.api import get_group_size, get_rank
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.host import jax_private
from pipeline.core.host.launchers import RankPlace
from pipeline.data.columns import RawData
from pipeline.data.sources.digits import Digits
from pipeline.stages.launch import join, meeting
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions
from pipeline.training.parallel.ranks import Ranks
from tests import outcome
from tests.forked import CONTEXT
from tests.stages.launch.engines import ENGINES
from tests.stages.launch.forked_processes import find_open_port, train_in_processes

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


def train(engine: str, size: int, cache: Path, folder: Path) -> list[str]:
    """Run the recipe in `size` processes of an engine; return their lines."""
    words = ["+recipe=lenet5_digits", *TINY, f"hydra.run.dir={engine}_{size}"]
    statuses, texts = train_in_processes(words, cache, folder, size, engine)
    assert statuses == [0] * size, texts
    return texts


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_engines_train_one_network(cache: Path, tmp_path: Path) -> None:
    (text,) = train("torchrun", 1, cache, tmp_path)
    assert "rank_size" not in text.replace("rank_size 1", "")
    expected = outcome.metrics(tmp_path / "torchrun_1")
    assert len(expected) == 20
    for engine in ENGINES:
        texts = train(engine, 2, cache, tmp_path)
        assert "rank_id 0 of rank_size 2" in texts[0], engine
        assert "rank_id 1 of rank_size 2" in texts[1], engine
        assert outcome.metrics(tmp_path / f"{engine}_2") == expected, engine


def train_two_runs(rank: int, port: int, cache: Path, folder: Path) -> None:
    """Train twice in one of two processes that are connected and have opened their devices."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    jax.devices()
    recipe = load_recipe("lenet5_digits", [*TINY, f"cache.root={cache}"])
    steps = [run(recipe, RunOptions(run_dir=folder / name)).steps for name in ("a", "b")]
    (folder / f"steps_{rank}").write_text(str(steps))
    # Else a process aborts if the first one, which has the service, ends before it.
    jax.distributed.shutdown()


@pytest.mark.slow
def test_connected_processes_train_several_runs(cache: Path, tmp_path: Path) -> None:
    """As Ray Train's workers, which jax.distributed connects first; devices are open already."""
    port = find_open_port()
    processes = [
        CONTEXT.Process(target=train_two_runs, args=(rank, port, cache, tmp_path))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert statuses == [0, 0]
    assert [(tmp_path / f"steps_{rank}").read_text() for rank in range(2)] == ["[20, 20]"] * 2
    assert outcome.metrics(tmp_path / "a") == outcome.metrics(tmp_path / "b")


@pytest.mark.slow
def test_unreachable_first_process_is_reported() -> None:
    """JAX would end this process by an abort."""
    script = (
        "import sys\n"
        "from pipeline import load_recipe\n"
        "from pipeline.core.host.launchers import RankPlace\n"
        "from pipeline.stages.launch import join, meeting\n"
        "meeting.meet = lambda *_: None\n"
        "join.CONNECT_S = 1\n"
        "recipe = load_recipe('lenet5_digits', ['parallel.mode=data'])\n"
        "join._connect(RankPlace(1, 2, sys.argv[1], 'torchrun'), recipe.launch, None)\n"
    )
    address = f"127.0.0.1:{find_open_port()}"
    command = [sys.executable, "-c", script, address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    problem = f"error: process 1 of 2: can't connect to the others at {address} in 1 s; one"
    assert problem in ended.stderr


@pytest.mark.medium
def test_data_of_a_run_without_others_is_read_as_rank_0(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a launcher has set: `launch=none` has one process."""
    for name, value in ENGINES["torchrun"](1, 2, 29_500).items():
        monkeypatch.setenv(name, value)
    ranks = []
    read = Digits.read

    def read_share(spec: Digits, folder: Path) -> RawData:
        ranks.append((get_rank(), get_group_size()))
        return read(spec, folder)

    monkeypatch.setattr(Digits, "read", read_share)
    recipe = load_recipe("lenet5_digits", ["launch=none", "stages=[data]", f"cache.root={cache}"])
    run(recipe, RunOptions(run_dir=tmp_path / "run"))
    assert ranks == [(0, 1)]
    assert (get_rank(), get_group_size()) == (1, 2)


def test_waits_are_those_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: dict[str, float] = {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=120")
    monkeypatch.setattr(meeting, "meet", lambda _, limit_s: seconds.update(start=limit_s))
    monkeypatch.setattr(jax_private, "has_open_devices", lambda: False)
    monkeypatch.setattr(jax_private, "get_coordination_client", lambda: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **waits: seconds.update(waits))
    monkeypatch.setattr(join.atexit, "register", lambda _: None)
    keys = ["launch.start_seconds=11", "launch.stuck_seconds=12", "launch.end_seconds=12.4"]
    recipe = load_recipe("lenet5_digits", [*keys, "launch.heartbeat_seconds=0.3"])
    ranks = join._connect(RankPlace(1, 2, "127.0.0.1:1", "torchrun"), recipe.launch, None)
    assert seconds["start"] == 11
    flags = os.environ["XLA_FLAGS"].split()
    assert flags == [f"--xla_cpu_collective_timeout_seconds={number}" for number in (120, 12)]
    assert ranks.timeout_s == 12
    assert seconds["shutdown_timeout_seconds"] == 13
    assert seconds["heartbeat_timeout_seconds"] == 1, "JAX takes whole seconds, and 0 isn't one"


def test_flag_joins_those_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XLA would take the file's name and the flag for a name, and abort the process."""
    file = tmp_path / "flags.txt"
    file.write_text("--xla_a=1\n--xla_b=2\n")
    for before, after in (
        (str(file), "--xla_a=1\n--xla_b=2 --xla_c=3"),
        ("--xla_a=1 ", "--xla_a=1 --xla_c=3"),
        ("", "--xla_c=3"),
    ):
        monkeypatch.setenv("XLA_FLAGS", before)
        join.add_xla_flag("--xla_c=3")
        assert os.environ["XLA_FLAGS"] == after
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path))
    with pytest.raises(RunError, match=r"XLA_FLAGS = .*: can't be read: isn't a regular file"):
        join.add_xla_flag("--xla_c=3")


class OtherProcess:
    """A store with the facts of process 1 of two."""

    def __init__(self, **facts: str) -> None:
        self.facts = facts

    def key_value_set(self, key: str, text: str) -> None:
        if key.endswith("/0"):
            self.own = text

    def blocking_key_value_get(self, key: str, _: int) -> str:
        return self.own if key.endswith("/0") else json.dumps(self.facts)


def test_fact_of_another_process_alone_is_a_difference() -> None:
    """As its plug-in: this process would wait for one that has ended."""
    Ranks(0, 2, 1.0, OtherProcess(recipe="a")).require_same({"recipe": "a"})
    ranks = Ranks(0, 2, 1.0, OtherProcess(recipe="a", plugin="mine"))
    with pytest.raises(RunError, match="processes 0 and 1 of 2 differ in plugin: None and mine"):
        ranks.require_same({"recipe": "a"})


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
