"""Tests in forked processes that import the package from a copy of the project.

Only libraries are imported before the fork. Each process has a fresh cache of compiled programs, so
no program of another process hides a mutation.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from tests.mutations.mutations import Mutation
from tests.requirement_rows import ROOT

LIBRARIES = (
    "flax.linen",
    "grain",
    "hydra",
    "hypothesis",
    "jax",
    "numpy",
    "onnx",
    "optax",
    "orbax.checkpoint",
    "PIL.Image",
    "pyarrow",
    "pydantic",
    "rich",
    "scipy.stats",
    "tensorboardX",
)
OPTIONS = (
    "-n",
    "0",
    "--complete",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore:Module already imported",
)
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
"""Options of `os.waitid` that leave an ended process, so that its group can be killed."""
SECONDS = 400
"""Most seconds for each test of a process, which is then killed. Tests take up to a minute."""


def import_libraries() -> None:
    """Import what takes seconds in every test."""
    for name in LIBRARIES:
        import_module(name)


@dataclass(eq=False)
class Recorder:
    """A plug-in of pytest that notes the functions of which a case passed, and a case failed."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the test itself, and its fixtures if they fail."""
        name = report.nodeid.split("[")[0]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call" and report.passed:
            self.passed.add(name)


@dataclass(frozen=True)
class Outcome:
    """What a process of pytest reported; no tests if it was killed or couldn't collect them."""

    passed: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    is_timed_out: bool = False
    output: str = ""
    seconds: float = 0.0


class Sandbox:
    """A copy of the project in `folder`, and a process that tests it."""

    def __init__(self, folder: Path) -> None:
        self._work = folder
        self._root = folder / "project"
        self._log = folder / "log"
        self._report = folder / "report.json"
        self._process: int | None = None
        self._start_s = 0.0
        self._limit_s = 0.0
        copy_project(self._root)

    @contextmanager
    def mutate(self, mutation: Mutation) -> Iterator[None]:
        """Change one file of the copy. Raises ValueError if the mutation doesn't apply."""
        file = self._root / mutation.file
        text = file.read_text()
        file.write_text(mutation.apply_to(text))
        try:
            yield
        finally:
            file.write_text(text)

    def start(self, tests: Sequence[str]) -> None:
        """Start pytest with these tests, each `FILE::FUNCTION`."""
        self._report.unlink(missing_ok=True)
        self._start_s = time.monotonic()
        self._limit_s = SECONDS * len(tests)
        self._process = os.fork()
        if self._process == 0:
            self._run(tests)
        with suppress(OSError):  # the process does so, too, perhaps later than it is killed
            os.setpgid(self._process, self._process)

    def poll(self) -> Outcome | None:
        """Return the outcome if pytest has ended, else None; it is killed at its limit."""
        assert self._process is not None
        seconds = time.monotonic() - self._start_s
        is_timed_out = seconds > self._limit_s
        if not is_timed_out and os.waitid(os.P_PID, self._process, ENDED) is None:
            return None
        self.close()
        names = json.loads(self._report.read_text()) if self._report.exists() else ([], [])
        passed, failed = map(frozenset, names)
        output = self._log.read_text(errors="replace")
        return Outcome(passed, failed, is_timed_out, output, seconds)

    def close(self) -> None:
        """End the process, and those that it has left running."""
        if self._process is not None:
            os.killpg(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            self._process = None

    def _run(self, tests: Sequence[str]) -> None:
        """Test in this process, a forked one, and end it."""
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with self._log.open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            self._enter_copy()
            recorder = Recorder()
            temporary = self._work / "temporary"
            shutil.rmtree(temporary, ignore_errors=True)
            options = [*OPTIONS, f"--basetemp={temporary}"]
            pytest.main([*options, *tests], plugins=[recorder])
            check_imports(self._root)
            self._report.write_text(json.dumps((list(recorder.passed), list(recorder.failed))))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _enter_copy(self) -> None:
        """Let this process and those that it starts import the package from the copy."""
        os.chdir(self._root)
        os.environ["PYTHONPATH"] = str(self._root)
        sys.path[:] = [str(self._root), *(path for path in sys.path if not is_root(path))]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]


def is_root(path: str) -> bool:
    """Whether an entry of `sys.path` is the project itself, as in an editable installation."""
    return Path(path or ".").resolve() == ROOT


def check_imports(root: Path) -> None:
    """Raise RuntimeError if a module of the package was imported from elsewhere."""
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        is_ours = name.partition(".")[0] in ("pipeline", "tests")
        if is_ours and file and not Path(file).is_relative_to(root):
            raise RuntimeError(f"{name} was imported from {file}")


def copy_project(folder: Path) -> None:
    """Copy the files that git tracks or would track, and compile their modules.

    Bytecode is checked by the source's content: of a file that is changed back within a second,
    date and size may be the same.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    mode = PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder / "pipeline", quiet=1, invalidation_mode=mode)
    shared = ROOT.parent / "shared"
    link = folder.parent / "shared"
    if shared.exists() and not link.exists():
        link.symlink_to(shared.resolve())
