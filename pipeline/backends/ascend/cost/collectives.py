"""Times of all-reduces, and the grouping of gradients into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import OptionError

Algorithm = Literal["none", "pair", "ring", "doubling", "hierarchical"]
Gradient = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Time of one all-reduce: `in_server_us` over HCCS, `between_us` over RoCE."""

    algorithm: Algorithm
    in_server_us: float = 0.0
    between_us: float = 0.0

    @property
    def us(self) -> float:
        """Microseconds over both kinds of link."""
        return self.in_server_us + self.between_us


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are all-reduced together, as indices in the order in which they are ready."""

    gradients: tuple[int, ...]
    nbytes: int


def all_reduce_us(nbytes: int, devices: int, hw: Hardware) -> float:
    """Return the time of one all-reduce of `nbytes` a device over `devices` devices.

    Raises:
        OptionError: devices below 1, or more than a server and no whole number of servers.
    """
    return all_reduce(nbytes, devices, hw).us


def all_reduce(nbytes: int, devices: int, hw: Hardware) -> AllReduce:
    """Return the time of one all-reduce, by the kind of link.

    The formulas are those of HCCL's guide ("Algorithm Overview"): a ring of n takes 2 (n - 1) hops
    and carries 2 (n - 1) / n of the data over each link. Short messages go by doubling, log2(n)
    hops with all the data. Over several servers: reduce-scatter in each server, an all-reduce of
    each device's share between servers (halving and doubling, NHR if their number is no power of
    two), all-gather in each server.

    Raises:
        OptionError: as `all_reduce_us`; or nbytes below 0.
    """
    check_devices(devices, hw)
    if nbytes < 0:
        raise OptionError(f"an all-reduce of {nbytes} bytes: should be 0 or more")
    per_server = int(hw.devices_per_server_count)
    if devices <= per_server:
        return _in_server(nbytes, devices, hw)
    servers = devices // per_server
    in_server = _ring_us(nbytes, per_server, hw)
    between = _between_servers_us(nbytes / per_server, servers, hw)
    return AllReduce("hierarchical", in_server, between)


def check_devices(devices: int, hw: Hardware) -> None:
    """Check that a cluster can have this number of devices. Raises OptionError."""
    per_server = int(hw.devices_per_server_count)
    if devices < 1:
        raise OptionError(f"devices: {devices} should be at least 1")
    if devices > per_server and devices % per_server:
        below = devices // per_server * per_server
        raise OptionError(
            f"devices: {devices} is no whole number of servers of {per_server}; "
            f"{below} and {below + per_server} are"
        )


def _in_server(nbytes: int, devices: int, hw: Hardware) -> AllReduce:
    if devices == 1:
        return AllReduce("none")
    if devices == 2:
        return AllReduce("pair", _pair_us(nbytes, hw))
    ring = _ring_us(nbytes, devices, hw)
    doubling = (devices - 1).bit_length() * (
        hw.hccs_hop_us + nbytes / (hw.hccs_pair_gb_per_s * 1e3)
    )
    if doubling < ring:
        return AllReduce("doubling", doubling)
    return AllReduce("ring", ring)


def _pair_us(nbytes: int, hw: Hardware) -> float:
    return 2 * hw.hccs_pair_hop_us + nbytes / (hw.hccs_pair_gb_per_s * 1e3)


def _ring_us(nbytes: float, devices: int, hw: Hardware) -> float:
    steps = 2 * (devices - 1)
    return steps * hw.hccs_hop_us + nbytes * steps / devices / (hw.hccs_bus_gb_per_s * 1e3)


def _between_servers_us(nbytes: float, servers: int, hw: Hardware) -> float:
    hops = 2 * (servers - 1).bit_length()
    carried = 2 * (servers - 1) / servers * nbytes
    return hops * hw.roce_hop_us + carried / (hw.roce_gb_per_s * 1e3)


def buckets(gradients: Sequence[Gradient], fusion: Sequence[int] | None) -> tuple[Bucket, ...]:
    """Return the gradients that are all-reduced together, in the order in which they are ready.

    `fusion` is MindSpore's `all_reduce_fusion_config`: each index is the last parameter of a
    segment, counted from the network's input, and the rest is one more segment (`[85, 160]` on 161
    parameters makes two). The backward pass computes gradients from the network's output, so the
    last segment is ready first. None is one all-reduce.

    Raises:
        OptionError: indices that don't grow, or are no parameter's.
    """
    count = len(gradients)
    if not count:
        return ()
    ends = list(_check_fusion(fusion, count)) if fusion else []
    if not ends or ends[-1] != count - 1:
        ends.append(count - 1)
    begins = [0, *(end + 1 for end in ends[:-1])]
    return tuple(
        _bucket(gradients, range(count - 1 - end, count - begin))
        for begin, end in zip(reversed(begins), reversed(ends), strict=True)
    )


def _bucket(gradients: Sequence[Gradient], members: Sequence[int]) -> Bucket:
    return Bucket(tuple(members), sum(gradients[index][1] for index in members))


def split_rounds(
    bucket: Bucket, gradients: Sequence[Gradient], rounds: Sequence[int]
) -> tuple[Bucket, ...]:
    """Split a bucket by round, as with two optimizers of which one updates before the other.

    `rounds[i]` counts the rounds of updates that are over before gradient i is computed.
    """
    groups = groupby(bucket.gradients, key=rounds.__getitem__)
    return tuple(_bucket(gradients, tuple(members)) for _, members in groups)


def _check_fusion(fusion: Sequence[int], count: int) -> Sequence[int]:
    for before, index in zip((-1, *fusion), fusion, strict=False):
        if index <= before or index >= count:
            raise OptionError(
                f"all_reduce_fusion: {list(fusion)} should grow and stay below {count}, the "
                f"number of parameters; {index} does not"
            )
    return fusion
