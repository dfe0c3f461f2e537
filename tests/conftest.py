"""What the tests share: tiny recipes, the command line in a folder of its own, real data."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache as cache_calls
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
from hypothesis import settings

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.host.memory import read_resident_bytes, return_free_pages
from pipeline.core.plugins import loading
from tests.compiling import compile_quickly, lightly_optimized, optimized, unoptimized
from tests.config_files import parse_config_files_once
from tests.forked import run_forked

# A deadline by the clock fails on a machine that others use too.
settings.register_profile("shared", deadline=None)
# The same examples each time, so that a change is judged by what it changes: .ci/run.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.load_profile("shared")

# As many devices as runs on several ask for: their number can't change once one is open.
jax.config.update("jax_num_cpu_devices", 8)

ROOT = Path(__file__).parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"

OPS = (
    "[{name: resize, size: [32, 32], interpolation: linear},"
    "{name: rescale, factor: 0.00392156862745098, shift: 0.0}]"
)

TINY = [
    "dataset.name=synthetic",
    "+dataset.like=digits",
    "+dataset.train_size=96",
    "+dataset.eval_size=40",
    f"dataset.train.ops={OPS}",
    f"dataset.eval.ops={OPS}",
    "schedule=constant",
    "train.batch_size=16",
    "train.optimizer.lr=0.01",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
]
"""LeNet-5 on a few made-up digits: 6 steps an epoch, an evaluation of 3 batches."""

MLP = ("model=mlp", "model.hidden=[16]")
"""A network that compiles and trains in a moment, for tests of something else."""

STEPS = "train.steps=45"
"""The length of most runs: another one is another program to compile."""

LONGEST = (
    "stages/launch/test_local.py",
    "core/plugins/test_runs.py",
    "study/sweep/test_sweep.py",
    "test_versions.py",
    "stages/export/onnx/test_onnx_export.py",
    "models/imported/test_imported_runs.py",
    "training/parallel/test_layouts.py",
    "test_recipes.py",
    "stages/test_image_runs.py",
    "models/lowerings/test_candidates.py",
    "models/lowerings/tune/test_runs.py",
    "study/sweep/test_study.py",
    "stages/test_text_runs.py",
    "models/test_trainable.py",
    "cli/test_cli.py",
    "backends/test_xla.py",
    "data/tables/test_tables.py",
)
"""Files that take a minute or so, which are begun first: two processes then end together."""

LARGEST_PROCESS_BYTES = 3 << 29


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of pytest-xdist share."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cache(session_folder: Path) -> Path:
    """One cache of compiled programs for the whole session, in the folder that XDG names."""
    return session_folder / "pipeline"


@pytest.fixture(autouse=True, scope="session")
def _kept_bytecode(session_folder: Path) -> None:
    """Processes that tests start compile modules to bytecode once for all, not once each.

    It is kept in the session's folder where Python may write none beside the modules.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        os.environ["PYTHONPYCACHEPREFIX"] = str(session_folder / "bytecode")


@pytest.fixture(autouse=True, scope="session")
def _separate_cache(session_folder: Path) -> Iterator[None]:
    """The user's cache, with what was measured on this machine, is neither read nor written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(session_folder))
        yield


@pytest.fixture(autouse=True, scope="session")
def _unsynced_files() -> Iterator[None]:
    """Files aren't synced to the disk: 5 ms each, and no test cuts the power of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@cache_calls
def compose_tiny(cache: Path, *overrides: str) -> Recipe:
    """The tiny recipe with further overrides; programs are kept in `cache`."""
    units = ("steps", "epochs", "sink_epochs", "minutes", "until")
    lengths = tuple(f"train.{unit}" for unit in units)
    length = [] if any(override.startswith(lengths) for override in overrides) else [STEPS]
    return load_recipe("lenet5_digits", [*TINY, *length, f"cache.root={cache}", *overrides])


