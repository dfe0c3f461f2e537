"""oneDNN's calls in a library that is built on this machine, so that programs are kept on disk.

jaxlib can't write programs with its own oneDNN calls, so each start compiles them. The extra
`onednn` has oneDNN, whose convolutions and products have the same bits. `onednn_calls.cc` makes
calls of XLA's foreign function interface from it, which programs have by name.

g++ builds the library when a run first needs oneDNN. It is kept in the cache, under a digest of
everything that it depends on. A child process compares its results with jaxlib's, bit for bit, for
each type. Without the extra or g++, or with other bits, jaxlib's calls are used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import Array

from pipeline.core.files.compile_cache import ProgramFiles
from pipeline.models.lowerings.formulas import onednn
from pipeline.models.lowerings.problem import Slide

SOURCE = Path(__file__).with_name("onednn_calls.cc")
COMPILER = "g++"
FLAGS = ("-O2", "-w", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
TIMEOUT_S = 300
TRANSIENT = ("No space left on device", "Cannot allocate memory", "Killed signal", "MemoryError")
"""Words of a command's errors that say that the machine lacked something for the moment."""
CALLS = ("convolution", "matmul")
MAX_PARTS = 8
MAX_COPIED_PARTS = 4
"""Most parts in which the library computes a call, and a product whose parts are copies. Results
don't depend on the number of cores, so the parts don't either."""

LARGE_FLOPS = 50_000_000
"""Smallest product whose operands are worth copies."""

SAME = b"same bits"
"""Content of a verdict's file if the library passed its comparison; others have the reason."""


