"""Where buffers lie: closed forms by hand, laws on any graph, brute force on tiny ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from time import process_time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.chip_files import load_chip
from pipeline.backends.ascend.chip.hardware import Hardware, extract_hardware
from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.memory.memory_plan import GIB, MemoryPlan, plan_memory
from pipeline.backends.ascend.memory.placement import find_lifetimes
from tests.backends.ascend.memory_graphs import buffer, chain, graphs, task

HW = extract_hardware(load_chip("ascend910"))


@pytest.fixture
def hw() -> Hardware:
    return HW


def overlapping(plan: MemoryPlan) -> list[tuple[int, int]]:
    """Every pair of buffers that share a byte of a pool during a task, by looking at all pairs."""
    found = []
    for one, other in product(plan.placements, repeat=2):
        if one.buffer < other.buffer and one.pool == other.pool:
            together = max(one.birth, other.birth) < min(one.death, other.death)
            ends = (placed.offset_bytes + placed.nbytes for placed in (one, other))
            if together and max(one.offset_bytes, other.offset_bytes) < min(ends):
                found.append((one.buffer, other.buffer))
    return found


@pytest.mark.slow
@given(graphs(), st.sampled_from([1, 2]))
def test_live_buffers_never_overlap(graph: TaskGraph, devices: int) -> None:
    plan = plan_memory(graph, HW, devices)
    assert overlapping(plan) == []
    assert all(placed.offset_bytes % 512 == placed.nbytes % 512 == 0 for placed in plan.placements)


def test_owners_store_parts_and_gather_the_parameters() -> None:
    """Parameters and momentum are an eighth; whole parameters live up to their last pass."""
    graph = chain(batch=4, layers=3, width=4096)
    fields = {"parameter": "params", "state": "opt_state"}
    named = [replace(b, name=f"{fields.get(b.role, b.role)}/{b.name}") for b in graph.buffers]
    graph = replace(graph, buffers=tuple(named))
    whole = plan_memory(graph, HW, 8)
    shared = plan_memory(graph, HW, 8, num_shards=8)
    assert shared.pools["parameters"].used_bytes * 8 == whole.pools["parameters"].used_bytes
    assert shared.pools["communication"] == whole.pools["communication"]
    gathered = [p for p in shared.placements if p.component == "parameters" and p.birth == 0]
    in_feature_maps = [p for p in gathered if p.pool == "feature maps"]
    assert [(p.nbytes, p.death) for p in in_feature_maps] == [(8192, 6), (8192, 5), (8192, 4)]
    assert overlapping(shared) == []
    unnamed = plan_memory(chain(batch=4, layers=3, width=4096), HW, 8)
    assert unnamed == plan_memory(chain(batch=4, layers=3, width=4096), HW, 8, num_shards=8)


@pytest.mark.parametrize(
    ("place", "divisor"),
    [
        ("features/average", 8),
        ("features/swa/evaluated", 8),
        ("features/lawa/ends/1", 8),
        ("features/ledger/losses", 1),
    ],
)
def test_copies_of_parameters_are_in_parts_as_these_are(place: str, divisor: int) -> None:
    graph = chain(batch=4, layers=3, width=4096)

    def rename(name: str, role: str) -> str:
        name = name.replace("momentum", "other" if divisor == 1 else "weight")
        return f"{place}/{name}" if role == "state" else f"params/{name}"

    graph = replace(
        graph,
        buffers=tuple(
            replace(b, name=rename(b.name, b.role)) if b.role in ("state", "parameter") else b
            for b in graph.buffers
        ),
    )
    whole, shared = (plan_memory(graph, HW, 8, num_shards=count) for count in (1, 8))
    copied_bytes = 3 * 2 * 4096
    assert whole.components["state"] == copied_bytes
    assert shared.components["state"] == copied_bytes // divisor


@pytest.mark.slow
@given(graphs(), st.sampled_from([1, 8]))
def test_plan_extent_covers_the_live_bytes(graph: TaskGraph, devices: int) -> None:
    plan = plan_memory(graph, HW, devices)
    for pool, use in plan.pools.items():
        inside = [placed for placed in plan.placements if placed.pool == pool]
        end = max((placed.offset_bytes + placed.nbytes for placed in inside), default=0)
        assert use.lower_bound_bytes <= use.used_bytes
        assert end <= use.used_bytes <= end + 512, "a guard may lie behind the last gradient"
    assert sum(plan.components.values()) == max(plan.live_bytes) == plan.live_bytes[plan.peak_task]
    assert max(plan.live_bytes) <= plan.lower_bound_bytes <= plan.used_bytes


@pytest.mark.slow
@given(graphs())
def test_live_bytes_are_allocated_minus_freed_bytes(graph: TaskGraph) -> None:
    plan = plan_memory(graph, HW)
    live = 0
    for position, told in enumerate(plan.live_bytes):
        live += sum(placed.nbytes for placed in plan.placements if placed.birth == position)
        assert live == told
        live -= sum(placed.nbytes for placed in plan.placements if placed.death == position + 1)
    assert live == 0, "every byte is freed"


@pytest.mark.slow
@given(graphs())
def test_buffers_of_a_task_are_placed_while_it_runs(graph: TaskGraph) -> None:
    places = {placed.buffer: placed for placed in plan_memory(graph, HW).placements}
    for position, each in enumerate(graph.tasks):
        for index in {*each.reads, *each.writes}:
            while index in graph.aliases:
                index = graph.aliases[index]
            if graph.buffers[index].nbytes:
                assert places[index].birth <= position < places[index].death
                assert places[index].nbytes >= graph.buffers[index].nbytes
    assert not set(places) & set(graph.aliases), "an update in place takes no memory"


@pytest.mark.slow
@given(graphs(), st.integers(1, 4000), st.data())
def test_extra_buffer_never_lowers_the_bound(
    graph: TaskGraph, nbytes: int, data: st.DataObject
) -> None:
    assume(graph.tasks)
    more = buffer(len(graph.buffers), nbytes)
    tasks = list(graph.tasks)
    for reads_it in (False, True):
        at = data.draw(st.integers(0, len(tasks) - 1))
        touched = "reads" if reads_it else "writes"
        tasks[at] = replace(tasks[at], **{touched: (*getattr(tasks[at], touched), more.index)})
    grown = replace(graph, buffers=(*graph.buffers, more), tasks=tuple(tasks))
    before, after = plan_memory(graph, HW), plan_memory(grown, HW)
    assert before.lower_bound_bytes <= after.lower_bound_bytes


@pytest.mark.medium
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(1, 3)), max_size=5))
def test_plan_is_close_to_the_brute_force_optimum(spans: list[tuple[int, int, int]]) -> None:
    """Brute force: every buffer as low as it can lie, in every order, gives the true optimum."""
    tasks = [([], [i for i, s in enumerate(spans) if s[1] == position]) for position in range(8)]
    for index, (_, birth, length) in enumerate(spans):
        if length > 1:
            tasks[birth + length - 1][0].append(index)
    graph = TaskGraph(
        buffers=tuple(buffer(i, 512 * size) for i, (size, _, _) in enumerate(spans)),
        tasks=tuple(task(reads, writes) for reads, writes in tasks),
    )
    alive = {i: set(range(birth, birth + length)) for i, (_, birth, length) in enumerate(spans)}
    best = min(_lowest(order, spans, alive) for order in permutations(range(len(spans))))
    use = plan_memory(graph, HW).pools["feature maps"]
    assert use.lower_bound_bytes <= 512 * best <= use.used_bytes
    assert use.used_bytes <= 512 * best * 1.5


def _lowest(
    order: tuple[int, ...], spans: list[tuple[int, int, int]], alive: dict[int, set[int]]
) -> int:
    """The height of a stack in units, each block at the lowest address that is free for it."""
    taken: set[tuple[int, int]] = set()
    for index in order:
        size, offset = spans[index][0], 0
        while any((t, offset + u) in taken for t in alive[index] for u in range(size)):
            offset += 1
        taken |= {(t, offset + u) for t in alive[index] for u in range(size)}
    return max((unit + 1 for _, unit in taken), default=0)


def test_memory_of_a_chain_matches_hand_calculation(hw: Hardware) -> None:
    """A layer's weight is 512 bytes, an activation 1024; a read lives until its task ends."""
    buffers = (
        buffer(0, 1000, "input"),
        buffer(1, 512, "parameter"),
        buffer(2, 1024),
        buffer(3, 1024),
        buffer(4, 1, "output"),
    )
    graph = TaskGraph(
        buffers=buffers,
        tasks=(task([0, 1], [2]), task([2], [3]), task([3], [4])),
        inputs=(0,),
        parameters=(1,),
        outputs=(4,),
    )
    assert find_lifetimes(graph) == {0: (0, 1), 1: (0, 3), 2: (0, 2), 3: (1, 3), 4: (2, 3)}
    plan = plan_memory(graph, hw)
    assert plan.live_bytes == (512 + 2048, 512 + 2048, 512 + 1024 + 512)
    assert plan.pools["parameters"].used_bytes == 512
    assert plan.pools["feature maps"].used_bytes == 2048
    assert plan.peak_task == 0
    assert plan.used_bytes == plan.lower_bound_bytes
    assert {name: size for name, size in plan.components.items() if size} == {
        "parameters": 512,
        "workspace and casts": 1024,
        "input": 1024,
    }