@pytest.fixture
def tiny(cache: Path, request: pytest.FixtureRequest) -> Callable[..., Recipe]:
    """Compose the tiny recipe with further overrides; with an MLP in tests marked `mlp`."""
    network = MLP if request.node.get_closest_marker("mlp") else ()
    return partial(compose_tiny, cache, *network)


@pytest.fixture
def command(cache: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m pipeline` with the shared cache, in the test's own folder."""

    def run(arguments: Sequence[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}
        return subprocess.run(
            [sys.executable, "-m", "pipeline", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def forked(cache: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command as `command` does, in a process that has imported the package already."""

    def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return run_forked(arguments, tmp_path, {**os.environ, "XDG_CACHE_HOME": str(cache.parent)})

    return run


def _optimized() -> Iterator[None]:
    """Compile programs as a user's are, where bits of different ones are compared."""
    with optimized():
        yield


optimized_programs = pytest.fixture(_optimized)
optimized_programs_of_module = pytest.fixture(_optimized, scope="module")


@pytest.fixture
def unoptimized_programs() -> Iterator[None]:
    """Compile quickly in one test of a module with `optimized_programs_of_module`."""
    with unoptimized():
        yield


@pytest.fixture
def long_runs() -> Iterator[None]:
    """Optimize programs a little, where hundreds of steps take longer than to compile them."""
    with lightly_optimized():
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real MNIST and CIFAR-10."""
    if not SHARED_DATA.is_dir():
        pytest.skip("real MNIST and CIFAR-10 are not at ../shared/data")
    return SHARED_DATA


def pytest_configure() -> None:
    """Compile and compose quickly where pytest runs; scripts that import from here do as a user."""
    compile_quickly(True)
    parse_config_files_once()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage while modules are imported and tests made: all of these stay to the end.

    It would take a tenth of the time of collecting the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--medium", action="store_true", help="run the tests marked medium, too")
    parser.addoption("--complete", action="store_true", help="run all tests, the slow ones too")
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden, to be read in the diff"
    )


def list_left_out_marks(config: pytest.Config) -> set[str]:
    """Return the marks of tests that aren't run: none if tests are named by themselves."""
    if config.getoption("--complete") or any("::" in argument for argument in config.args):
        return set()
    return {"slow"} if config.getoption("--medium") else {"medium", "slow"}


def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[Any] | None:
    """Make no cases of functions with a mark that is left out: a third of all cases."""
    marks = {mark.name for mark in getattr(obj, "pytestmark", ())}
    is_left_out = name.startswith("test_") and marks & list_left_out_marks(collector.config)
    return [] if is_left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files; leave out tests by their marks."""
    place = {ROOT / "tests" / file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    marks = list_left_out_marks(config)
    runs: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if any(map(item.get_closest_marker, marks)) else runs).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = runs


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and never among modules and tests, which stay to the end.

    Hypothesis runs once before: it looks for who refers to its random numbers, which it makes in
    its first test, and would not see frozen modules.
    """
    hypothesis.find(hypothesis.strategies.just(None), lambda _: True)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def _freed_programs() -> Iterator[None]:
    """A process that has grown frees the programs of its files: three would fill 24 GB."""
    yield
    if read_resident_bytes() > LARGEST_PROCESS_BYTES:
        jax.clear_caches()
        gc.collect()
        return_free_pages()


@pytest.fixture(autouse=True)
def _own_plugins() -> Iterator[None]:
    """A plug-in that a test loads is none of the next test's."""
    before, named = dict(loading._loaded), os.environ.get(loading.VARIABLE)
    yield
    loading._loaded.clear()
    loading._loaded.update(before)
    if named is None:
        os.environ.pop(loading.VARIABLE, None)
    else:
        os.environ[loading.VARIABLE] = named


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Ctrl-C raises KeyboardInterrupt, as in any process; those of pytest-xdist ignore it.

    SIGHUP is ignored where the tests are started by nohup, and by what they start, too.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], str]:
    """The text of a file under tests/golden, which with --update-golden is the text given."""

    def expected(file: Path, text: str) -> str:
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        assert file.is_file(), "run pytest --update-golden"
        return file.read_text()

    return expected
