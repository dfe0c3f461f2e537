"""`python -m pipeline doctor ...`: check that everything a run of a recipe needs is available."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from packaging.requirements import Requirement

from pipeline.cli.commands.command import CommandResult
from pipeline.cli.commands.root import DISTRIBUTION
from pipeline.config.cache import PROGRAMS, cache_root, find_exposure
from pipeline.config.compose import compose_and_check
from pipeline.config.hydra_options import add_train_length
from pipeline.config.recipe import Recipe
from pipeline.core.errors import PipelineError, first_line, get_system_reason, printable
from pipeline.core.files.atomic_write import lock_refusal
from pipeline.core.files.paths import LOCK, PACKAGE, Address
from pipeline.core.host.limits import read_limits
from pipeline.core.host.tested_versions import (
    compare_with_lock,
    describe_tested,
    find_installed_version,
    find_untested,
)
from pipeline.data.columns import count_split_bytes
from pipeline.data.copies.checksums import SUMS
from pipeline.data.copies.download import DownloadError
from pipeline.data.copies.remote_copy import find_copy_folder
from pipeline.models.lowerings.tune.onednn_library import OnednnLibraryError, find_toolchain
from pipeline.stages.data import read_selected
from pipeline.stages.record.provenance import fingerprint_columns
from pipeline.stages.record.run_directory import OUTPUTS
from pipeline.stages.record.summary import list_versions

Level = Literal["ok", "warn", "fail"]

SHOWN = ("jax", "jaxlib", "flax", "numpy", "hydra-core")
"""Packages whose tested versions are printed."""
GB = 1e9
MIN_FREE_BYTES = 1e9
MIN_FREE_FILES = 10_000
"""Free bytes and files below which a disk counts as full."""
MAX_CACHE_BYTES = 20e9
"""Size above which deleting programs from the cache is advised."""
MIN_OPEN_FILES = 1024
"""Limit of open files below which a run may fail."""
MIN_MEMORY_BYTES = 2e9
"""Upper bound of the memory of a small run, compilation included."""
MAX_SKEW_S = 60
"""Largest harmless difference between a file server's clock and this machine's: the newest run is
found by times of files."""
BUSY_LOAD = 0.5
"""Load per core above which the machine counts as used by other programs."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check, with advice if something is wrong."""

    level: Level
    what: str
    """The checked thing, such as `cache`."""
    text: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<5} {self.what:<12} {self.text}"
        return printable(f"{line}; {self.advice}" if self.advice else line)


def warn_if(is_bad: bool, what: str, text: str, advice: str) -> CheckResult:
    """Return a warning with advice if `is_bad`, else a result without a problem."""
    return CheckResult("warn", what, text, advice) if is_bad else CheckResult("ok", what, text)


def main(
    overrides: Sequence[str], *, details: bool = False, self_test: bool = False
) -> CommandResult:
    """Print what is wrong, or with `details` the results of all checks, and one line in all.

    `self_test` also runs commands of the installed package. The exit status is 1 if a check of the
    recipe failed, else 0. Nothing is downloaded. Raises RecipeError for an invalid recipe.
    """
    recipe = compose_and_check(add_train_length(overrides))
    results = []
    # fmt: off
    checks = (
        check_software, check_tested, check_lock, check_device, check_cache, check_data,
        check_outputs, check_limits, check_onednn, check_extras,
        *([check_commands] if self_test else []),
    )
    # fmt: on
    for check in checks:
        for result in _run_check(check, recipe):
            if details or result.level != "ok":
                print(result, flush=True)
            results.append(result)
    levels = [result.level for result in results]
    failed = levels.count("fail")
    warned = levels.count("warn")
    fine = f"{levels.count('ok')} fine" + ("" if details else " (--details lists them)")
    print(f"{len(levels)} checks of {recipe.name}: {failed} failed, {warned} to look at, {fine}")
    facts = {"checks": [asdict(result) for result in results]}
    return CommandResult(facts, exit_status=1 if failed else 0)


def _run_check(
    check: Callable[[Recipe], Iterator[CheckResult]], recipe: Recipe
) -> Iterator[CheckResult]:
    """Yield the results of a check; an error becomes a result too."""
    name = check.__name__.removeprefix("check_")
    try:
        yield from check(recipe)
    except PipelineError as error:
        yield CheckResult("fail", name, " ".join(str(error).split()))
    except (OSError, RuntimeError) as error:  # errors of JAX are RuntimeErrors
        file = getattr(error, "filename", None)
        reason = f"{file}: {get_system_reason(error)}" if file else first_line(error)
        yield CheckResult("fail", name, reason)