def test_memory_of_a_network_matches_hand_calculation(hw: Hardware) -> None:
    """At the peak all activations are live, with two gradients of activations and one input."""
    plan = plan_memory(chain(batch=64, layers=6, width=1024), hw)
    assert plan.peak_task in (6, 7)
    assert plan.components["parameters"] == plan.components["state"] == 6 * 2048
    assert plan.components["saved activations"] >= 5 * 64 * 2048
    assert plan.components["input"] == 64 * 2048
    assert plan.used_bytes < 1.02 * plan.lower_bound_bytes


def test_loop_inputs_and_outputs_live_until_the_loop_ends() -> None:
    repeated = [task([0, 1], [2], repeat=5), task([2], [3], repeat=5), task([3], [4], repeat=5)]
    graph = TaskGraph(
        buffers=tuple(buffer(i, 512) for i in range(6)),
        tasks=(task([], [0, 1]), *repeated, task([3], [5])),
    )
    alive = find_lifetimes(graph)
    assert alive[0] == alive[1] == (0, 4), "read by the first of the loop, needed by every round"
    assert alive[2] == (1, 3), "made and used inside"
    assert alive[3] == (1, 5), "used behind the loop"


def test_scan_of_no_iterations_does_not_end_the_loop_around_it() -> None:
    inside = [task([0], [1], repeat=5), task([1], [2], repeat=0), task([1], [3], repeat=5)]
    graph = TaskGraph(
        buffers=tuple(buffer(i, 512) for i in range(4)),
        tasks=(task([], [0]), *inside, task([3], [])),
    )
    assert find_lifetimes(graph)[0] == (0, 4)


