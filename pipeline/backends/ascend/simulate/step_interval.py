"""The interval between two steps: host time, the wait for data, GetNext and loop control."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import OptionError, StepOptions
from pipeline.backends.ascend.simulate.timeline import Bound, Span, TimeSlice


@dataclass(frozen=True, slots=True)
class Boundary:
    """Time from the end of a step to the earliest start of the next.

    `host_us` is the step's share of the host's time for a launch, `wait_us` the device's wait for a
    batch, `copy_us` the copy of a batch that no queue overlaps, `interval_us` all of GetNext, loop
    control and that copy.
    """

    host_us: float
    wait_us: float
    copy_us: float
    interval_us: float
    feed: DeviceFeed

    @property
    def end_us(self) -> float:
        """Microseconds of the whole boundary."""
        return self.host_us + self.wait_us + self.interval_us

    @property
    def starved_by(self) -> Bound:
        """The stage that a wait for data is due to."""
        return "host data" if self.feed.host_us >= self.feed.pcie_us or self.copy_us else "pcie"

    @property
    def busy_us(self) -> float:
        """Time of work on a batch, overlapped or not: prepare, copy, GetNext, loop control."""
        return self.feed.host_us + self.feed.pcie_us + self.interval_us - self.copy_us

    def parts(self) -> Iterator[TimeSlice]:
        """Return the boundary's time in slices."""
        yield TimeSlice("host", "host launch", self.host_us)
        yield TimeSlice("data", self.starved_by, self.wait_us)
        yield TimeSlice("data", "pcie", self.copy_us)
        yield TimeSlice("data", "interval", self.interval_us - self.copy_us)

    def spans(self) -> Iterator[Span]:
        """Return the boundary's spans; the host prepares the next batch while the step runs."""
        begin_us = self.host_us + self.wait_us
        yield Span("Callbacks and launch", "host", 0.0, self.host_us, "host")
        yield Span("Prepare a batch", "feed", 0.0, self.feed.host_us, "data")
        copy_at_us = begin_us if self.copy_us else 0.0
        yield Span("Copy a batch", "pcie", copy_at_us, self.feed.pcie_us, "data")
        yield Span("Wait for data", "get_next", self.host_us, self.wait_us, "data")
        yield Span("Step interval", "get_next", begin_us, self.interval_us, "data")


def boundary_of(feed: DeviceFeed, run_us: float, hw: Hardware, options: StepOptions) -> Boundary:
    """Return the boundary before a step that then runs for `run_us`.

    A queue fills while the device computes and while the host runs callbacks, so data is waited for
    only if preparing or copying a batch takes longer than a whole step. Without a queue the copy
    is in the step; workers still prepare the next batch meanwhile.
    """
    host_us = hw.host_step_us
    if options.mode != "op_by_op":
        host_us = (host_us + hw.graph_launch_us) / options.steps_per_launch
    distributed = options.devices > 1
    interval_us = hw.sink_interval_distributed_us if distributed else hw.sink_interval_us
    copy_us = 0.0 if options.queued else feed.pcie_us
    interval_us = max(interval_us, copy_us)
    due_us = feed.period_us if options.queued else feed.host_us
    wait_us = max(0.0, due_us - (host_us + interval_us + run_us))
    return Boundary(host_us, wait_us, copy_us, interval_us, feed)


REFERENCE_PIXELS = 224 * 224
"""The image size of the chip's figures for the host."""


@dataclass(frozen=True, slots=True)
class DeviceFeed:
    """Times of one batch before it is on the device; the stages run in parallel."""

    host_us: float
    pcie_us: float

    @property
    def period_us(self) -> float:
        """The shortest time between two batches."""
        return max(self.host_us, self.pcie_us)


def device_images_per_s(workers: int, pixels: int, devices: int, hw: Hardware) -> float:
    """Return the images that the host prepares for one device in a second.

    `workers` processes serve one device; all devices of a server share its host. Work grows with
    the pixels of an image (height x width). The rate of a worker follows from MindSpore's r1.5
    profiling guide: ResNet-50 starved by one worker took 90.7 ms for 32 images.

    Raises:
        OptionError: workers, pixels or devices below 1.
    """
    for name, value in (("host_workers", workers), ("pixels", pixels), ("devices", devices)):
        if value < 1:
            raise OptionError(f"{name}: {value} should be at least 1")
    in_server = min(devices, int(hw.devices_per_server_count))
    share = min(workers * hw.host_worker_images_per_s, hw.host_images_per_s / in_server)
    return share * REFERENCE_PIXELS / pixels


def feed_of(options: StepOptions, hw: Hardware) -> DeviceFeed:
    """Return the stages that feed one device.

    Raises:
        OptionError: the batch does not fit the queue on the device that it should go through.
    """
    if options.queued:
        queue_batches(options, hw)
    rate = options.host_images_per_s
    host_us = 0.0 if rate is None else options.batch_size / rate * 1e6
    return DeviceFeed(host_us, options.batch_bytes / (hw.pcie_gb_per_s * 1e3))


def queue_batches(options: StepOptions, hw: Hardware) -> int:
    """Return the batches that the queue on the device holds (mindspore.data_sink: 100 batches and 2
    GB).

    Raises:
        OptionError: not even one fits.
    """
    limit_bytes = int(hw.data_queue_gib * 2**30)
    if options.batch_bytes > limit_bytes:
        fits = options.batch_size * limit_bytes // options.batch_bytes
        at_most = f"at most {fits} fits, or " if fits else ""
        raise OptionError(
            f"batch_size: {options.batch_size} makes a batch of {options.batch_bytes / 2**30:.3g} "
            f"GiB, more than the {hw.data_queue_gib:g} GiB of the queue on the device; {at_most}"
            "turn data sinking off"
        )
    depth = int(hw.data_queue_batches_count)
    return min(depth, limit_bytes // options.batch_bytes) if options.batch_bytes else depth
