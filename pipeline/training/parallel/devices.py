"""Selection of the devices of JAX that a run uses."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.backend import clear_backends

from pipeline.core.errors import RunError, first_line
from pipeline.core.host.cuda import explain_missing_gpu, find_plugin
from pipeline.core.host.jax_private import PLUGIN_LOGGER, count_joined_processes, has_open_devices
from pipeline.core.host.platforms import CPU, get_platform
from pipeline.training.parallel.parallel_spec import DEFAULT_SHARDS, ParallelSpec, make_shards
from pipeline.training.parallel.ranks import Ranks
from pipeline.training.parallel.state_sharing import DevicePlacement

PLATFORMS_SETTING = "jax_platforms"
ACCEPTED_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "jax_disable_jit": (False,),
    "jax_numpy_dtype_promotion": ("standard",),
    "jax_numpy_rank_promotion": ("allow", "warn"),
    "jax_transfer_guard_host_to_device": ("allow", "log", "log_explicit", None),
    "jax_transfer_guard_device_to_host": ("allow", "log", "log_explicit", None),
}
"""The supported values of JAX's settings, which come from the environment or `jax.config`."""


def make_placement(platform: str, index: int, parallel: ParallelSpec) -> DevicePlacement:
    """Return the devices of a run, the same number from each process. A run on one device uses
    device `index`. Raises RunError if JAX has too few devices, or can't open them."""
    _require_settings()
    if parallel.mode == "none":
        return DevicePlacement((find_device(platform, index),))
    processes = count_joined_processes()
    total = count_devices(parallel, processes)
    if total % processes:
        raise RunError(
            f"parallel.devices = {total}: must be a multiple of the {processes} processes"
        )
    per_process = total // processes
    if get_platform(platform).is_host:
        provide_cpu_devices(per_process)
    elif get_platform(platform).is_cuda:
        _unhide_gpus()
    reason = ""
    with _collect_plugin_failures() as failures:
        _open_devices()
        try:
            available = sorted(jax.devices(platform), key=lambda d: (d.process_index, d.id))
        except RuntimeError as error:
            available = []
            reason = _explain_no_gpu(platform, failures[0] if failures else first_line(error))
    devices: list[jax.Device] = []
    for process in range(processes):
        local_devices = [device for device in available if device.process_index == process]
        if len(local_devices) < per_process:
            process_text = f" of process {process}" if processes > 1 else ""
            raise RunError(
                f"parallel.devices = {total}: {per_process} devices{process_text} are needed, and "
                f"JAX sees {len(local_devices)} of {platform}{reason}"
            )
        devices += local_devices[:per_process]
    return DevicePlacement(tuple(devices), parallel.mesh_sizes["model"], tuple(parallel.batch_axes))


def make_host_placement(parallel: ParallelSpec) -> DevicePlacement:
    """Return one device of the host's processor. With a parallel mode the processor is split into
    at least `DEFAULT_SHARDS` devices, as for training on at most that number. Otherwise results
    would differ in their last bits. Raises RunError for unsupported settings of JAX."""
    _require_settings()
    if parallel.mode != "none":
        provide_cpu_devices(1)
    return DevicePlacement((find_device(CPU.name, 0),))


def count_devices(parallel: ParallelSpec, processes: int | None = None) -> int:
    """Return the number of devices of all processes: one for each process if the recipe doesn't set
    it. By default `processes` is the number of processes that have joined. No device is opened,
    since after that JAX can't split the processor into more devices."""
    if parallel.devices is None and parallel.mesh is None:
        return count_joined_processes() if processes is None else processes
    return parallel.num_devices


def count_batch_parts(parallel: ParallelSpec, processes: int | None = None) -> int:
    """Return the number of parts of a batch: one for each device along the batch axes."""
    is_default = parallel.devices is None and parallel.mesh is None
    return count_devices(parallel, processes) if is_default else parallel.batch_parts


def describe_layout(parallel: ParallelSpec, batch_size: int, ranks: Ranks) -> str:
    """Return a line of the log that describes the layout of the run, in MindSpore's terms."""
    devices = count_devices(parallel, ranks.size)
    parts = [f"{parallel.mode}: device_num {devices}"]
    if parallel.mesh_sizes["model"] > 1:
        parts[0] += f" ({parallel.mesh_sizes['data']} data x {parallel.mesh_sizes['model']} model)"
    if ranks.size > 1:
        parts.append(f"rank_id {ranks.rank} of rank_size {ranks.size}")
    shards = make_shards(parallel, batch_size, 1)
    batch_parts = count_batch_parts(parallel, ranks.size)
    parts.append(f"batch {batch_size:,}, {batch_size // batch_parts} a device")
    if shards is not None:
        parts.append(f"{shards.count} shards in a fixed order")
    parts.append(f"reproducible {parallel.reproducible}")
    parts.append(f"mirror_mean {str(parallel.mirror_mean).lower()}")
    return ", ".join(parts)


