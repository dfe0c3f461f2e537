"""Imports point one way, without circles, and what checks a recipe stays free of jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROOMS = [
    "core",
    "data",
    "models",
    "training",
    "backends",
    "checkpoint",
    "engine",
    "config",
    "stages",
    "study",
    "inspect",
    "api",
    "cli",
]
"""Folders of the package from the ground to the command line: each imports from those before it."""
PUBLIC = ("pipeline", "pipeline.__main__")
"""Modules above all rooms: what is imported as `pipeline`, and the command."""
LAZY_PACKAGES = {
    # Components of recipes, which are checked without jax.
    "jax", "jaxlib", "optax", "flax",
    # Extras: who doesn't use them doesn't install them.
    "dp_accounting", "h5py", "keras", "matplotlib", "mlflow", "onnx", "onnxruntime", "optuna",
    "ray", "sklearn", "torch", "trackio",
    "wandb",
    # Formats of data that few runs read.
    "array_record", "google", "google_crc32c", "grain", "msgpack", "pyarrow", "scipy",
    "soundfile", "tokenizers",
    # The time until the first step.
    "PIL", "jinja2", "numpy", "orbax", "re2", "rich", "tensorboardX",
    # A module of one version alone.
    "hydra",
}  # fmt: skip
"""Packages that may be imported inside a function."""
LAZY_MODULES = {
    # Descriptions of components, which import no jax, import what computes them.
    "pipeline.backends.ascend.backend",
    "pipeline.backends.devices.ascend",
    "pipeline.backends.devices.xla",
    "pipeline.models.blocks.layered_model",
    "pipeline.models.imported.model_specs",
    "pipeline.models.lowerings.tune.machine",
    "pipeline.models.modules.convolution",
    "pipeline.models.modules.tokens",
    "pipeline.models.networks.foreign_networks",
    "pipeline.models.networks.table_network",
    "pipeline.models.torch_graph.computation.torch_network",
    "pipeline.stages.runner.calibration",
    "pipeline.training.features.averages",
    "pipeline.training.features.components.loss_terms",
    "pipeline.training.features.components.weight_averages",
    "pipeline.training.features.components.lora",
    "pipeline.training.features.components.measurements",
    "pipeline.training.losses",
    "pipeline.training.target_metrics",
    "pipeline.training.optimizers.layerwise",
    "pipeline.training.optimizers.thor.thor_spec",
    # The start of a command, and what few runs need.
    "pipeline.config.compose",
    "pipeline.config.privacy_robustness_checks",
    "pipeline.core.files.error_text",
    "pipeline.data.folds",
    "pipeline.data.sources.combined",
    "pipeline.data.sources.text",
    "pipeline.__main__",
    "pipeline.backends.ascend",
    "pipeline.cli.commands.command",
    "pipeline.cli.commands.help",
    "pipeline.cli.commands.parameters",
    "pipeline.cli.commands.root",
    "pipeline.cli.doctor",
    "pipeline.cli.profile",
    "pipeline.cli.job",
    "pipeline.cli.runs.export",
    "pipeline.models.weights.files.weight_files",
    "pipeline.cli.worker",
    "pipeline.cli.train",
    "pipeline.core.files.name_text",
    "pipeline.core.host.launchers",
    "pipeline.core.plugins.loading",
    "pipeline.data.copies.download",
    "pipeline.data.tables.fit_table",
    "pipeline.data.text.text_format",
    "pipeline.study.sweep.jobs",
    "pipeline.engine.sink",
    "pipeline.training.step_config",
    "pipeline.inspect.dumps.opened_recipe",
    "pipeline.data.dataset_spec",
    "pipeline.engine.monitors.observers",
    "pipeline.stages.build",
    "pipeline.stages.build_checks",
    "pipeline.stages.compile",
    "pipeline.stages.data",
    "pipeline.study.sweep.grid",
    "pipeline.stages.estimate",
    "pipeline.stages.lower",
    "pipeline.stages.sample_sizes",
    "pipeline.training.bucketing",
    "pipeline.stages.step_features",
    "pipeline.stages.launch.join",
    "pipeline.stages.record.provenance",
    "pipeline.stages.record.recorded_recipe",
    "pipeline.inspect.autopsy.run_autopsy",
    "pipeline.stages.run",
    "pipeline.stages.runner.evaluations",
    "pipeline.stages.runner.initial_state",
    "pipeline.stages.runner.open_run",
    "pipeline.stages.runner.open_training",
    "pipeline.stages.runner.outlook",
    # The command says what to install before it imports what needs an extra.
    "pipeline.cli.recommend",
}
"""Modules that import others of the package inside a function."""
MAX_MODULES = 25


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    files = sorted((ROOT / "pipeline").rglob("*.py"))
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


def room_of(module: str) -> str:
    """Return the name of the folder below `pipeline` that a module is in."""
    return module.split(".")[1]


def folder_of(module: str) -> str:
    """Return the package of a module: itself if it is one."""
    is_package = modules()[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


@cache
def imports(module: str) -> frozenset[str]:
    """Return the project's modules that a module imports, wherever in its file it does."""
    tree = ast.parse(modules()[module].read_text())
    return frozenset(name for name in _imported_names(tree) if name != module)