class OnednnCalls:
    """The library's calls, which a process may have loaded."""

    def convolve(
        self, result: jax.ShapeDtypeStruct, images: Array, kernel: Array, slide: Slide
    ) -> Array:
        """Return a convolution, computed in parts of the images."""
        batch = images.shape[0]
        return _call(
            "convolution",
            result,
            (images, kernel),
            strides=_to_integers(slide.strides),
            pads=_to_integers(np.ravel(slide.pads)),
            dilation=_to_integers(slide.dilation),
            groups=np.int64(slide.groups),
            images=np.int64(max(1, batch // _find_parts(batch, MAX_PARTS))),
        )

    def multiply(
        self, result: jax.ShapeDtypeStruct, a: Array, b: Array, transposes: Mapping[str, bool]
    ) -> Array:
        """Return a product, computed in parts of rows, or of copied columns of a transposed `a`."""
        rows, columns = result.shape[-2:]
        parts = 1 if a.ndim > 2 else _find_parts(rows, MAX_PARTS)
        if a.ndim == 2 and transposes["transpose_a"]:
            is_large = 2 * a.size * columns >= LARGE_FLOPS
            parts = _find_parts(columns, MAX_COPIED_PARTS) if is_large else 1
        return _call("matmul", result, (a, b), parts=np.int64(parts), **transposes)


def _to_integers(values: Any) -> np.ndarray:
    return np.asarray(values, np.int64)


def _find_parts(size: int, at_most: int) -> int:
    """Return the largest number up to `at_most` that divides a size."""
    return max(count for count in range(1, at_most + 1) if size % count == 0)


def _call(
    name: str, result: jax.ShapeDtypeStruct, operands: Sequence[Array], **attributes: Any
) -> Array:
    return jax.ffi.ffi_call(onednn.LIBRARY_CALLS + name, result)(*operands, **attributes)


class OnednnLibraryError(Exception):
    """The reason why the library can't be used, as a clause."""


@dataclass(frozen=True)
class Toolchain:
    """Compiler and packages, from which the library is built."""

    compiler: Path
    shared_object: Path
    """`libdnnl.so.3`."""
    headers: Path
    """Folder with `oneapi/dnnl/dnnl.hpp`."""
    versions: str

    def make_digest(self, machine: str) -> str:
        """Return SHA-256 of what the library and its results depend on; `machine` has instruction
        sets."""
        status = self.compiler.stat()
        source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
        texts = (
            source,
            *FLAGS,
            self.versions,
            str(self.shared_object),
            machine,
            str(self.compiler),
        )
        identity = "\0".join((*texts, str(status.st_size), str(status.st_mtime_ns)))
        return hashlib.sha256(identity.encode()).hexdigest()


def find_toolchain() -> Toolchain:
    """Find the compiler and the packages. Raises OnednnLibraryError if one is missing."""
    try:
        packages = [distribution(name) for name in onednn.LIBRARY_PACKAGES]
    except PackageNotFoundError:
        raise OnednnLibraryError(f"{onednn.EXTRA} isn't installed") from None
    library = _locate(packages[0], "libdnnl.so.3")
    header = _locate(packages[1], "oneapi/dnnl/dnnl.hpp")
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise OnednnLibraryError(f"there is no compiler {COMPILER}")
    versions = ", ".join(f"{package.name} {package.version}" for package in packages)
    versions += f", jaxlib {jaxlib.__version__}"
    return Toolchain(Path(compiler).resolve(), library, header.parents[2], versions)


def _locate(package: Distribution, suffix: str) -> Path:
    for file in package.files or ():
        if str(file).endswith(suffix):
            path = Path(str(file.locate())).resolve()
            if path.is_file():
                return path
    raise OnednnLibraryError(f"a package of {onednn.EXTRA} lacks {suffix}")


_LOCK = threading.Lock()
_loaded: dict[str, frozenset[str]] = {}
"""The digest of the library that this process has loaded, and the types that passed."""
_reasons: dict[str, str] = {}
"""Why a type doesn't use the library, by type."""


def open_library(folder: Path, dtype: str, machine: str) -> None:
    """Have the library compute operands of a type, if it can be built and has jaxlib's bits.

    The library and verdicts are in `folder`. A process asks once for a type.
    """
    with _LOCK:
        if dtype not in _reasons:
            _reasons[dtype] = _open(folder, dtype, machine)


def _open(folder: Path, dtype: str, machine: str) -> str:
    """Return why the type doesn't use the library; "" if it does."""
    try:
        toolchain = find_toolchain()
        digest = toolchain.make_digest(machine)
        content = _find_library(toolchain, digest, ProgramFiles(folder, _ignore), dtype)
        if digest not in _loaded:
            if _loaded:
                raise OnednnLibraryError("this process has loaded another one")
            load(content)
        _loaded[digest] = _loaded.get(digest, frozenset()) | {dtype}
        onednn.use_library(digest, dict.fromkeys(_loaded[digest], OnednnCalls()))
    except OnednnLibraryError as error:
        return str(error)
    except OSError as error:
        return f"oneDNN's calls can't be built now: {error.strerror or error}"
    return ""


def explain_absence() -> str:
    """Return why a type of this process doesn't use the library, as a clause; "" if all do."""
    return next((reason for reason in _reasons.values() if reason), "")


def _ignore(line: str) -> None:
    """Leave out the line about a damaged or unwritable file: the library is built again."""


def _find_library(toolchain: Toolchain, digest: str, files: ProgramFiles, dtype: str) -> bytes:
    """Return the library that passed the comparison for a type. Raises OnednnLibraryError."""
    name = f"onednn-{digest}"
    verdict_name = f"{name}-{dtype}"
    verdict = files.get(verdict_name)
    content = files.get(name)
    if verdict is not None and verdict != SAME:
        raise OnednnLibraryError(verdict.decode(errors="replace"))
    if verdict == SAME and content is not None:
        return content
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "onednn.so"
        reason = ""
        try:
            if content is None:
                _build(toolchain, file)
                content = file.read_bytes()
            else:
                file.write_bytes(content)
            _compare(file, dtype)
        except OnednnLibraryError as error:
            reason = str(error)
    if content is not None:
        files.put(name, content)
    files.put(verdict_name, reason.encode() or SAME)
    if content is None or reason:
        raise OnednnLibraryError(reason)
    return content


def _build(toolchain: Toolchain, file: Path) -> None:
    folder = toolchain.shared_object.parent
    command = [str(toolchain.compiler), *FLAGS, str(SOURCE), "-o", str(file)]
    command += [
        "-I",
        jax.ffi.include_dir(),
        "-I",
        str(toolchain.headers),
        str(toolchain.shared_object),
    ]
    command += [f"-Wl,-rpath,{folder}"]
    _run(command, f"{COMPILER} can't build oneDNN's calls", dict(os.environ))


def _compare(file: Path, dtype: str) -> None:
    """Compare the library's results with jaxlib's in a child process, since a call that oneDNN
    refuses ends its process."""
    code = f"from {__name__} import compare_calls; compare_calls({str(file)!r}, {dtype!r})"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    _run([sys.executable, "-c", code], "the built oneDNN has other bits than jaxlib's", environment)


def _run(command: list[str], problem: str, environment: dict[str, str]) -> None:
    """Run a command.

    Raises OnednnLibraryError with the problem and the last line of its errors, or the signal that
    ended it, such as SIGILL for an instruction that the processor lacks. Raises OSError if it
    doesn't end, is killed, or lacks memory or disk, since another start may repeat it.
    """
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"no end after {TIMEOUT_S} s") from None
    if done.returncode == 0:
        return
    messages = done.stderr.decode(errors="replace")
    lines = messages.strip().splitlines() or ["no message"]
    if done.returncode < 0:
        lines.append(f"{Path(command[0]).name} was ended by {_name_signal(-done.returncode)}")
    reason = f"{problem}: {lines[-1][:200]}"
    is_stopped = -done.returncode in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    if is_stopped or any(text in messages for text in TRANSIENT):
        raise OSError(reason)
    raise OnednnLibraryError(reason)


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def load(content: bytes) -> None:
    """Load the library from memory, so that the code that runs is the code that was checked."""
    descriptor = os.memfd_create("onednn")
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(content)
    try:
        library = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
        calls = {name: getattr(library, f"{name}_call") for name in CALLS}
    except (OSError, AttributeError) as error:
        raise OnednnLibraryError(f"the built library can't be loaded: {error}") from None
    finally:
        os.close(descriptor)
    for name, call in calls.items():
        target = onednn.LIBRARY_CALLS + name
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(call), platform="cpu")


