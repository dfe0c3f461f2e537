"""The data pipeline: its rates, the queue on the device, and a device that starves."""

from __future__ import annotations

import pytest

from pipeline.backends.ascend.chip.options import OptionError, StepOptions
from pipeline.backends.ascend.simulate.launch_modes import (
    compute_images_per_s,
    schedule,
)
from tests.backends.ascend.made_up import HW, chain

PIXELS = 224 * 224


def test_worker_rate_is_linear_up_to_the_host_limit() -> None:
    assert compute_images_per_s(1, PIXELS, 1, HW) == 353
    assert compute_images_per_s(12, PIXELS, 1, HW) == 12 * 353
    assert compute_images_per_s(100, PIXELS, 1, HW) == 18500


def test_devices_of_a_server_share_the_host_rate() -> None:
    assert compute_images_per_s(12, PIXELS, 8, HW) == 18500 / 8
    assert compute_images_per_s(12, PIXELS, 1024, HW) == 18500 / 8


def test_image_rate_falls_with_pixels() -> None:
    assert compute_images_per_s(1, 112 * 112, 1, HW) == 4 * 353


@pytest.mark.parametrize("given_", [(0, PIXELS, 1), (1, 0, 1), (1, PIXELS, 0)])
def test_zero_workers_pixels_or_devices_are_errors(given_: tuple[int, int, int]) -> None:
    with pytest.raises(OptionError, match=" = 0: must be at least 1"):
        compute_images_per_s(*given_, HW)


def test_starved_step_time_is_batch_preparation_time() -> None:
    """MindSpore r1.5, case 1: ResNet-50 at batch 32 is 18 ms, and 90.7 with one worker."""
    graph, times = chain(17_810.0)
    starved, fed = (
        schedule(
            graph,
            times,
            HW,
            StepOptions(
                sink_size=1000,
                batch_size=32,
                host_images_per_s=compute_images_per_s(workers, PIXELS, 1, HW),
            ),
        )
        for workers in (1, 12)
    )
    assert starved.step_us / 1e3 == pytest.approx(90.7, abs=0.1)
    assert starved.bound == "host data"
    assert starved.iteration.interval_us / 1e3 == pytest.approx(72.8, abs=0.2)
    assert fed.step_us / 1e3 == pytest.approx(18.07, abs=0.01)


def test_step_with_slow_batch_transfer_is_bound_by_pcie() -> None:
    graph, times = chain(100.0)
    line = schedule(graph, times, HW, StepOptions(sink_size=1000, batch_bytes=160_000_000))
    assert line.step_us == pytest.approx(10_000)
    assert line.bound == "pcie"


def test_batch_without_data_sink_is_copied_within_the_step() -> None:
    graph, times = chain(100.0)
    options = StepOptions(mode="graph_sink", data_sink=False, batch_bytes=160_000_000)
    line = schedule(graph, times, HW, options)
    assert line.step_us == pytest.approx(1500 + 242 + 10_000 + 100.11)


def test_prefetched_batch_is_copied_during_the_step_before() -> None:
    graph, times = chain(20_000.0)
    serial, ahead = (
        schedule(
            graph,
            times,
            HW,
            StepOptions(mode="op_by_op", batch_bytes=160_000_000, prefetches=prefetches),
        )
        for prefetches in (False, True)
    )
    assert serial.step_us - ahead.step_us == pytest.approx(10_000 - HW.sink_interval_us)
    assert ahead.exposed_us["data"] == pytest.approx(HW.sink_interval_us)


def test_batch_over_the_queue_is_an_error_with_the_size_that_fits() -> None:
    graph, times = chain(100.0)
    with pytest.raises(
        OptionError, match=r"batch_size = 600: makes a batch of 3 GiB.*at most 400 a device"
    ):
        schedule(graph, times, HW, StepOptions(batch_size=600, batch_bytes=3 << 30))
    with pytest.raises(OptionError, match="turn data sinking off"):
        schedule(graph, times, HW, StepOptions(batch_bytes=3 << 30))
    unqueued = StepOptions(mode="graph_sink", data_sink=False, batch_bytes=3 << 30)
    line = schedule(graph, times, HW, unqueued)
    (copy,) = (span for span in line.spans if span.stream == "pcie")
    assert copy.duration_us == pytest.approx((3 << 30) / 16e3)
