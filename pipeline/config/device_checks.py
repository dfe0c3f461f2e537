"""Rules about devices and processes. Each yields its problems, which begin with a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.backends.devices.xla import Gpu
from pipeline.config.recipe import Recipe
from pipeline.core.files.value_text import show
from pipeline.training.parallel.microbatches import compute_batch_multiple
from pipeline.training.parallel.parallel_spec import count_shards

COMPILE_STAGES = ("data", "build", "compile")
"""Stages that run nothing on a device."""
COUNTERS = "PipeUtilization"
"""The counters of a profile."""


def check_parallel_mode(recipe: Recipe) -> Iterator[str]:
    """Keys about several devices need a `parallel.mode` that uses them."""
    parallel = recipe.parallel
    if parallel.mode == "none":
        values = {
            "devices": None if parallel.devices == 1 else parallel.devices,
            "mesh": parallel.mesh,
            "batch_per_device": parallel.batch_per_device,
        }
        for key, value in values.items():
            if value is not None:
                yield f"parallel.{key} = {value}: needs parallel.mode=data; it is none"
    if not parallel.is_data_parallel:
        # In other modes with `exact`, validation may have set `shards`; `check_sharding` refuses
        # `exact` there.
        is_user_set = parallel.mode == "none" or parallel.reproducible != "exact"
        if parallel.shards is not None and is_user_set:
            rule = f"needs parallel.mode=data; it is {parallel.mode}"
            yield f"parallel.shards = {parallel.shards}: {rule}"
        if not parallel.mirror_mean:
            yield f"parallel.mirror_mean = false: needs parallel.mode=data; it is {parallel.mode}"
    modes = {"specs": "semi_auto", "constraints": "semi_auto", "plan": "auto", "memory_gib": "auto"}
    if parallel.batch_axes != ("data",) and parallel.mode != "semi_auto":
        yield f"parallel.batch_axes: needs parallel.mode=semi_auto; it is {parallel.mode}"
    for key, mode in modes.items():
        if getattr(parallel, key) and parallel.mode != mode:
            yield f"parallel.{key}: needs parallel.mode={mode}; it is {parallel.mode}"


def check_mesh(recipe: Recipe) -> Iterator[str]:
    """The mesh has the recipe's number of devices."""
    parallel = recipe.parallel
    if parallel.mesh is None or parallel.devices in (None, parallel.num_devices):
        return
    sizes = " x ".join(str(size) for size in parallel.mesh_sizes.values())
    yield (
        f"parallel.devices = {parallel.devices}: must be {parallel.num_devices}, the devices of "
        f"parallel.mesh ({sizes}), or null"
    )


def check_shards(recipe: Recipe) -> Iterator[str]:
    """Batches are split into equal shards, and devices compute equal numbers of shards."""
    parallel = recipe.parallel
    train = recipe.train
    devices = parallel.batch_parts  # those that a batch is divided among
    if parallel.mode in ("none", "auto"):
        return
    if parallel.is_data_parallel and parallel.mesh_sizes["model"] > 1:
        yield (
            f"parallel.mesh.model = {parallel.mesh_sizes['model']}: must be 1 with "
            f"parallel.mode={parallel.mode}; semi_auto shards parameters"
        )
    batches = [("train.batch_size", train.batch_size, train.accumulate_steps)]
    if recipe.dataset.eval.batch_size is not None:
        batches.append(("dataset.eval.batch_size", recipe.dataset.eval.batch_size, 1))
    if parallel.reproducible != "exact":
        if parallel.is_data_parallel and parallel.shards is not None:
            yield (
                f"parallel.shards = {parallel.shards}: must be null with parallel.reproducible = "
                f"{parallel.reproducible}, where each device computes its part undivided; exact "
                "adds shards"
            )
        for key, size, microbatches in batches:
            parts = compute_batch_multiple(microbatches, devices)
            if size % parts:
                times = f" times {microbatches} microbatches" if parts > devices else ""
                yield f"{key} = {size}: must be a multiple of the {devices} devices{times}"
        return
    shards = count_shards(parallel, train.batch_size)
    if shards & (shards - 1):
        yield f"parallel.shards = {shards}: must be a power of two with reproducible=exact"
    if shards % devices:
        yield (
            f"parallel.devices = {devices}: must divide parallel.shards = {shards}; give other "
            "devices or shards, or parallel.reproducible=layout"
        )
    for key, size, microbatches in batches:
        parts = compute_batch_multiple(microbatches, shards)
        if size % parts:
            pieces = f" of {microbatches} microbatches" if parts != shards else ""
            yield (
                f"{key} = {size}: must have {shards} shards{pieces} of equal size; give a multiple "
                f"of {parts}, or other parallel.shards"
            )


