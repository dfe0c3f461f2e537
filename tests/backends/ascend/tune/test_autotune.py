"""AutoTune: its gain, its reproducibility, and the use of its knowledge bank."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.options import ExecutionConfig, TuneMode
from pipeline.backends.ascend.chip.tasks import Buffer, Task, TaskGraph
from pipeline.backends.ascend.cost.efficiency import load_efficiency
from pipeline.backends.ascend.cost.task_time import price_tasks
from pipeline.backends.ascend.cost.tiling import Product, choose_default_tiling, to_row
from pipeline.backends.ascend.tune import autotune
from pipeline.backends.ascend.tune.autotune import TuneResult, find_tunable_tasks, tune
from pipeline.backends.ascend.tune.tile_search import Objective, Search, search_tiles
from pipeline.core.errors import RunError
from pipeline.core.files.knowledge_bank import Banks, Round, read_bank, write_result
from tests.backends.ascend.made_up import HW
from tests.backends.ascend.products import convolution, matmul, stream

MODES: tuple[TuneMode, ...] = ("exhaustive", "ga", "rl")
GRADIENT = convolution("conv_kernel_grad", 32, 7, 512, 512)
"""Images first makes every core add up the whole kernel: there is much to gain."""


def tuned(
    graph: TaskGraph = GRADIENT, mode: Any = "exhaustive", bank: Path | None = None, **options: Any
) -> TuneResult:
    config = ExecutionConfig(auto_tune=mode, tune_bank=str(bank) if bank else None, **options)
    return tune(graph, HW, config, load_efficiency())


def _joined(*graphs: TaskGraph) -> TaskGraph:
    """Graphs one after another in one."""
    buffers: list[Buffer] = []
    tasks: list[Task] = []
    for graph in graphs:
        first = len(buffers)
        buffers += [replace(made, index=first + made.index) for made in graph.buffers]
        for task in graph.tasks:
            reads, writes = (tuple(first + at for at in side) for side in (task.reads, task.writes))
            tasks.append(replace(task, reads=reads, writes=writes))
    return TaskGraph(tuple(buffers), tuple(tasks))


@pytest.mark.parametrize("mode", MODES)
def test_search_improves_on_a_bad_default_tiling(mode: TuneMode) -> None:
    (task,) = tuned(mode=mode).tasks
    assert task.after_us < 0.6 * task.before_us
    assert task.gain == pytest.approx(1 - task.after_us / task.before_us)
    assert task.trials > 50
    assert [each.best_us for each in task.rounds] == sorted(
        (each.best_us for each in task.rounds), reverse=True
    )


@pytest.mark.slow
@given(
    st.integers(1, 20),
    st.integers(1, 500),
    st.integers(1, 500),
    st.integers(1, 500),
    st.sampled_from((0, 2, 32)),
    st.sampled_from(MODES),
)
@settings(max_examples=30, deadline=None)
def test_search_is_between_default_and_exhaustive_optimum(
    batch: int, m: int, k: int, n: int, images: int, mode: TuneMode
) -> None:
    product = Product(batch, m, k, n, 1.0, 2, images)
    objective, default = Objective(product, HW, 1.25), choose_default_tiling(product, HW, 1.25)
    found = search_tiles(objective, mode, "key")
    best = search_tiles(objective, "exhaustive", "key")
    assert to_row(found.tiling)[0, :4].prod() <= HW.ai_cores_count
    default_us = objective.compute_times_us(to_row(default))[0]
    found_us = objective.compute_times_us(to_row(found.tiling))[0]
    assert found_us <= default_us
    if batch == 1:
        assert best.us <= found_us * (1 + 1e-9)


def test_tuned_graph_is_never_slower() -> None:
    graph = _joined(
        matmul(32, 9216, 4096), convolution("conv", 32, 13, 192, 256), GRADIENT, matmul(64, 64, 10)
    )
    result = tuned(graph)
    before, after = price_tasks(graph, HW), price_tasks(graph, HW, tiles=result.tiles)
    assert all(new.us <= old.us for new, old in zip(after, before, strict=True))
    assert result.before_us == pytest.approx(sum(time.us for time in before))
    assert result.after_us == pytest.approx(sum(time.us for time in after))


def test_only_cube_tasks_are_tuned() -> None:
    graph = _joined(stream("cast", 1000), matmul(64, 64, 64), matmul(64, 64, 64, "float32"))
    assert find_tunable_tasks(graph, HW) == (1,)
    assert set(tuned(graph).tiles) == {1}


@pytest.mark.medium
@pytest.mark.parametrize("mode", MODES)
def test_repeated_search_has_the_same_result(mode: TuneMode) -> None:
    assert tuned(mode=mode) == tuned(mode=mode)


DEFAULT_TILING = [1, 1, 32, 1, 8, 16]
"""The rule of thumb's tiling of `GRADIENT`."""


