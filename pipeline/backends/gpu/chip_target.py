"""Figures of an absent GPU for XLA's compiler, from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveFloat, ValidationError

from pipeline.core.errors import first_line
from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.files.value_text import join_first
from pipeline.core.registry import Spec

FOLDER = Path(__file__).parent / "targets"
"""Files of the shipped targets."""
MAX_PROBLEMS = 3
"""Largest number of problems of a file in a message."""
Count = Annotated[int, Field(gt=0)]
Bytes = Annotated[int, Field(gt=0, le=2**63 - 1)]
Version = Annotated[str, Field(pattern=r"^\d{1,4}\.\d{1,4}\.\d{1,4}$")]
ShortVersion = Annotated[str, Field(pattern=r"^\d{1,4}\.\d{1,4}$")]
OLDEST_CAPABILITY = 5
"""Oldest major compute capability. For older ones the compiler of jaxlib 0.11 ends the process."""


def require_capability(version: str) -> str:
    """Return the compute capability. Raises ValueError if XLA doesn't compile for it."""
    if int(version.split(".")[0]) < OLDEST_CAPABILITY:
        raise ValueError(f"must be at least {OLDEST_CAPABILITY}.0")
    return version


class ChipTarget(Spec):
    """Figures of a chip and versions of its software, for XLA's compiler.

    `cores` are streaming multiprocessors. Kernels may request up to the `optin` sizes.
    """

    chip: Annotated[str, Field(pattern=r"^[\w .()-]{1,80}$")]
    compute_capability: Annotated[ShortVersion, AfterValidator(require_capability)]
    cores: Count
    fpus_per_core: Count
    clock_ghz: PositiveFloat
    memory_bytes: Bytes
    memory_bytes_per_s: Bytes
    l2_bytes: Bytes
    shared_memory_per_block_bytes: Bytes
    shared_memory_per_block_optin_bytes: Bytes
    shared_memory_per_core_bytes: Bytes
    threads_per_warp: Count
    threads_per_block: Count
    threads_per_core: Count
    registers_per_block: Count
    registers_per_core: Count
    block_dim_x: Count
    block_dim_y: Count
    block_dim_z: Count
    driver: Version
    cuda_runtime: Version
    cuda_toolkit: Version
    cudnn: ShortVersion

    def to_text(self) -> str:
        """Return the figures in the text format of XLA's `GpuTargetConfigProto`."""
        major, minor = self.compute_capability.split(".")
        dnn_major, dnn_minor = self.cudnn.split(".")
        runtime = self.cuda_runtime.split(".")
        device = {
            "threads_per_block_limit": self.threads_per_block,
            "threads_per_warp": self.threads_per_warp,
            "shared_memory_per_block": self.shared_memory_per_block_bytes,
            "shared_memory_per_core": self.shared_memory_per_core_bytes,
            "threads_per_core_limit": self.threads_per_core,
            "core_count": self.cores,
            "fpus_per_core": self.fpus_per_core,
            "block_dim_limit_x": self.block_dim_x,
            "block_dim_limit_y": self.block_dim_y,
            "block_dim_limit_z": self.block_dim_z,
            "memory_bandwidth": self.memory_bytes_per_s,
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "shared_memory_per_block_optin": self.shared_memory_per_block_optin_bytes,
            "registers_per_core_limit": self.registers_per_core,
            "registers_per_block_limit": self.registers_per_block,
            "driver_version": f'"{self.driver}"',
            "runtime_version": f'"{self.cuda_runtime}"',
            "compile_time_toolkit_version": f'"{self.cuda_toolkit}"',
        }
        fields = " ".join(f"{name}: {value}" for name, value in device.items())
        capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
        version = f"major: {runtime[0]} minor: {runtime[1]} patch: {runtime[2]}"
        return (
            f'gpu_device_info {{ {fields} {capability} }} platform_name: "CUDA" '
            f"dnn_version_info {{ major: {dnn_major} minor: {dnn_minor} }} "
            f'runtime_version {{ {version} }} device_description_str: "{self.chip}"'
        )


def read_target(name_or_path: str) -> ChipTarget:
    """Return a shipped target by name, or the target of a YAML file. Raises ValueError."""
    shipped = [file.stem for file in FOLDER.glob("*.yaml")]
    is_shipped = name_or_path in shipped
    if not is_shipped and not name_or_path.endswith((".yaml", ".yml")):
        problem = explain_unknown_name("target", name_or_path, shipped)
        raise ValueError(f"{problem}; or name a YAML file like h200.yaml")
    try:
        file = FOLDER / f"{name_or_path}.yaml" if is_shipped else Path(name_or_path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name_or_path}: names the home folder of an unknown user") from error
    try:
        tree = read_yaml(file)
    except OSError as error:
        raise ValueError(f"{file}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: isn't YAML: {first_line(error)}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{file}: must have keys and values, as {FOLDER / 'h200.yaml'} has")
    try:
        return ChipTarget.model_validate(tree)
    except ValidationError as error:
        problems = join_first(describe_problems(error, tree), MAX_PROBLEMS, "; ", "; ")
        raise ValueError(f"{file}: {problems}") from error