@cache
def runtime_imports(module: str) -> frozenset[str]:
    """Return the project's modules that a module imports, but for those of type checking alone."""
    tree = ast.parse(modules()[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
            node.body = [] if node.test.id == "TYPE_CHECKING" else node.body
    return frozenset(name for name in _imported_names(tree) if name != module)


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pipeline"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())


def test_modules_belong_to_rooms() -> None:
    assert {room_of(module) for module in modules() if module not in PUBLIC} == set(ROOMS)
    assert len(modules()) > 300


@pytest.mark.medium
@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_from_rooms_below(room: str) -> None:
    below = ROOMS[: ROOMS.index(room) + 1]
    wrong = [
        f"{module} imports {imported}"
        for module in modules()
        if module not in PUBLIC and room_of(module) == room
        for imported in sorted(imports(module))
        if imported in PUBLIC or room_of(imported) not in below
    ]
    assert wrong == []


@pytest.mark.medium
def test_folders_have_no_circular_imports() -> None:
    """A room's folders have an order, too; a folder and those inside it are one."""
    graph: dict[str, set[str]] = {}
    for module in modules():
        if module not in PUBLIC:
            folder = folder_of(module)
            targets = {folder_of(imported) for imported in runtime_imports(module)}
            apart = {target for target in targets if not _is_nested(folder, target)}
            graph.setdefault(folder, set()).update(apart)
    assert find_circle(graph) == []


def _is_nested(folder: str, other: str) -> bool:
    return f"{folder}.".startswith(f"{other}.") or f"{other}.".startswith(f"{folder}.")


@pytest.mark.medium
def test_imports_inside_functions_are_of_listed_packages() -> None:
    own, others = set(), set()
    for module, file in modules().items():
        for name in _imports_inside_functions(ast.parse(file.read_text())):
            package = name.partition(".")[0]
            if package == "pipeline":
                own.add(module)
            elif package not in sys.stdlib_module_names:
                others.add(package)
    assert sorted(own - LAZY_MODULES) == []
    assert sorted(others - LAZY_PACKAGES) == []


def _imports_inside_functions(tree: ast.AST) -> Iterator[str]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    yield node.module or ""
                elif isinstance(node, ast.Import):
                    yield from (alias.name for alias in node.names)


def find_circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the nodes of a circle in a graph, in the order of the arrows; none if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


@pytest.mark.medium
def test_modules_that_are_imported_exist() -> None:
    """In each folder of the project and in functions: mypy skips a module that it can't find."""
    folders = ["benchmarks", "examples", "hydra_plugins", "pipeline", "tests"]
    missing = [
        f"{file.relative_to(ROOT)}: {node.module}"
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pipeline"
        if node.module not in modules()
    ]
    assert missing == []


@pytest.mark.medium
def test_modules_have_no_circular_imports() -> None:
    assert find_circle({module: runtime_imports(module) for module in modules()}) == []


def test_top_level_has_no_other_modules() -> None:
    assert {file.stem for file in (ROOT / "pipeline").glob("*.py")} == {"__init__", "__main__"}


def test_folders_have_a_limited_number_of_modules() -> None:
    counts = Counter(file.parent for file in modules().values())
    assert {str(folder): n for folder, n in counts.items() if n > MAX_MODULES} == {}


def test_module_name_is_used_at_most_twice() -> None:
    names = Counter(file.stem for file in modules().values() if not file.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 2] == []


@pytest.mark.slow
def test_checking_a_recipe_imports_no_jax() -> None:
    script = (
        "import sys; from pipeline import load_recipe;"
        "load_recipe('lenet5_mnist', ['run_features=[calibrate, estimate]']);"
        "print([m for m in ('jax', 'flax', 'optax', 'orbax') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