@pytest.mark.parametrize("stored", ["nothing", "bad", "best"])
@pytest.mark.parametrize("mode", [None, "ga"])
@pytest.mark.parametrize("repeat", [False, True])
def test_tuning_flow_has_every_documented_branch(
    stored: str, mode: TuneMode | None, repeat: bool, tmp_path: Path
) -> None:
    """A-01: the flow of the documents' figure 5-22, by its questions."""
    bank = tmp_path / "bank.json"
    best = tuned(bank=tmp_path / "other.json")
    (key,) = read_bank(tmp_path / "other.json", dict)
    best_us = read_bank(tmp_path / "other.json", dict)[key]["us"]
    bad = {"tiling": [1, 1, 1, 1, 8, 16], "us": 9999.0}
    if stored != "nothing":
        entry = {"tiling": list(astuple(best.tasks[0].tiling)), "us": best_us}
        Banks(bank, None, dict).add({key: bad if stored == "bad" else entry})
    before = bank.read_bytes() if bank.exists() else b""
    (task,) = tuned(bank=bank, mode=mode, repeat_tune=repeat).tasks
    after = read_bank(bank, dict)[key]

    if stored != "nothing" and mode is None and not repeat:
        assert (task.status, task.trials, bank.read_bytes()) == ("bank_hit", 0, before)
        return
    if stored == "nothing" and mode is None:
        assert (task.status, task.trials) == ("bank_append", 0)
        assert (task.after_us, after["tiling"]) == (task.before_us, DEFAULT_TILING)
        return
    statuses = {"nothing": "bank_append", "bad": "bank_update", "best": "bank_reserved"}
    assert task.status == statuses[stored]
    assert task.trials > 50
    assert after["us"] == pytest.approx(best_us)
    assert task.after_us < 0.6 * task.before_us
    assert after["tiling"] == list(astuple(task.tiling))


def test_search_without_improvement_stores_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-01: the last branch of the figure: tuned, and not better than the default."""

    def find_nothing(objective: Objective, *_: Any) -> Search:
        default = objective.choose_default_tiling()
        us = float(objective.compute_times_us(to_row(default))[0])
        return Search(default, us, 1, (Round(us),))

    monkeypatch.setattr(autotune, "search_tiles", find_nothing)
    bank = tmp_path / "bank.json"
    (task,) = tuned(bank=bank, mode="ga").tasks
    (entry,) = read_bank(bank, dict).values()
    assert (task.status, task.gain) == ("bank_append", 0)
    assert entry["tiling"] == DEFAULT_TILING


@pytest.mark.medium
def test_built_in_result_is_copied_to_the_custom_bank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    custom, built_in = tmp_path / "custom.json", tmp_path / "built_in.json"
    tuned(bank=built_in)
    before = built_in.read_bytes()
    monkeypatch.setattr(autotune, "BUILT_IN", built_in)
    (task,) = tuned(bank=custom, mode="rl").tasks
    assert task.status == "bank_reserved"
    assert read_bank(custom, dict) == read_bank(built_in, dict)
    assert built_in.read_bytes() == before


def test_differently_fused_operators_are_tuned_separately(tmp_path: Path) -> None:
    """The key of a bank is the list of the fused operators, and so is the record's."""
    bank = tmp_path / "bank.json"
    (task,) = GRADIENT.tasks
    fused = replace(GRADIENT, tasks=(replace(task, fused=("BiasAdd", "Relu")),))
    tuned(bank=bank)
    result = tuned(fused, bank=bank, mode=None)
    assert [task.status for task in result.tasks] == ["bank_append"]
    assert any("[conv_kernel_grad, BiasAdd, Relu]" in key for key in read_bank(bank, dict))
    ((key, operator),) = result.to_dict().items()
    assert json.loads(key) == ["net", "conv_kernel_grad", "BiasAdd", "Relu"]
    assert operator["mode"] == "off"


