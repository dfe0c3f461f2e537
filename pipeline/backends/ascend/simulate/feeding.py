"""Batches prepared by the host, copied over PCIe and queued on the device."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import OptionError, StepOptions

REFERENCE_PIXELS = 224 * 224
"""The image size of the chip's figures for the host."""


@dataclass(frozen=True, slots=True)
class Feed:
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


def feed_of(options: StepOptions, hw: Hardware) -> Feed:
    """Return the stages that feed one device.

    Raises:
        OptionError: the batch does not fit the queue on the device that it should go through.
    """
    if options.queued:
        queue_batches(options, hw)
    rate = options.host_images_per_s
    host_us = 0.0 if rate is None else options.batch_size / rate * 1e6
    return Feed(host_us, options.batch_bytes / (hw.pcie_gb_per_s * 1e3))


def queue_batches(options: StepOptions, hw: Hardware) -> int:
    """Return the batches that the queue on the device holds (mindspore.data_sink: 100 batches and 2
    GB).

    Raises:
        OptionError: not even one fits.
    """
    limit_bytes = int(hw.data_queue_gib * 2**30)
    if options.batch_bytes > limit_bytes:
        fits = options.batch_size * limit_bytes // options.batch_bytes
        raise OptionError(
            f"batch_size: {options.batch_size} makes a batch of {options.batch_bytes / 2**30:.3g} "
            f"GiB, more than the {hw.data_queue_gib:g} GiB of the queue on the device; "
            + (
                f"at most {fits} fits, or turn data sinking off"
                if fits
                else "turn data sinking off"
            )
        )
    depth = int(hw.data_queue_batches_count)
    return min(depth, limit_bytes // options.batch_bytes) if options.batch_bytes else depth
