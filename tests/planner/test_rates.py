"""Rates of devices and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.backends.ascend.cost.collectives import all_reduce_us
from pipeline.backends.ascend.pricing.pricing import chipset
from pipeline.errors import RunError
from pipeline.planner.rates import AscendRates, DeviceGroup, LinkRates, MeasuredRates, host_rates

HARDWARE = chipset("ascend910").hardware


def test_a_ring_carries_each_byte_but_its_own_share() -> None:
    links = LinkRates(message_us=3.0, bytes_per_us=100.0)
    assert links.us("all_gather", 800, 4) == 3 + 6
    assert links.us("all_reduce", 800, 4) == 2 * (3 + 6)
    assert links.us("all_reduce", 800, 1) == 0


def test_groups_beyond_a_server_use_the_far_links() -> None:
    near, far = LinkRates(1.0, 1e3), LinkRates(10.0, 1e3)
    rates = MeasuredRates(1.0, 1.0, near, far, per_server=8)
    assert rates.collective_us("all_gather", 0, DeviceGroup(8)) == 1
    assert rates.collective_us("all_gather", 0, DeviceGroup(2, stride=8)) == 10


def test_the_emulated_chip_s_links_are_those_of_its_model() -> None:
    rates = AscendRates(HARDWARE)
    for devices in (2, 8, 64):
        modelled = HARDWARE.collective_launch_us + all_reduce_us(10**7, devices, HARDWARE)
        assert rates.collective_us("all_reduce", 10**7, DeviceGroup(devices)) == modelled
    strided = rates.collective_us("all_reduce", 10**7, DeviceGroup(8, stride=8))
    assert strided > rates.collective_us("all_reduce", 10**7, DeviceGroup(8))


def test_a_kernel_takes_the_longer_of_its_operations_and_its_bytes() -> None:
    rates = MeasuredRates(10.0, 2.0, LinkRates(1.0, 1.0), LinkRates(1.0, 1.0))
    assert rates.compute_us(100.0, 4.0) == 10
    assert rates.compute_us(0.0, 4.0) == 2


def test_rates_of_this_host_come_with_the_package(tmp_path: Path) -> None:
    assert host_rates("gloo").links.us("all_reduce", 0, 2) == 4000
    assert host_rates().compute_us(1e6, 0) > 0
    wrong = tmp_path / "rates.yaml"
    wrong.write_text("device: {}")
    with pytest.raises(RunError, match="no rates of a host"):
        host_rates("gloo", wrong)