def test_custom_bank_has_precedence_over_the_built_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    custom, builtin = tmp_path / "custom.json", tmp_path / "builtin.json"
    tuned(bank=builtin)
    monkeypatch.setattr(autotune, "BUILT_IN", builtin)
    hit = tuned(bank=custom, mode=None)
    assert hit.tasks[0].status == "bank_hit"
    (key,) = read_bank(builtin, dict)
    _write(custom, key, [1, 1, 1, 1, 8, 16], 9999.0)
    own = tuned(bank=custom, mode=None)
    assert own.tasks[0].status == "bank_hit"
    assert own.tasks[0].after_us == own.tasks[0].before_us


def test_repeated_tuning_stores_the_better_tiling(tmp_path: Path) -> None:
    bank = tmp_path / "bank.json"
    best = tuned(bank=bank)
    assert tuned(bank=bank, repeat_tune=True).tasks[0].status == "bank_reserved"
    (key,) = read_bank(bank, dict)
    _write(bank, key, [1, 1, 1, 1, 8, 16], 9999.0)
    again = tuned(bank=bank, repeat_tune=True)
    assert again.tasks[0].status == "bank_update"
    assert again.tiles == best.tiles


def test_bank_entry_is_valid_only_for_its_core_type(tmp_path: Path) -> None:
    bank = tmp_path / "bank.json"
    tuned(bank=bank)
    config = ExecutionConfig(auto_tune="exhaustive", tune_bank=str(bank))
    other = tune(GRADIENT, replace(HW, ai_cores_count=30.0), config, load_efficiency())
    assert other.tasks[0].status == "bank_append"
    assert len(read_bank(bank, dict)) == 2


def test_equal_products_are_searched_once(tmp_path: Path) -> None:
    bank = tmp_path / "bank.json"
    result = tuned(_joined(GRADIENT, GRADIENT), bank=bank)
    assert len(result.tasks) == 2
    assert len(read_bank(bank, dict)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 9, "entries": {}}',
        '{"version": 1, "entries": {"a": {"tiling": [1, 2], "us": 1}}}',
        '{"version": 1, "entries": {"a": {"tiling": [0, 1, 1, 1, 8, 16], "us": 1}}}',
        '{"version": 1, "entries": {"a": {"tiling": [1, 1, 1, 1, 8, 16], "us": Infinity}}}',
        '{"version": 1, "entries": {"a": {"tiling": [1, 1, 1, 1, 8, 1%s], "us": 1}}}' % ("0" * 400),
    ],
)
def test_corrupted_bank_error_names_the_file(tmp_path: Path, text: str) -> None:
    bank = tmp_path / "bank.json"
    bank.write_text(text)
    with pytest.raises(RunError, match=r"bank\.json: not a knowledge bank .* delete it"):
        tuned(bank=bank)
    assert bank.read_text() == text


def test_unknown_autotune_mode_is_refused() -> None:
    with pytest.raises(RunError, match="AutoTune mode 'sa': must be one of exhaustive, ga, rl"):
        tuned(mode="sa")


@pytest.mark.medium
def test_result_file_has_the_fields_of_the_vendor_file(tmp_path: Path) -> None:
    result = tuned(mode="rl")
    path = write_result(result.to_dict(), tmp_path, datetime(2020, 8, 8, 18, 3, 38, 42_000))
    assert path.name.endswith("_20200808_180338042.json")
    assert path.name.startswith("tune_result_pid")
    ((key, operator),) = json.loads(path.read_text()).items()
    assert json.loads(key) == ["net", "conv_kernel_grad"]
    assert operator["result_data"]["before_tune"] > operator["result_data"]["after_tune"]
    assert operator["status_data"] == {
        "bank_append": True,
        "bank_hit": False,
        "bank_reserved": False,
        "bank_update": False,
    }


@pytest.mark.medium
def test_operators_of_equal_names_have_an_entry_each() -> None:
    keys = [json.loads(key) for key in tuned(_joined(GRADIENT, GRADIENT)).to_dict()]
    assert keys == [["net", "conv_kernel_grad"], ["net", "conv_kernel_grad", "#2"]]


def _write(bank: Path, key: str, tiling: list[int], us: float) -> None:
    entries = {key: {"tiling": tiling, "us": us}}
    bank.write_text(json.dumps({"version": 1, "entries": entries}))