def test_in_place_update_takes_no_memory(hw: Hardware) -> None:
    buffers = (buffer(0, 4096, "parameter"), buffer(1, 4096), buffer(2, 4096, "output"))
    graph = TaskGraph(
        buffers=buffers, tasks=(task([0], [1]), task([0, 1], [2])), parameters=(0,), outputs=(2,)
    )
    apart = plan_memory(graph, hw)
    shared = plan_memory(replace(graph, aliases={2: 0}), hw)
    assert (apart.used_bytes, shared.used_bytes) == (3 * 4096, 2 * 4096)


def test_slice_shares_the_memory_of_its_array(hw: Hardware) -> None:
    """A scan stacks five slices of 512 bytes; they are read again by a scan after it."""
    slices = (replace(buffer(1, 512), within=0), replace(buffer(2, 512), within=0))
    graph = TaskGraph(
        buffers=(buffer(0, 2560), *slices, buffer(3, 512)),
        tasks=(
            task([], [3]),
            task([3], [1], repeat=5),
            task([], [3]),
            task([2], [3], "backward", repeat=5),
        ),
    )
    (stacked, _) = plan_memory(graph, hw).placements
    assert (stacked.buffer, stacked.nbytes, stacked.birth, stacked.death) == (0, 2560, 1, 4)
    assert stacked.component == "saved activations"