def check_commands(recipe: Recipe) -> Iterator[CheckResult]:
    """Run the commands of the self-test in a temporary folder."""
    from pipeline.cli.self_test import run_self_test

    with tempfile.TemporaryDirectory() as folder:
        for name, problem in run_self_test(Path(folder)):
            yield CheckResult("fail" if problem else "ok", name, problem or "it works")


def check_software(recipe: Recipe) -> Iterator[CheckResult]:
    """List the versions of the installed packages, and the folder of this package."""
    installed = ", ".join(f"{name} {version}" for name, version in list_versions({}).items())
    yield CheckResult("ok", "software", f"{installed}; {PACKAGE}")


def check_tested(recipe: Recipe) -> Iterator[CheckResult]:
    """Check that Python and the packages have tested versions."""
    try:
        untested = find_untested(DISTRIBUTION)
    except PackageNotFoundError:
        text = f"{DISTRIBUTION} isn't installed, so its versions are unknown"
        yield CheckResult("ok", "tested", text)
        return
    advice = f"pip install '{DISTRIBUTION}' picks tested versions"
    yield from (CheckResult("warn", "tested", sentence, advice) for sentence in untested)
    if not untested:
        text = f"every version was tested: {describe_tested(DISTRIBUTION, SHOWN)}"
        yield CheckResult("ok", "tested", text)


def check_lock(recipe: Recipe) -> Iterator[CheckResult]:
    """Compare the installed versions with the lock file, if there is one."""
    if LOCK.exists():
        yield CheckResult("ok", "lock", compare_with_lock(LOCK))


def check_device(recipe: Recipe) -> Iterator[CheckResult]:
    """Check that the device is available and computes."""
    backend = recipe.device.open(recipe.parallel)
    properties = backend.describe()
    text = ", ".join(
        value if key == "device" else f"{key} {value}" for key, value in properties.items()
    )
    if getattr(recipe.device, "target", None) is not None:
        yield CheckResult("ok", "device", f"{text}; XLA can compile for it")
        return
    free_bytes = backend.placement.free_bytes
    if free_bytes is not None:
        text += f", {free_bytes / GB:,.1f} GB of its memory for JAX"
    numbers = jax.device_put(jnp.arange(8.0), backend.device)
    total = float(jax.jit(jnp.sum)(numbers))
    if total != 28.0:
        yield CheckResult("fail", "device", f"{text}: the sum of 0 to 7 is {total}", "use another")
    else:
        yield CheckResult("ok", "device", text)


def check_cache(recipe: Recipe) -> Iterator[CheckResult]:
    """Check that the cache can be written, so that runs needn't compile and download again."""
    root = cache_root(recipe.cache)
    try:
        with _make_scratch_folder(root):
            space = _check_space("the cache", root)
    except OSError as error:
        reason = f"{root}: can't be written: {error.strerror}"
        yield CheckResult("fail", "cache", reason, "name another: cache.root=DIR")
        return
    size_bytes = 0
    for folder, _, names in os.walk(root):
        for name in names:
            # Another process may remove a file of the cache meanwhile.
            with suppress(OSError):
                size_bytes += os.path.getsize(os.path.join(folder, name))
    text = f"{root}: writable, holds {size_bytes / GB:.2f} GB"
    yield warn_if(size_bytes > MAX_CACHE_BYTES, "cache", text, f"delete {root / PROGRAMS}")
    if exposure := find_exposure(root):
        problem, advice = exposure
        yield CheckResult("warn", "cache", problem, advice)
    yield space


def check_data(recipe: Recipe) -> Iterator[CheckResult]:
    """Check that the data is available and can be read; nothing is downloaded."""
    dataset = recipe.dataset.model_copy(update={"mirrors": ()})
    if isinstance(dataset.root, Address):
        folder = find_copy_folder(dataset.root, cache_root(recipe.cache))
        if not (folder / SUMS).exists():
            text = f"not in {folder}"
            yield CheckResult("warn", "data", text, f"a run copies it from {dataset.root}")
            return
    try:
        raw = read_selected(recipe.model_copy(update={"dataset": dataset}))
    except DownloadError:
        folder = cache_root(recipe.cache) / dataset.name
        mirrors = ", ".join(recipe.dataset.mirrors)
        advice = f"a run downloads it from {mirrors}" if mirrors else "name it: dataset.root=DIR"
        yield CheckResult("warn" if mirrors else "fail", "data", f"not in {folder}", advice)
        return
    for split in (raw.train, raw.eval):
        fingerprint_columns(split)  # reads every byte
    size_bytes = count_split_bytes(raw.train) + count_split_bytes(raw.eval)
    counts = f"{len(raw.train):,} training and {len(raw.eval):,} evaluation samples"
    text = f"{dataset.name}: {counts}, {size_bytes / 1e6:,.1f} MB, readable"
    yield CheckResult("ok", "data", text)


