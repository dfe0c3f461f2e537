"""Times of collectives over the links of a cluster, and the grouping of gradients into all-reduces.

Times are without the launch of a collective: the caller adds `Hardware.collective_launch_us`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Literal, get_args

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import OptionError
from pipeline.backends.rates import CollectiveKind, DeviceGroup, GroupError

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that communicate with one another, such as those along one axis of a mesh.

    Each server of the group has `per_server` of its `size` devices. Groups that communicate at the
    same time are priced as if they shared no link.

    Raises OptionError for a number below 1, or servers with unequal numbers of devices.
    """

    size: int
    per_server: int

    def __post_init__(self) -> None:
        for name in ("size", "per_server"):
            if getattr(self, name) < 1:
                raise OptionError(f"group.{name} = {getattr(self, name)}: must be at least 1")
        if self.size % self.per_server:
            raise OptionError(
                f"group.size = {self.size}: must be a multiple of the {self.per_server} devices in "
                "each server"
            )

    @property
    def servers(self) -> int:
        """Number of servers that have devices of the group."""
        return self.size // self.per_server


def form_cluster(devices: int, hw: Hardware) -> Group:
    """Return the group of all devices. Raises OptionError as `check_devices` does."""
    check_devices(devices, hw)
    return Group(devices, min(devices, int(hw.devices_per_server_count)))


