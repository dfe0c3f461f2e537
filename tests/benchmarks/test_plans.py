"""Plans that `benchmarks.plans` compares: what strategies shard, and the table."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import plans
from benchmarks.plans import DEVICES, NETWORKS, Network, Strategy, Times, find_plans
from pipeline.backends.planner.dimension_groups import Mesh
from pipeline.backends.planner.find_blocks import find_blocks
from pipeline.data.sources.npz import load_arrays
from tests.backends.planner.networks import mlp

STEP = mlp(64, 32, 64, 64, 256)
BLOCKS = find_blocks(STEP)


def network(*strategies: Strategy) -> Network:
    return Network((), (4, 4), (), 8, strategies)


def test_strategy_shards_its_dimensions() -> None:
    found = find_plans(
        network(
            Strategy("data parallel", Mesh(8, 1), {"*": None}),
            Strategy("head", Mesh(1, 8), {"*": "batch", "dense_2/*": "output"}),
            Strategy("head alone", Mesh(2, 4), {"*": None, "dense_2/*": "output"}),
            Strategy("inputs", Mesh(1, 8), {"*": "contracted"}),
        ),
        BLOCKS,
        1.0,
    )
    assert found["8 x 1, data parallel"].is_data_parallel
    head = found["1 x 8, head"]
    assert {rule.pattern for rule in head.specs if len(rule.axes) == 2} == {"dense_2/kernel"}
    alone = [rule for rule in found["2 x 4, head alone"].specs if rule.pattern.endswith("kernel")]
    assert [(rule.pattern, rule.axes) for rule in alone] == [("dense_2/kernel", ((), ("model",)))]
    kernels = [rule for rule in found["1 x 8, inputs"].specs if rule.pattern.endswith("kernel")]
    assert {rule.axes for rule in kernels} == {(("model",), ())}


def test_equal_plans_are_measured_once() -> None:
    strategies = [Strategy(name, Mesh(1, 8), {"*": "output"}) for name in ("one", "other")]
    assert list(find_plans(network(*strategies), BLOCKS, 1.0)) == ["1 x 8, one"]


@pytest.mark.parametrize("name", NETWORKS)
def test_strategies_use_all_devices_and_are_unique(name: str) -> None:
    strategies = NETWORKS[name].strategies
    assert {strategy.mesh.devices for strategy in strategies} == {DEVICES}
    assert len(strategies) >= plans.PLANS
    assert len({(strategy.mesh, strategy.name) for strategy in strategies}) == len(strategies)


@pytest.mark.parametrize("label", [(), (4,)])
def test_written_samples_are_a_valid_dataset(label: tuple[int, ...], tmp_path: Path) -> None:
    Network((), (4, 1, 1), label, 8, ()).write(tmp_path / "x.npz")
    arrays = load_arrays(tmp_path / "x.npz")
    assert arrays["x_train"].shape == (plans.SAMPLES, 4, 1, 1)
    assert arrays["y_train"].shape == (plans.SAMPLES, *label)
    if label:
        assert np.array_equal(arrays["x_train"], arrays["x_train"].astype(int))


@pytest.mark.slow
def test_plan_table_has_every_plan_and_its_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = []

    class Contestant:
        """Takes as long as its place among the contestants says."""

        def __init__(self, *given: object) -> None:
            names.append(str(given))
            self._place = len(names)

        def __call__(self) -> Times:
            return Times(10.0 * self._place, 5.0 * self._place)

    small = Network(
        ("model=mlp", "model.hidden=[16,16]", "train.batch_size=64"),
        (8, 8),
        (),
        64,
        NETWORKS["mlp"].strategies,
    )
    monkeypatch.setattr(plans, "Contestant", Contestant)
    monkeypatch.setattr(plans, "NETWORKS", {"small": small})
    monkeypatch.setattr(sys, "argv", ["plans", "--rounds=3"])
    plans.main()
    said = capsys.readouterr().out
    assert "python -m benchmarks.plans --networks small --steps 4 --rounds 3\n" in said
    rows = [line for line in said.splitlines() if line.startswith(("| 8 x", "| 4", "| 2", "| 1 x"))]
    assert len(rows) == len(names) > 5
    assert rows[0].endswith("| 10 | 10 to 10 | 5 |")
    assert "Kendall's tau of the prediction and the clock's median: " in said
