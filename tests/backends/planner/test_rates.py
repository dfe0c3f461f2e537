"""Rates of devices and links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.ascend.cost.collectives import AscendRates, all_reduce_us
from pipeline.backends.ascend.pricing.pricing import chipset
from pipeline.backends.planner.rates import (
    LinkCurves,
    MeasuredRates,
    load_host_rates,
)
from pipeline.backends.planner.search import search
from pipeline.backends.rates import CollectiveKind, DeviceGroup, GroupError
from tests.backends.planner.networks import LinkRates, ServerRates, mlp

HARDWARE = chipset("ascend910").hardware


def test_ring_collective_time_matches_the_formula() -> None:
    links = LinkRates(message_us=3.0, bytes_per_us=100.0)
    assert links.collective_us("all_gather", 800, 4) == 3 + 6
    assert links.collective_us("all_reduce", 800, 4) == 2 * (3 + 6)
    assert links.collective_us("all_reduce", 800, 1) == 0


def test_groups_beyond_a_server_use_the_far_links() -> None:
    near, far = LinkRates(1.0, 1e3), LinkRates(10.0, 1e3)
    rates = ServerRates(1.0, 1.0, near, far, per_server=8)
    assert rates.collective_us("all_gather", 0, DeviceGroup(8)) == 1
    assert rates.collective_us("all_gather", 0, DeviceGroup(2, stride=8)) == 10


def test_emulated_chip_link_times_match_its_model() -> None:
    rates = AscendRates(HARDWARE)
    for devices in (2, 8, 64):
        modelled = HARDWARE.collective_launch_us + all_reduce_us(10**7, devices, HARDWARE)
        assert rates.collective_us("all_reduce", 10**7, DeviceGroup(devices)) == modelled
    assert rates.collective_us("all_reduce", 0, DeviceGroup(2, stride=3)) > 0
    for group in (DeviceGroup(8, stride=3), DeviceGroup(12)):
        with pytest.raises(GroupError, match="devices"):
            rates.collective_us("all_reduce", 0, group)
    strided = rates.collective_us("all_reduce", 10**7, DeviceGroup(8, stride=8))
    assert strided > rates.collective_us("all_reduce", 10**7, DeviceGroup(8))


def test_kernel_time_is_the_maximum_of_compute_and_memory_time() -> None:
    rates = MeasuredRates(10.0, 2.0, LinkRates(1.0, 1.0), cores=1)
    assert rates.compute_us(100.0, 4.0) == 10
    assert rates.compute_us(0.0, 4.0) == 2


KINDS: st.SearchStrategy[CollectiveKind] = st.sampled_from(
    ["all_reduce", "all_gather", "all_to_all"]
)
CURVES = LinkCurves(
    (100.0, 1000.0, 10_000.0),
    {
        "all_reduce": {2: (1.0, 1.0, 100.0), 8: (4.0, 4.0, 400.0)},
        "all_gather": {2: (1.0, 10.0, 100.0)},
    },
)


@pytest.mark.parametrize(
    ("kind", "nbytes", "size", "us"),
    [
        ("all_reduce", 1000, 2, 1),
        ("all_reduce", 1000, 1, 0),
        ("all_reduce", 1, 2, 1),  # below the fewest bytes it stays
        ("all_reduce", 40_000, 2, 400),  # beyond the most it grows with them
        ("all_reduce", 1000 * 10**0.5, 2, 10),  # halfway, in logarithms
        ("all_reduce", 10_000, 4, 200),
        ("all_reduce", 10_000, 64, 400),  # beyond the largest group it stays
        ("reduce_scatter", 10_000, 8, 400),
        ("all_gather", 10_000, 8, 100),
    ],
)
def test_collective_time_is_on_the_curve_of_measured_times(
    kind: CollectiveKind, nbytes: float, size: int, us: float
) -> None:
    assert CURVES.collective_us(kind, nbytes, size) == pytest.approx(us)


@given(
    st.floats(1, 1e9),
    st.floats(1, 100),
    st.integers(2, 64),
    KINDS,
)
def test_host_collective_time_never_falls_with_bytes(
    nbytes: float, factor: float, size: int, kind: CollectiveKind
) -> None:
    links = load_host_rates().links
    us = links.collective_us(kind, nbytes, size)
    assert links.collective_us(kind, nbytes * factor, size) >= us * (1 - 1e-12) > 0


def test_devices_sharing_cores_are_slowed_down() -> None:
    links = LinkRates(1.0, 1.0)
    shared = MeasuredRates(1.0, 1.0, links, cores=2)
    alone = ServerRates(1.0, 1.0, links, links)
    assert (shared.slowdown(8), shared.slowdown(1)) == (4, 0.5)
    assert alone.slowdown(8) == AscendRates(HARDWARE).slowdown(8)
    step = mlp(64, 32, 32)
    plans = [search(step, 8, rates) for rates in (shared, alone)]
    assert plans[0].best.step_ms == pytest.approx(4 * plans[1].best.step_ms)
    assert plans[0].one_device.step_ms == pytest.approx(plans[1].one_device.step_ms / 2)


def test_host_rates_are_shipped() -> None:
    rates = load_host_rates()
    assert rates.compute_us(1e6, 0) > 0
    for rows in rates.links.us_by_kind.values():
        assert {len(us) for us in rows.values()} == {len(rates.links.nbytes)}