def find_mesh_groups(sizes: Mapping[str, int], hw: Hardware) -> dict[str, Group]:
    """Return the group of a device along each axis of a mesh.

    `sizes` are the numbers of devices along the axes. Devices are numbered as the elements of a C
    array: neighbours along the last axis have neighbouring numbers, and share a server.

    Raises OptionError as `check_devices` does, and if servers divide an axis unevenly.
    """
    devices = prod(sizes.values())
    check_devices(devices, hw)
    in_server = min(devices, int(hw.devices_per_server_count))
    groups = {}
    stride = 1
    for axis, size in reversed(list(sizes.items())):
        # A server holds complete groups, equal parts of a group, or one device of each group.
        per_server = min(size, max(1, in_server // stride))
        block = stride * per_server
        if size % per_server or (in_server % block and per_server > 1):
            raise OptionError(
                f"mesh.{axis} = {size}: devices {stride} apart are uneven among servers of "
                f"{in_server}; {size} and {stride} must divide {in_server} or be multiples of it"
            )
        groups[axis] = Group(size, per_server)
        stride *= size
    return {axis: groups[axis] for axis in sizes}


def collective_us(kind: Collective, nbytes: float, group: Group, hw: Hardware) -> float:
    """Return the microseconds of one collective over a group; 0 for a group of one device.

    `nbytes` is the size of the complete array, also if each device holds a part of it:

    * all_reduce: the array before and after the collective;
    * all_gather: the gathered array; each device starts with 1 / size of it;
    * reduce_scatter: the array before; each device ends with 1 / size of it;
    * all_to_all: the array of each device before and after;
    * send: the array that each device sends to its neighbour.

    Formulas are from HCCL's guide ("Algorithm Overview", hicann/hccl `coll_algo_intro`). A ring of
    n takes 2 (n - 1) hops and carries 2 (n - 1) / n of the data over each link. Short messages use
    doubling, log2(n) hops with all the data. Over several servers: reduce-scatter in each server,
    an all-reduce of each device's share between servers (halving and doubling, NHR if their number
    isn't a power of two), all-gather in each server.

    All-gather and reduce-scatter are the halves of an all-reduce. For short messages the halves of
    doubling are used, though an all-gather takes up to log2(n) / 2 hops more. All-to-all is
    pairwise: (n - 1) rounds with 1 / n of the bytes, over HCCS within a server, else over the
    device's RoCE port. A send takes one hop, over RoCE if any neighbours are in different servers.

    Raises OptionError for an unknown kind, bytes below 0, or a group that servers can't hold.
    """
    if kind not in get_args(Collective):
        raise OptionError(
            f"collective = {kind!r}: must be one of {', '.join(get_args(Collective))}"
        )
    if nbytes < 0:
        raise OptionError(f"nbytes = {nbytes}: must be at least 0")
    per_server = int(hw.devices_per_server_count)
    if group.per_server > per_server:
        raise OptionError(f"group.per_server = {group.per_server}: must be at most {per_server}")
    if group.size == 1:
        return 0.0
    if kind == "all_to_all":
        return _compute_all_to_all_us(nbytes, group, hw)
    if kind == "send":
        if group.servers > 1:
            return hw.roce_hop_us + nbytes / (hw.roce_gb_per_s * 1e3)
        return hw.hccs_pair_hop_us + nbytes / (hw.hccs_pair_gb_per_s * 1e3)
    reduce_us = _compute_all_reduce_us(nbytes, group, hw)
    return reduce_us if kind == "all_reduce" else reduce_us / 2


def all_reduce_us(nbytes: int, devices: int, hw: Hardware) -> float:
    """Return the microseconds of an all-reduce over all devices.

    Raises OptionError as `check_devices` does, and for nbytes below 0.
    """
    return collective_us("all_reduce", nbytes, form_cluster(devices, hw), hw)


def check_devices(devices: int, hw: Hardware) -> None:
    """Check the number of devices of a cluster.

    Raises OptionError for a number below 1, or if the devices don't fill all their servers.
    """
    per_server = int(hw.devices_per_server_count)
    if devices < 1:
        raise OptionError(f"devices = {devices}: must be at least 1")
    if devices > per_server and devices % per_server:
        below = devices // per_server * per_server
        raise OptionError(
            f"devices = {devices}: must fill whole servers of {per_server} devices, as {below} or "
            f"{below + per_server} would"
        )


def _compute_all_reduce_us(nbytes: float, group: Group, hw: Hardware) -> float:
    """Return the microseconds in servers, over HCCS, plus those between servers, over RoCE."""
    if group.servers == 1:
        return _compute_server_us(nbytes, group.size, hw)
    in_server_us = 0.0
    if group.per_server == 2:
        in_server_us = _compute_pair_us(nbytes, hw)
    elif group.per_server > 2:
        in_server_us = _compute_ring_us(nbytes, group.per_server, hw)
    hops = 2 * (group.servers - 1).bit_length()
    carried = 2 * (group.servers - 1) / group.servers * (nbytes / group.per_server)
    between_us = hops * hw.roce_hop_us + carried / (hw.roce_gb_per_s * 1e3)
    if group.size <= hw.devices_per_server_count:
        # A few hops between servers may be faster by the fitted figures than a ring in a server. So
        # the time of the same devices in one server is a lower bound.
        least_us = _compute_server_us(nbytes, group.size, hw)
        between_us = max(between_us, least_us - in_server_us)
    return in_server_us + between_us


def _compute_server_us(nbytes: float, devices: int, hw: Hardware) -> float:
    """Return the microseconds of an all-reduce in one server: a pair, a ring or doubling."""
    if devices <= 2:
        return _compute_pair_us(nbytes, hw) if devices == 2 else 0.0
    doubling_us = hw.hccs_hop_us + nbytes / (hw.hccs_pair_gb_per_s * 1e3)
    return min(_compute_ring_us(nbytes, devices, hw), (devices - 1).bit_length() * doubling_us)


def _compute_pair_us(nbytes: float, hw: Hardware) -> float:
    """Return the microseconds of an all-reduce of two devices, whose bytes all take the one link
    between them: long messages take longer than among three."""
    return 2 * hw.hccs_pair_hop_us + nbytes / (hw.hccs_pair_gb_per_s * 1e3)


def _compute_ring_us(nbytes: float, devices: int, hw: Hardware) -> float:
    steps = 2 * (devices - 1)
    return steps * hw.hccs_hop_us + nbytes * steps / devices / (hw.hccs_bus_gb_per_s * 1e3)


def _compute_all_to_all_us(nbytes: float, group: Group, hw: Hardware) -> float:
    num_in_server = group.per_server - 1
    num_outside = group.size - group.per_server
    hop_us = hw.hccs_pair_hop_us if group.size == 2 else hw.hccs_hop_us
    part = nbytes / group.size
    in_server_us = num_in_server * (hop_us + part / (hw.hccs_pair_gb_per_s * 1e3))
    return in_server_us + num_outside * (hw.roce_hop_us + part / (hw.roce_gb_per_s * 1e3))


def form_buckets(fusion: Sequence[int] | None, rounds: Sequence[int]) -> list[list[int]]:
    """Return the gradients of each all-reduce, as indices in the order in which they are ready.

    `fusion` is MindSpore's `all_reduce_fusion_config`: each index is the last parameter of a
    segment, counted from the network's input. The remaining parameters are one more segment:
    `[85, 160]` on 161 parameters makes two. The backward pass begins at the network's output, so
    the last segment is ready first. None: one segment.

    `rounds[i]` is the number of updates before gradient i is computed. An all-reduce has gradients
    of one round, since one of two optimizers may update before the other.

    Raises OptionError for indices that don't ascend, or that no parameter has.
    """
    count = len(rounds)
    if not count:
        return []
    ends = list(fusion or ())
    for before, index in zip((-1, *ends), ends, strict=False):
        if index <= before or index >= count:
            raise OptionError(
                f"all_reduce_fusion = {ends}: must ascend and stay below {count}, the number of "
                f"parameters; {index} doesn't"
            )
    if not ends or ends[-1] != count - 1:
        ends.append(count - 1)
    begins = [0, *(end + 1 for end in ends[:-1])]
    segments = (
        range(count - 1 - end, count - begin)
        for begin, end in zip(reversed(begins), reversed(ends), strict=True)
    )
    return [
        list(indices)
        for segment in segments
        for _, indices in groupby(segment, key=rounds.__getitem__)
    ]


@dataclass(frozen=True, slots=True)
class AscendRates:
    """Rates of an Ascend chip: its cubes and memory, and HCCL's formulas for its links.

    Arguments are bytes of float32 arrays. The chip computes in float16, half the bytes, and
    all-reduces gradients in float32.
    """

    hardware: Hardware
    cube_share: float = 0.5
    """Share of the cubes' peak that products of a training step reach; assumed."""
    exposed_share: float = 1.0
    """As in `Rates`: 1 for one all-reduce after the backward pass. MindSpore's [85, 160] on
    ResNet-50 has 0.63: it shortens the step from 23.61 to 22.00 ms, and the all-reduce takes
    4.40 ms."""
    scatters_sums: bool = True

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory for parameters and activations."""
        hw = self.hardware
        return (hw.parameter_memory_gib + hw.feature_map_memory_gib) * 2**30

    def slowdown(self, devices: int) -> float:
        """Return 1, as no two devices share a chip."""
        return 1.0

    def compute_us(self, flops: float, nbytes: float) -> float:
        """Return the microseconds of one kernel in float16 on the cubes."""
        hw = self.hardware
        cube_us = flops / 2 / (hw.peak_fp16_macs_per_us * self.cube_share)
        return max(cube_us, nbytes / 2 / hw.hbm_bytes_per_us)

    def collective_us(self, kind: CollectiveKind, nbytes: float, group: DeviceGroup) -> float:
        """Return the microseconds of a collective, with its launch.

        Raises GroupError for a group that servers can't hold.
        """
        hw = self.hardware
        if group.size == 1:
            return 0.0
        per_server = int(hw.devices_per_server_count)
        in_server = max(1, per_server // group.stride)
        is_across = group.size * group.stride > per_server
        if is_across and in_server > 1 and per_server % (in_server * group.stride):
            raise GroupError(
                f"{group.size} devices, {group.stride} apart: are uneven among servers of "
                f"{per_server}"
            )
        try:
            linked = Group(group.size, min(group.size, in_server))
        except OptionError as error:
            raise GroupError(str(error)) from error
        return hw.collective_launch_us + collective_us(kind, nbytes, linked, hw)