def check_outputs(recipe: Recipe) -> Iterator[CheckResult]:
    """Check that run directories can be created, written and locked in the working folder."""
    with _make_scratch_folder(OUTPUTS) as folder:
        yield CheckResult("ok", "outputs", f"{OUTPUTS.absolute()}: writable")
        text = "the file system has them"
        if refusal := lock_refusal(folder / "file"):
            text = f"{OUTPUTS.absolute()}: the file system has no locks ({refusal})"
        advice = "train.resume=auto skips runs that were killed; name them"
        yield warn_if(refusal is not None, "locks", text, advice)
        skew_s = (folder / "file").stat().st_mtime - time.time()
        is_skewed = abs(skew_s) > MAX_SKEW_S
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, files agree"
        if is_skewed:
            text = f"the file system's is {skew_s:+,.0f} s off this machine's"
        yield warn_if(is_skewed, "clock", text, "the newest run is found by the times of files")
        yield _check_space("outputs", folder)


@contextmanager
def _make_scratch_folder(parent: Path) -> Iterator[Path]:
    """Make a temporary folder in `parent` with the file `file`; remove it after the body."""
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="doctor-", dir=parent))
    try:
        (folder / "draft").write_bytes(bytes(4096))
        (folder / "draft").replace(folder / "file")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in missing:
            # Another process may have put something there meanwhile.
            with suppress(OSError):
                path.rmdir()


def _check_space(what: str, folder: Path) -> CheckResult:
    """Check the free bytes and files of a folder's disk, which is used for `what`."""
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    # File systems without a fixed number of files report 0.
    has_few_files = disk.f_files > 0 and disk.f_favail < MIN_FREE_FILES
    text = f"{free_bytes / GB:,.1f} GB free for {what}"
    text += f", {disk.f_favail:,} files" if has_few_files else ""
    is_full = free_bytes < MIN_FREE_BYTES or has_few_files
    return warn_if(is_full, "disk", text, "make room, or work in another folder")


def check_limits(recipe: Recipe) -> Iterator[CheckResult]:
    """Check the files, memory and cores that this process can use."""
    limits = read_limits()
    is_low = limits.open_files is not None and limits.open_files < MIN_OPEN_FILES
    text = f"{limits.open_files or 'any number'} at most"
    yield warn_if(is_low, "open files", text, "ulimit -n 4096")
    for name, limit in (("file size", limits.file_bytes), ("addresses", limits.address_bytes)):
        if limit is not None:
            text = f"limited to {limit / GB:,.1f} GB"
            yield CheckResult("warn", name, text, "a run may end there; ulimit -a shows it")
    is_low = limits.memory_bytes < MIN_MEMORY_BYTES
    text = f"{limits.memory_bytes / GB:,.1f} GB available"
    yield warn_if(is_low, "memory", text, "a run may be killed for lack of memory")
    is_busy = limits.load > BUSY_LOAD * limits.machine_cores
    text = f"{limits.cores:g} of {limits.machine_cores} available, load {limits.load:.1f}"
    yield warn_if(is_busy, "cores", text, "other programs use them, so times will vary")


def check_onednn(recipe: Recipe) -> Iterator[CheckResult]:
    """Say whether programs with oneDNN's calls are kept on disk, and what they would need."""
    try:
        toolchain = find_toolchain()
    except OnednnLibraryError as error:
        text = f"each start compiles programs with its calls: {error}"
        yield CheckResult("ok", "onednn", text)
        return
    text = f"programs with its calls are kept on disk: {toolchain.versions}, {toolchain.compiler}"
    yield CheckResult("ok", "onednn", text)


def check_extras(recipe: Recipe) -> Iterator[CheckResult]:
    """List which extras of the package are installed; no run needs all of them."""
    try:
        names = metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except PackageNotFoundError:
        yield CheckResult("ok", "extras", f"{DISTRIBUTION} runs without being installed")
        return
    for extra in sorted(names):
        missing = find_missing(DISTRIBUTION, extra)
        text = f"{extra}: lacks {', '.join(missing)}" if missing else f"{extra}: installed"
        advice = f"pip install '{DISTRIBUTION}[{extra}]' if it is needed" if missing else ""
        yield CheckResult("ok", "extras", text, advice)


def find_missing(distribution: str, extra: str) -> list[str]:
    """Return the missing packages among those that an extra requires, also by nested extras."""
    missing: list[str] = []
    for requirement in map(Requirement, requires(distribution) or ()):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            continue  # required without extras too
        if not marker.evaluate({"extra": extra}):
            continue
        if find_installed_version(requirement.name) is None:
            missing.append(requirement.name)
        else:
            for nested_extra in requirement.extras:
                missing += find_missing(requirement.name, nested_extra)
    return missing
