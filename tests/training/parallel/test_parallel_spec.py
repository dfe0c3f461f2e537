"""Numbers of devices, and rules that cut dimensions, as a recipe names them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.training.parallel.parallel_spec import MAX_DEVICES, MeshSpec, ShardingSpec
from tests.training.parallel.test_parallel_spec_shards import parallel


@pytest.mark.parametrize(
    ("fields", "sizes", "devices"),
    [
        ({"devices": None}, {"data": 1, "model": 1}, 1),
        ({"devices": 4}, {"data": 4, "model": 1}, 4),
        ({"devices": None, "mesh": {"data": 2, "model": 3}}, {"data": 2, "model": 3}, 6),
    ],
)
def test_mesh_sizes_and_number_of_devices(
    fields: dict[str, Any], sizes: dict[str, int], devices: int
) -> None:
    spec = parallel(**fields)
    assert (spec.mesh_sizes, spec.num_devices) == (sizes, devices)


def test_batch_parts_are_devices_of_the_batch_axes() -> None:
    mesh = MeshSpec(data=2, model=3)
    assert parallel(mesh=mesh).batch_parts == 2
    assert parallel(mesh=mesh, batch_axes=("data", "model")).batch_parts == 6


def test_entries_list_the_axes_of_each_dimension() -> None:
    rule = ShardingSpec(pattern="dense_*/kernel", axes=("model", None, ("data",)))
    assert rule.entries == (("model",), (), ("data",))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("model", "model"), "an axis can shard only one dimension"),
        ((("data", "model"), "data"), "an axis can shard only one dimension"),
        (("rows",), "Input should be"),
    ],
)
def test_invalid_sharding_rule_is_refused(axes: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ShardingSpec(pattern="dense", axes=axes)


@pytest.mark.parametrize("size", [0, MAX_DEVICES + 1])
def test_impossible_mesh_size_is_refused(size: int) -> None:
    with pytest.raises(ValidationError):
        MeshSpec(data=size)
