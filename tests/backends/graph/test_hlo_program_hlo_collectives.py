"""Collectives read off the text of compiled programs."""

from __future__ import annotations

from pipeline.backends.graph.hlo_program import (
    CompiledCollective,
    read_collectives,
)

TEXT = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %all-reduce.4 = (f32[1024]{0}, bf16[512,256]{1,0}, f32[]) all-reduce(%a, %b, %c), channel_id=1, \
replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, use_global_device_ids=true, to_apply=%add
  %all-reduce.5 = f32[256]{0} all-reduce(%d), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %all-gather = s32[64]{0} all-gather(%e), replica_groups=[4,2]<=[8], dimensions={0}
  %reduce-scatter.1 = f32[16]{0} reduce-scatter(%f), replica_groups=[1,8]<=[8], dimensions={0}
  %all-to-all.1 = (f32[1,8]{1,0}, f32[1,8]{1,0}) all-to-all(%g, %h), replica_groups={{0,1}}
  ROOT %permute = pred[1,8]{1,0} collective-permute(%i), source_target_pairs={{0,1},{1,0}}
  %other = f32[8]{0} add(%all-reduce.5, %all-gather), metadata={op_name="all-reduce(x)"}
}
"""


def test_collectives_have_kind_group_size_and_bytes() -> None:
    assert read_collectives(TEXT) == (
        CompiledCollective("all_gather", 2, 1, 256),
        CompiledCollective("all_reduce", 4, 2, 1024 * 4 + 512 * 256 * 2 + 4 + 1024),
        CompiledCollective("all_to_all", 2, 1, 64),
        CompiledCollective("reduce_scatter", 8, 1, 8 * 64),
        CompiledCollective("send", 2, 1, 8),
    )


def test_group_size_is_the_product_of_mesh_axes() -> None:
    mesh = "mesh['axis_0'=2,'axis_1'=3,'axis_2'=4]"
    line = f"  %x = f32[2]{{0}} all-reduce(%a), replica_groups={mesh} {{'axis_0','axis_2'}}, b=c"
    assert read_collectives(line) == (CompiledCollective("all_reduce", 8, 1, 8),)


def test_empty_groups_are_all_devices() -> None:
    line = "  %x = f32[2]{0} all-reduce(%a), replica_groups={}, to_apply=%add"
    text = f"HloModule jit_f, is_scheduled=true, replica_count=2, num_partitions=4\n\n{line}"
    assert read_collectives(text) == (CompiledCollective("all_reduce", 8, 1, 8),)


def test_async_collective_is_counted_once() -> None:
    lines = """
  %s = (f32[2]{0}, f32[16]{0}) all-gather-start(%a), replica_groups=[1,8]<=[8], dimensions={0}
  %d = f32[16]{0} all-gather-done(%s)
  %t = f32[4]{0} all-reduce-start(%b), replica_groups=[1,8]<=[8], to_apply=%add
  %e = f32[4]{0} all-reduce-done(%t)
  %u = ((f32[16]{0}), f32[2]{0}) reduce-scatter-start(%c), replica_groups=[1,8]<=[8]
  %v = ((f32[4]{0}, f32[4]{0}), (f32[4]{0}, f32[4]{0}), s32[]) all-to-all-start(%f, %g), \
replica_groups={{0,1}}
  %w = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%h), \
source_target_pairs={{0,1},{1,0}}
  %x = (f32[], f32[], u32[], u32[]) collective-permute-start(%i), source_target_pairs={{0,1},{1,0}}
"""
    assert read_collectives(lines) == (
        CompiledCollective("all_gather", 8, 1, 64),
        CompiledCollective("all_reduce", 8, 1, 16),
        CompiledCollective("all_to_all", 2, 1, 32),
        CompiledCollective("reduce_scatter", 8, 1, 64),
        CompiledCollective("send", 2, 2, 12 + 4),
    )