def check_features(recipe: Recipe) -> Iterator[str]:
    """Every feature that the recipe uses supports several devices."""
    parallel = recipe.parallel
    train = recipe.train
    split = recipe.dataset.train
    if parallel.mode == "none":
        return
    # `train.memory` sets the mode, so the problem names the key that the user typed.
    mode = f"parallel.mode = {parallel.mode}"
    if train.memory is not None and parallel.mode == "data":
        mode = f"train.memory = {train.memory}"
    if train.loss.hardest_share < 1:
        yield (
            f"train.loss.hardest_share = {train.loss.hardest_share}: must be 1.0 with {mode}; the "
            "hardest samples are chosen from the whole batch"
        )
    if train.loss.compares_samples and parallel.is_data_parallel:
        yield (
            f"train.loss = {train.loss.name}: must be another loss with {mode}: a device sees "
            "a part of the batch, and this one compares each pair with all others; "
            "parallel.mode=semi_auto compares them across devices"
        )
    if not parallel.mirror_mean and train.loss.reduction != "mean":
        yield (
            "parallel.mirror_mean = false: needs train.loss.reduction=mean; a sum has no mean of "
            "devices"
        )
    if parallel.mode == "fsdp" and train.optimizer.observes_layers:
        yield f"train.optimizer = {train.optimizer.name}: must be another optimizer with {mode}"
    if train.mode == "eager":
        yield f"train.mode = eager: must be graph with {mode}"
    if (split.num_shards or 1) > 1:
        yield (
            f"dataset.train.num_shards = {split.num_shards}: must be null with {mode}, which "
            "divides every batch"
        )
    if parallel.sync_batch_norm and parallel.reproducible == "exact":
        yield (
            "parallel.sync_batch_norm = true: needs parallel.reproducible=layout; with exact, "
            "shards are computed one after the other, each with separate statistics"
        )


def check_memory(recipe: Recipe) -> Iterator[str]:
    """`train.memory` needs one process with one device, and sums over shards in a fixed order."""
    parallel = recipe.parallel
    if recipe.train.memory is None:
        return
    condition = "with train.memory"
    if parallel.mode != "data":
        yield (
            f"parallel.mode = {parallel.mode}: must be none or data {condition}, which doesn't "
            "divide the state"
        )
    elif parallel.reproducible != "exact":
        yield (
            f"parallel.reproducible = {parallel.reproducible}: must be exact {condition}, or the "
            "bits would depend on the memory"
        )
    device = recipe.device.name
    if parallel.num_devices > 1:
        yield f"parallel.devices = {parallel.num_devices}: must be 1 {condition}"
    if recipe.device.is_emulated:
        yield f"device = {device}: must be cpu or gpu {condition}; its memory is emulated"
    if recipe.launch.name not in ("auto", "none"):
        yield f"launch = {recipe.launch.name}: must be none {condition}, which is of one process"


def check_sharding(recipe: Recipe) -> Iterator[str]:
    """With parameters that XLA shards, sums aren't exact, and batch norm isn't synchronized."""
    parallel = recipe.parallel
    if parallel.mode not in ("semi_auto", "auto"):
        return
    if parallel.reproducible == "exact":
        yield (
            f"parallel.reproducible = exact: must be layout or close with {parallel.mode}, since "
            "XLA divides sums among devices"
        )
    if parallel.mesh_sizes["model"] > 1 and parallel.sync_batch_norm:
        yield "parallel.sync_batch_norm = true: must be false; statistics cover the whole batch"


