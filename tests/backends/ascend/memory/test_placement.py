"""Offsets by best fit, on blocks whose best places are known by hand."""

from __future__ import annotations

from pipeline.backends.ascend.memory.placement import Block, pack_blocks, sum_live_bytes


def test_tightest_gap_is_used() -> None:
    """When the blocks of 100 and 80 are gone, a block of 70 finds gaps of 100 and 80."""
    blocks = (Block(100, 0, 1), Block(90, 0, 3), Block(80, 0, 1), Block(75, 0, 3), Block(70, 1, 3))
    packing = pack_blocks(blocks, int(sum_live_bytes(blocks, 3).max()))
    assert packing.offsets == (0, 100, 190, 270, 190)
    assert packing.extent_bytes == 345


def test_blocks_with_disjoint_lifetimes_share_an_offset() -> None:
    blocks = tuple(Block(512, birth, birth + 1) for birth in range(50))
    packing = pack_blocks(blocks, 512)
    assert set(packing.offsets) == {0}
    assert packing.extent_bytes == 512


def test_second_heuristic_is_used_if_better() -> None:
    """By size, 6 and 5 go to the bottom, 4 onto the 6 and 3 onto the 4: 13. By area it is 12."""
    blocks = (Block(4, 0, 4), Block(3, 3, 7), Block(5, 3, 6), Block(6, 1, 2))
    assert int(sum_live_bytes(blocks, 7).max()) == 12
    assert pack_blocks(blocks, 13).offsets == (6, 10, 0, 0)
    better = pack_blocks(blocks, 12)
    assert (better.offsets, better.extent_bytes) == ((0, 9, 4, 4), 12)


def test_ties_are_broken_by_index() -> None:
    blocks = tuple(Block(512, 0, 2) for _ in range(5))
    assert pack_blocks(blocks, 2560).offsets == (0, 512, 1024, 1536, 2048)


def test_empty_packing_takes_no_memory() -> None:
    assert pack_blocks((), 0).extent_bytes == 0
    assert sum_live_bytes((), 2).tolist() == [0, 0]
