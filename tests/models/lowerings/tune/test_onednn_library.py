"""oneDNN's calls, built on this machine: when they are used, what is kept, and their bits."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pipeline.models.lowerings.formulas import onednn
from pipeline.models.lowerings.problem import Slide
from pipeline.models.lowerings.tune import onednn_library
from pipeline.models.lowerings.tune.onednn_library import (
    OnednnCalls,
    OnednnLibraryError,
    explain_absence,
    find_toolchain,
    open_library,
)

COMPILER = """#!/bin/sh
echo run >> {log}
while [ "$1" != "-o" ]; do shift; done
printf code > "$2"
{end}
"""


@dataclass(frozen=True)
class PackageFile:
    """As a file in a package's metadata."""

    folder: Path
    path: str

    def __str__(self) -> str:
        return self.path

    def locate(self) -> Path:
        return self.folder / self.path


class MadeUpPackages:
    """The extra's packages, and a compiler that counts its runs and writes a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.cache = folder / "cache"
        self.loaded: list[bytes] = []
        for name in ("lib/libdnnl.so.3", "include/oneapi/dnnl/dnnl.hpp"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        self.write_compiler()

    def write_compiler(self, end: str = "") -> None:
        file = self.folder / "bin" / "g++"
        file.parent.mkdir(exist_ok=True)
        file.write_text(COMPILER.format(log=self.log, end=end))
        file.chmod(0o755)

    @property
    def builds(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def find(self, name: str) -> Any:
        path = "include/oneapi/dnnl/dnnl.hpp" if "devel" in name else "lib/libdnnl.so.3"
        return SimpleNamespace(name=name, version="1", files=[PackageFile(self.folder, path)])


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MadeUpPackages:
    """The extra is installed, and its library has jaxlib's bits."""
    made_up = MadeUpPackages(tmp_path)
    monkeypatch.setattr(onednn_library, "distribution", made_up.find)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(onednn_library, "load", made_up.loaded.append)
    monkeypatch.setattr(onednn_library, "_compare", lambda file, dtype: None)
    forget(monkeypatch)
    return made_up


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(onednn_library, "_loaded", {})
    monkeypatch.setattr(onednn_library, "_reasons", {})
    monkeypatch.setattr(onednn, "_USE", onednn._LibraryUse())