def compare_calls(file: str, dtype: str) -> None:
    """Compare all calls with jaxlib's. Call it in a child process.

    Raises AssertionError for a call whose bits differ.
    """
    load(Path(file).read_bytes())
    for name, compute, operands in _list_comparisons(dtype):
        results = []
        for calls in ({}, {dtype: OnednnCalls()}):
            onednn.use_library("compared", calls)
            # A new function, since JAX keeps the traces of functions.
            program = jax.jit(lambda *arrays, compute=compute: compute(*arrays))
            results.append(np.asarray(program(*operands)).tobytes())
        assert results[0] == results[1], name


Comparison = tuple[str, Callable[..., Array], tuple[Array, ...]]


def _list_comparisons(dtype: str) -> Iterator[Comparison]:
    """Yield names, computations and operands, of the kinds that the lowerings have."""
    values = np.random.default_rng(0).normal(size=1 << 20)

    def make(*shape: int) -> Array:
        return jnp.asarray(np.resize(values, shape), dtype)

    same = ((1, 1), (1, 1))
    for channels, size, stride, groups in (
        (3, 32, 1, 1),
        (64, 16, 1, 1),
        (128, 8, 2, 1),
        (512, 4, 1, 1),
        (32, 14, 1, 8),
        (96, 14, 2, 96),
    ):
        slide = Slide(strides=(stride, stride), pads=same, groups=groups)
        features = channels if groups > 1 else 2 * max(channels, 32)
        operands = make(16, size, size, channels), make(3, 3, channels // groups, features)
        name = f"{channels} channels, stride {stride}, {groups} groups"
        yield name, lambda x, w, slide=slide: onednn.convolve(x, w, slide), operands
    swapped = make(64, 16, 16, 8), make(16, 16, 8, 128)
    for dilation in (1, 2):
        slide = Slide(pads=((1, dilation - 1),) * 2, dilation=(dilation, dilation))
        kernel = swapped[1][::dilation, ::dilation]
        compute = lambda x, w, slide=slide: onednn.convolve(x, w, slide, jnp.float32)  # noqa: E731
        yield f"a kernel's gradient, dilation {dilation}", compute, (swapped[0], kernel)
    for rows, k, columns in ((2048, 256, 1024), (8192, 64, 128), (100, 784, 512)):
        for transposes in ((False, False), (False, True), (True, False)):
            left = make(k, rows) if transposes[0] else make(rows, k)
            right = make(columns, k) if transposes[1] else make(k, columns)
            if transposes[0]:
                left, right = make(rows, k), make(rows, columns)
            yield f"{rows}x{k}x{columns} {transposes}", _multiply(*transposes), (left, right)
    yield "a stack", _multiply(True, False), (make(36, 512, 64), make(36, 512, 128))
    yield "a stack of rows", _multiply(False, False), (make(36, 512, 64), make(36, 64, 128))


def _multiply(transpose_a: bool, transpose_b: bool) -> Callable[[Array, Array], Array]:
    def compute(a: Array, b: Array) -> Array:
        dtype = jnp.float32 if transpose_a else None
        return onednn.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b, dtype=dtype)

    return compute
