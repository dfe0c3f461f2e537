"""Layouts, and the collectives between them."""

from __future__ import annotations

from pipeline.backends.planner.dimension_groups import (
    Collective,
    Mesh,
    convert_region_layout,
    find_transfer,
    list_layouts,
    list_meshes,
)

MESH = Mesh(2, 4)
REPLICATED = (None, None)


def test_meshes_are_all_factorisations() -> None:
    assert [str(mesh) for mesh in list_meshes(8)] == ["8 x 1", "4 x 2", "2 x 4", "1 x 8"]
    assert len(list_meshes(1024)) == 11


def test_layouts_shard_data_by_samples_in_equal_pieces() -> None:
    assert list_layouts((8, 6), MESH, 0) == (REPLICATED, (None, 0), (0, None), (0, 0))
    assert list_layouts((8, 8), Mesh(1, 4), None) == (REPLICATED, (None, 0), (None, 1))


def test_array_layout_follows_its_region() -> None:
    assert convert_region_layout((0, 2), (2, None, 0)) == (2, 0)
    assert convert_region_layout((0, 2), (1,)) == REPLICATED


def test_layout_change_of_one_axis_is_one_collective() -> None:
    cases = {
        ((0, None), (), REPLICATED): ("all_gather", 100, (0,)),
        (REPLICATED, (1,), REPLICATED): ("all_reduce", 100, (1,)),
        (REPLICATED, (1,), (None, 1)): ("reduce_scatter", 100, (1,)),
        ((None, 0), (), (None, 1)): ("all_to_all", 25, (1,)),
        ((0, 1), (), (0, None)): ("all_gather", 50, (1,)),
        ((0, 0), (), REPLICATED): ("all_gather", 100, (0, 1)),
        (REPLICATED, (0, 1), REPLICATED): ("all_reduce", 100, (0, 1)),
    }
    for given, collective in cases.items():
        assert find_transfer(*given, 100, MESH) == (Collective(*collective),)


def test_slice_needs_no_collective() -> None:
    assert find_transfer(REPLICATED, (), (0, 1), 100, MESH) == ()


def test_layout_change_of_the_outer_axis_gathers_over_both() -> None:
    assert find_transfer((0, 0), (), (0, None), 80, MESH) == (Collective("all_gather", 40, (1,)),)
    assert find_transfer((0, 0), (), (None, 0), 80, MESH) == (Collective("all_gather", 80, (0, 1)),)


def test_matmul_transpose_softmax_takes_one_all_to_all() -> None:
    """MindSpore's test_alltoall: samples sharded before, features after."""
    steps = find_transfer((None, 0), (), (None, 1), 64, Mesh(1, 8))
    assert [step.kind for step in steps] == ["all_to_all"]