def check_launcher(recipe: Recipe) -> Iterator[str]:
    """A launcher needs a `parallel.mode` and features that support several processes."""
    launch = recipe.launch
    mode = recipe.parallel.mode
    processes = launch.num_processes
    for key in ("processes", "restarts", "min_processes"):
        value = getattr(launch, key)
        if launch.name != "local" and value:
            yield f"launch.{key} = {value}: needs launch=local; it is {launch.name}"
    if launch.restarts and not set(recipe.stages) >= {"train", "checkpoint"}:
        yield f"launch.restarts = {launch.restarts}: needs the stages train and checkpoint"
    if launch.min_processes is not None:
        setting = f"launch.min_processes = {launch.min_processes}"
        if launch.min_processes > processes:
            yield f"{setting}: must be at most launch.processes = {processes}"
        elif launch.min_processes < processes and recipe.parallel.reproducible != "exact":
            rule = "must be null or equal with parallel.reproducible"
            yield f"{setting}: {rule} = {recipe.parallel.reproducible}; fewer processes change bits"
        elif launch.min_processes < processes and recipe.parallel.batch_per_device is not None:
            yield f"{setting}: must be null with parallel.batch_per_device; fewer devices change it"
    if launch.name not in ("auto", "none") and mode == "none":
        yield f"launch = {launch.name}: needs parallel.mode=data; it is none"
    elif launch.name == "local":
        yield from check_processes(recipe, processes)


def check_processes(recipe: Recipe, processes: int) -> Iterator[str]:
    """Every feature that the recipe uses supports several processes."""
    parallel = recipe.parallel
    device = recipe.device
    condition = f"with {processes} processes"
    if device.is_emulated:
        yield f"device = {device.name}: is emulated by one process; must be cpu or gpu {condition}"
    if device.uses_cuda and recipe.launch.name == "local":
        yield (
            f"launch = local: must be none with device={device.name}; one process computes on all "
            f"GPUs, as in parallel.devices={processes}"
        )
    if recipe.train.deadline is not None:
        yield f"train.{recipe.train.deadline}: must be train.steps or another length {condition}"
    collect_every = recipe.monitor.collect_every
    if parallel.mode != "data" and collect_every is not None:
        condition += f" and {parallel.mode}"
        yield f"monitor.collect_every = {collect_every}: must be null {condition}"
    if parallel.devices is not None and parallel.devices % processes:
        yield f"parallel.devices = {parallel.devices}: must be a multiple of {processes} processes"


def check_target(recipe: Recipe) -> Iterator[str]:
    """With `device.target`, a chip that this machine lacks, programs are compiled but not run."""
    device = recipe.device
    if not isinstance(device, Gpu) or device.target is None:
        return
    target = f"device.target = {show(device.target)}"
    problem = device.find_target_problem()
    if problem is not None:
        yield f"{target}: {problem}"
    other_stages = [stage for stage in recipe.stages if stage not in COMPILE_STAGES]
    if other_stages:
        yield (
            f"{target}: is a chip to compile for, on which nothing runs; stages must be "
            f"[{','.join(COMPILE_STAGES)}], and has {', '.join(other_stages)}"
        )
    if recipe.parallel.mode != "none":
        yield f"parallel.mode = {recipe.parallel.mode}: must be none with device.target"
    if recipe.train.mode == "eager":
        yield "train.mode = eager: must be graph with device.target, which compiles the step"
    if recipe.train.remat == "auto" and recipe.train.remat_bytes is None:
        yield "train.remat_bytes = null: must be given with device.target, which has no memory here"


def check_profile_counters(recipe: Recipe) -> Iterator[str]:
    """A profile has the shares of units: no device here has the other counters of a chip."""
    profile = recipe.profile
    if profile.mode != "off" and profile.aic_metrics != COUNTERS:
        yield (
            f"profile.aic_metrics = {profile.aic_metrics}: no device here counts these; must be "
            f"{COUNTERS}, the shares of its units"
        )


RULES: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    check_parallel_mode,
    check_mesh,
    check_shards,
    check_features,
    check_memory,
    check_sharding,
    check_launcher,
    check_target,
    check_profile_counters,
)