def test_library_is_built_once_and_kept(
    packages: MadeUpPackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        open_library(packages.cache, "float32", "cpu")
        assert "float32" in onednn.describe_calls()
        assert explain_absence() == ""
        forget(monkeypatch)
    assert packages.builds == 1
    assert packages.loaded == [b"code"] * 3


def test_types_share_the_library_and_are_compared_separately(
    packages: MadeUpPackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(file: Path, dtype: str) -> None:
        if dtype == "bfloat16":
            raise OnednnLibraryError("the built oneDNN has other bits than jaxlib's: a stack")

    monkeypatch.setattr(onednn_library, "_compare", compare)
    for _ in range(2):
        open_library(packages.cache, "bfloat16", "cpu")
        open_library(packages.cache, "float32", "cpu")
        assert "bfloat16" not in onednn.describe_calls()
        assert "float32" in onednn.describe_calls()
        assert explain_absence() == "the built oneDNN has other bits than jaxlib's: a stack"
        forget(monkeypatch)
    assert packages.builds == 1


@pytest.mark.parametrize("change", ["compiler", "machine", "source"])
def test_library_is_built_again_after_a_change(
    change: str, packages: MadeUpPackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_library(packages.cache, "float32", "cpu")
    forget(monkeypatch)
    if change == "compiler":
        packages.write_compiler("# newer")
    if change == "source":
        source = packages.folder / "source.cc"
        source.touch()
        monkeypatch.setattr(onednn_library, "SOURCE", source)
    open_library(packages.cache, "float32", "another cpu" if change == "machine" else "cpu")
    assert packages.builds == 2


def test_damaged_or_foreign_library_is_built_again(
    packages: MadeUpPackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_library(packages.cache, "float32", "cpu")
    (file,) = (file for file in packages.cache.iterdir() if "float32" not in file.name)
    content = file.read_bytes()
    for damage in ("changed", "writable"):
        forget(monkeypatch)
        if damage == "changed":
            file.write_bytes(content[:-1] + b"x")
        else:
            file.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IWOTH)
        open_library(packages.cache, "float32", "cpu")
        assert onednn.describe_calls() != "jaxlib"
    assert packages.builds == 3
    assert packages.loaded == [b"code"] * 3


def test_compiler_that_fails_runs_once(
    packages: MadeUpPackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.write_compiler("echo no header >&2; exit 1")
    for _ in range(2):
        open_library(packages.cache, "float32", "cpu")
        assert onednn.describe_calls() == "jaxlib"
        assert explain_absence() == "g++ can't build oneDNN's calls: no header"
        forget(monkeypatch)
    assert packages.builds == 1


@pytest.mark.parametrize(
    "end", ["kill -KILL $$", "echo 'as: out.o: No space left on device' >&2; exit 1"]
)
def test_compiler_that_lacked_memory_or_disk_runs_again(
    end: str, packages: MadeUpPackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.write_compiler(end)
    open_library(packages.cache, "float32", "cpu")
    assert onednn.describe_calls() == "jaxlib"
    reason = "SIGKILL" if "KILL" in end else "No space left on device"
    assert explain_absence().startswith("oneDNN's calls can't be built now: g++ can't build")
    assert explain_absence().endswith(reason)
    assert not packages.cache.exists()  # no verdict that a later start would take
    forget(monkeypatch)
    open_library(packages.cache, "float32", "cpu")
    assert packages.builds == 2


def test_library_of_other_instructions_is_not_used(
    packages: MadeUpPackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison's process ends by SIGILL, this one doesn't."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"

    def compare(file: Path, dtype: str) -> None:
        command = [sys.executable, "-c", code]
        onednn_library._run(command, "the built oneDNN has other bits than jaxlib's", {})

    monkeypatch.setattr(onednn_library, "_compare", compare)
    for _ in range(2):
        open_library(packages.cache, "float32", "cpu")
        assert onednn.describe_calls() == "jaxlib"
        assert explain_absence().endswith("was ended by SIGILL")
        forget(monkeypatch)
    assert packages.builds == 1
    assert packages.loaded == []


def test_without_a_compiler_jaxlib_is_used(
    packages: MadeUpPackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    open_library(packages.cache, "float32", "cpu")
    assert onednn.describe_calls() == "jaxlib"
    assert explain_absence() == "there is no compiler g++"


def test_without_the_extra_jaxlib_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def find(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(onednn_library, "distribution", find)
    forget(monkeypatch)
    open_library(tmp_path, "float32", "cpu")
    assert onednn.describe_calls() == "jaxlib"
    assert explain_absence() == "recipe-pipeline[onednn] isn't installed"
    assert list(tmp_path.iterdir()) == []


def test_library_that_cannot_be_kept_is_used(packages: MadeUpPackages) -> None:
    packages.cache.write_text("a file, where the folder would be")
    open_library(packages.cache, "float32", "cpu")
    assert onednn.describe_calls() != "jaxlib"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calls_of_the_library_are_those_of_jaxlib(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their operands, results and parts, in programs that aren't compiled."""
    slide = Slide(strides=(2, 1), pads=((1, 2), (0, 3)), dilation=(1, 2), groups=2)
    images = jnp.zeros((12, 9, 9, 4), dtype)
    kernel = jnp.zeros((3, 3, 2, 6), dtype)
    rows = jnp.zeros((20, 6), dtype)
    columns = jnp.zeros((20, 10), dtype)

    def compute() -> Any:
        return (
            onednn.convolve(images, kernel, slide, jnp.float32),
            onednn.matmul(rows, columns, transpose_a=True),
            onednn.matmul(rows.T, columns),
        )

    monkeypatch.setattr(onednn, "_USE", onednn._LibraryUse("digest", {dtype: OnednnCalls()}))
    ours = jax.jit(lambda: compute()).lower()
    monkeypatch.setattr(onednn, "_USE", onednn._LibraryUse())
    theirs = jax.jit(lambda: compute()).lower()
    assert onednn.CALLS not in ours.as_text()
    assert onednn.LIBRARY_CALLS not in theirs.as_text()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), ours.out_info) == jax.tree.map(
        lambda x: (x.shape, x.dtype), theirs.out_info
    )
    text = ours.as_text()
    # The largest divisors of 12 images and of 6 rows that are at most 8.
    assert "images = 2 : i64" in text
    assert "pads = dense<[1, 2, 0, 3]>" in text
    assert text.count("parts = 1 : i64") == 1
    assert text.count("parts = 6 : i64") == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_program_with_calls_is_written_and_read(dtype: str, tmp_path: Path) -> None:
    """With the extra: a second process reads the program, with the same bits as jaxlib's."""
    try:
        find_toolchain()
    except OnednnLibraryError as error:
        pytest.skip(str(error))
    code = f"""
import jax, jax.numpy as jnp, numpy as np, sys
from pathlib import Path
from pipeline.core.files.compile_cache import enable_compile_cache
from pipeline.models.lowerings.formulas import onednn
from pipeline.models.lowerings.tune.machine import find_engines
engines = find_engines(jax.devices("cpu")[0], "{dtype}", Path(sys.argv[1]))
assert "onednn" in engines, engines
assert "{dtype}" in onednn.describe_calls()
events = []
enable_compile_cache(Path(sys.argv[1]) / "programs", print)
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
rows = jnp.asarray(np.random.default_rng(0).normal(size=(4096, 96)), "{dtype}")
program = jax.jit(lambda a: onednn.matmul(a, a, transpose_a=True, dtype=jnp.float32))
ours = np.asarray(program(rows)).tobytes()
print([name for name in events if name.endswith(("cache_misses", "cache_hits"))][-1])
onednn.use_library("", dict())
theirs = jax.jit(lambda a: onednn.matmul(a, a, transpose_a=True, dtype=jnp.float32))
assert np.asarray(theirs(rows)).tobytes() == ours
"""
    outcomes = []
    for _ in range(2):
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outcomes.append(done.stdout.split("/")[-1].strip())
    assert outcomes == ["cache_misses", "cache_hits"]