def test_jointly_reduced_gradients_are_adjacent(hw: Hardware) -> None:
    graph = chain(batch=4, layers=6, width=1000)
    places = {placed.buffer: placed for placed in plan_memory(graph, hw, 8).placements}
    gradients = [places[5 + 5 * layer] for layer in reversed(range(6))]
    assert {placed.pool for placed in gradients} == {"communication"}
    assert [placed.offset_bytes for placed in gradients] == [512 + 2048 * i for i in range(6)]
    assert len({(placed.birth, placed.death) for placed in gradients}) == 1
    assert plan_memory(graph, hw, 8).pools["communication"].used_bytes == 6 * 2048 + 2 * 512
    assert plan_memory(graph, hw, 1).pools["communication"].used_bytes == 0


def test_gradients_without_room_in_their_pool_are_with_the_feature_maps(hw: Hardware) -> None:
    graph = chain(batch=4, layers=6, width=1000)
    for nbytes, pool in ((6 * 2048 + 2 * 512, "communication"), (6 * 2048 + 512, "feature maps")):
        small = replace(hw, communication_memory_gib=nbytes / GIB)
        placements = plan_memory(graph, small, 8).placements
        pools = [placed.pool for placed in placements if placed.component == "communication"]
        assert pools == 6 * [pool]


@pytest.mark.parametrize(("gib", "verdict"), [(20, "fits"), (24, "tight"), (26.1, "out of memory")])
def test_memory_verdict_depends_on_the_pool_size(gib: float, verdict: str, hw: Hardware) -> None:
    graph = TaskGraph(buffers=(buffer(0, int(gib * GIB)),), tasks=(task([], [0]),))
    assert plan_memory(graph, hw).verdict == verdict


def test_parameters_have_a_separate_limit(hw: Hardware) -> None:
    held = TaskGraph(buffers=(buffer(0, 6 * GIB, "parameter"),), tasks=(task([0], []),))
    plan = plan_memory(held, hw)
    assert (plan.verdict, plan.tightest.pool) == ("out of memory", "parameters")


@pytest.mark.parametrize(
    ("parameters_gib", "maps_gib", "verdict", "fullest"),
    [
        (11.25, 12.94, "fits", "feature maps"),  # Stable Diffusion 1.5, three images, ran.
        (0.2, 29.1, "tight", "feature maps"),  # RCAN, 160 patches, ran.
        (4, 27.1, "out of memory", "feature maps"),
        (32, 1, "out of memory", "parameters"),
    ],
)
def test_parameters_and_feature_maps_in_one_pool(
    parameters_gib: float, maps_gib: float, verdict: str, fullest: str, hw: Hardware
) -> None:
    buffers = (buffer(0, int(parameters_gib * GIB), "parameter"), buffer(1, int(maps_gib * GIB)))
    plan = plan_memory(TaskGraph(buffers, (task([0], [1]),)), hw)
    assert plan.verdict == "out of memory"
    joined = plan.join_pools()
    assert (joined.verdict, joined.tightest.pool) == (verdict, fullest)
    assert joined.placements == plan.placements


def test_pool_limits_scale_with_device_memory(hw: Hardware) -> None:
    limits = plan_memory(chain(2), replace(hw, hbm_gib=16)).pools.values()
    assert [limit.limit_bytes / GIB for limit in limits] == [2.5, 13, 0.5]


def test_graph_without_tasks_needs_only_permanent_buffers(hw: Hardware) -> None:
    graph = TaskGraph(buffers=(buffer(0, 100, "parameter"), buffer(1, 7)), tasks=())
    assert plan_memory(graph, hw).used_bytes == 512
    assert plan_memory(TaskGraph((), ()), hw).used_bytes == 0


@pytest.mark.medium
def test_plan_of_3000_buffers_is_fast(hw: Hardware) -> None:
    """Under 100 ms of processor time; the limit leaves room for a slow machine."""
    graph = chain(batch=8, layers=600)
    begun = process_time()
    plan = plan_memory(graph, hw, 8)
    assert len(plan.placements) == 3001
    assert process_time() - begun < 1
    assert plan.used_bytes < 1.01 * plan.lower_bound_bytes