def provide_cpu_devices(count: int) -> None:
    """Let JAX split the host's processor into at least `count` devices.

    It is split into at least `DEFAULT_SHARDS` devices, so that most runs have the same setting. If
    the processor had fewer devices, existing arrays are lost. Nothing changes if the user has set a
    count in XLA_FLAGS, or if processes have joined and opened their devices: they have exchanged
    their counts.
    """
    if count_joined_processes() > 1 and has_open_devices():
        return
    count = max(count, DEFAULT_SHARDS)
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    configured: Any = jax.config
    if configured.jax_num_cpu_devices >= count:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # devices have been opened
        clear_backends()
        jax.config.update("jax_num_cpu_devices", count)


_are_gpus_hidden = False
"""Whether `hide_gpus` has hidden the GPUs, and `_unhide_gpus` hasn't undone it."""


def hide_gpus() -> None:
    """Make JAX open only the host's processor, since its plug-in for CUDA reserves most of a GPU's
    memory at once. Nothing changes if devices are open, or if the user has set the platforms."""
    configured: Any = jax.config
    if configured.jax_platforms or has_open_devices() or find_plugin() is None:
        return
    jax.config.update(PLATFORMS_SETTING, CPU.name)
    global _are_gpus_hidden
    _are_gpus_hidden = True


def choose_gpus(numbers: Sequence[int] | None) -> None:
    """Make JAX open only the GPUs of the machine with these numbers, as `jax.distributed` does;
    None changes nothing. JAX reserves most of the memory of each GPU that it opens."""
    if numbers is not None:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, numbers)))


def _unhide_gpus() -> None:
    """Undo `hide_gpus`. Existing arrays are lost if GPUs were hidden."""
    global _are_gpus_hidden
    if _are_gpus_hidden:
        _are_gpus_hidden = False
        jax.config.update(PLATFORMS_SETTING, None)
        clear_backends()


def find_device(platform: str, index: int) -> jax.Device:
    """Return device `index` of this process. Raises RunError with the existing devices, and with
    the reason if no GPU is found."""
    if get_platform(platform).is_cuda:
        _unhide_gpus()
    with _collect_plugin_failures() as failures:
        all_devices = _open_devices()
        try:
            return jax.local_devices(backend=platform)[index]
        except (RuntimeError, IndexError) as error:
            names = sorted({f"{device.platform}:{device.id}" for device in all_devices})
            reason = failures[0] if failures else first_line(error)
    hint = ""
    # If JAX sees another GPU, the driver and the plug-in work.
    if not any(name.startswith(platform) for name in names):
        hint = _explain_no_gpu(platform, reason)
    raise RunError(f"device {platform}:{index}: JAX sees {', '.join(names)} only{hint}")


def _open_devices() -> list[jax.Device]:
    """Open all devices that JAX may use. Raises RunError if it can't."""
    try:
        return jax.devices()
    except Exception as error:  # JAX raises AssertionError too.
        configured: Any = jax.config
        problem = first_line(error) if str(error) else "this machine has no such device"
        raise RunError(
            f"{PLATFORMS_SETTING.upper()} = {configured.jax_platforms}: JAX can't open it: "
            f"{problem}; unset it, or name cpu"
        ) from error


def _require_settings() -> None:
    """Raise RunError for settings of JAX that a run doesn't support."""
    for name, accepted in ACCEPTED_SETTINGS.items():
        value = getattr(jax.config, name)
        value = getattr(value, "value", value)  # Some settings are enumerations.
        if value not in accepted:
            accepted_text = " or ".join(str(setting) for setting in accepted if setting is not None)
            raise RunError(f"{name.upper()} = {value}: must be {accepted_text}; unset it")


def _explain_no_gpu(platform: str, reason: str) -> str:
    """Return why a GPU is missing, as the end of a message; "" for other platforms."""
    return f"; {explain_missing_gpu(reason)}" if get_platform(platform).is_cuda else ""


@contextmanager
def _collect_plugin_failures() -> Iterator[list[str]]:
    """Yield a list to which the failures of JAX's plug-ins are added, in place of log records."""
    reasons: list[str] = []

    def filter_record(record: logging.LogRecord) -> bool:
        if "plugin configuration error" not in record.getMessage():
            return True
        failure = record.exc_info[1] if record.exc_info else None
        reasons.append(record.getMessage() if failure is None else first_line(failure))
        return False

    log = logging.getLogger(PLUGIN_LOGGER)
    log.addFilter(filter_record)
    try:
        yield reasons
    finally:
        log.removeFilter(filter_record)
