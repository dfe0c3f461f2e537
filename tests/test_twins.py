"""Every module has a test file of its name, or a row here with the tests that cover it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_layering import modules

TESTS = Path(__file__).parent
ROOT = TESTS.parent
COMPARED = ("_golden", "_parity")
"""Ends of the names of files that test a module against values of another system."""
STEPS = 3
"""Modules between a test and the module that it covers, at most."""
HARNESSES = (
    "benchmarks",
    "crash",
    "faults",
    "fuzz",
    "golden",
    "hostile",
    "layouts",
    "mirrors",
    "mutations",
    "power_cut",
    "scheduler",
)
"""Folders of tests that mirror no package. Files beside them test the project as a whole."""
WHOLE_RUN = "part of every run"

COVERED = {
    # A package whose modules are tested through one of them, or by whole commands.
    "pipeline.checkpoint.mirror_writer": (
        "checkpoint/test_mirror.py",
        "copies are tested by restoring them",
    ),
    "pipeline.cli.commands.*": (
        "cli/test_commands.py",
        "all commands, each by its help and errors",
    ),
    "pipeline.data.ops.*": ("data/ops/test_ops.py", "all map ops, on the host and compiled"),
    "pipeline.data.tables.*": ("data/tables/test_tables.py", "tables from files to predictions"),
    "pipeline.cli.runs.step": ("inspect/step/test_step_report.py", "steps of runs and bundles"),
    "pipeline.inspect.step.step_bundle": ("inspect/step/test_step_report.py", "bundles of steps"),
    "pipeline.inspect.bisect": ("cli/runs/test_bisect.py", "searches of planted changes"),
    "pipeline.cli.runs.receipt": ("cli/runs/test_verify.py", "receipts of small runs"),
    "pipeline.inspect.receipts.recorded_checks": ("cli/runs/test_verify.py", "changed files"),
    "pipeline.inspect.receipts.run_receipt": ("cli/runs/test_verify.py", "chains of small runs"),
    "pipeline.inspect.receipts.statement": ("cli/runs/test_verify.py", "statements, signatures"),
    "pipeline.inspect.receipts.verify_receipt": ("cli/runs/test_verify.py", "forged receipts"),
    "pipeline.inspect.without": ("cli/runs/test_without.py", "runs without samples"),
    "pipeline.inspect.dumps.*": ("inspect/dumps/test_dump_step.py", "dumps of runs"),
    "pipeline.inspect.profiler.*": ("inspect/profiler/test_run_profile.py", "profiles of runs"),
    "pipeline.models.lowerings.formulas.*": (
        "models/lowerings/test_candidates.py",
        "all formulas against loops",
    ),
    "pipeline.models.torch_graph.onnx.*": (
        "models/torch_graph/onnx/test_import_onnx.py",
        "files of all frameworks, and all operators against ONNX Runtime",
    ),
    "pipeline.models.torch_graph.operators.*": (
        "models/torch_graph/computation/test_apply_graph_parity.py",
        "all operators against PyTorch",
    ),
    "pipeline.models.weights.files.*": (
        "models/weights/files/test_weight_files.py",
        "all formats by one reader",
    ),
    "pipeline.models.weights.rules.*": (
        "models/weights/rules/test_rules.py",
        "names of all collections",
    ),
    "pipeline.stages.feature_facts": (
        "stages/test_private_run.py",
        "budgets of private runs; stages/test_measure_robustness.py has the scale of pixels",
    ),
    "pipeline.stages.export.onnx.*": (
        "stages/export/onnx/test_onnx_export.py",
        "graphs against the network, by onnxruntime",
    ),
    "pipeline.data.text.file_names": ("data/text/test_text_format.py", "a name"),
    "pipeline.models.modules.network": (
        "models/modules/test_standard.py",
        "networks of all layers",
    ),
    "pipeline.stages.autosink.sink_plan": (
        "stages/autosink/test_choose_sink.py",
        "sinks of recipes beside chosen ones",
    ),
    "pipeline.stages.runner.*": ("stages/test_run.py", WHOLE_RUN),
    "pipeline.study.sweep.*": ("study/sweep/test_study.py", "sweeps of studies"),
    # Commands, in the folder of what they run.
    "pipeline.__main__": ("cli/test_cli.py", "the command line as a process"),
    "pipeline.cli.runs.attack": (
        "stages/test_measure_robustness.py",
        "the command, of small runs",
    ),
    "pipeline.cli.runs.autopsy": (
        "inspect/autopsy/test_on_failure.py",
        "the command after a failure",
    ),
    "pipeline.cli.completion": ("cli/test_commands.py", "completion of all commands"),
    "pipeline.cli.runs.dump": (
        "inspect/dumps/test_dump_step.py",
        "the command, against dumps of a run",
    ),
    "pipeline.cli.runs.export": ("cli/runs/test_infer.py", "exports that `infer` reads"),
    "pipeline.cli.runs.fuzz": ("inspect/test_fuzz.py", "the command, of small runs"),
    "pipeline.cli.runs.leakage": (
        "inspect/test_leakage.py",
        "the command, of small runs",
    ),
    "pipeline.cli.forecast": ("cli/test_commands.py", "the command and its refusals"),
    "pipeline.cli.profile": ("inspect/profiler/test_run_profile.py", "the command, of small runs"),
    "pipeline.cli.runs.report": (
        "inspect/report/test_write_report.py",
        "the command, of small runs",
    ),
    "pipeline.cli.train": ("test_secrets.py", WHOLE_RUN),
    "pipeline.cli.worker": ("stages/launch/test_local.py", "processes of a run"),
    # The emulated Ascend 910.
    "pipeline.backends.ascend.backend": ("backends/devices/test_ascend.py", "runs on the device"),
    "pipeline.backends.ascend.chip.hardware": (
        "backends/ascend/chip/test_chip_files.py",
        "figures by their files",
    ),
    "pipeline.backends.ascend.chip.tasks": ("backends/ascend/cost/test_task_time.py", "types"),
    "pipeline.backends.ascend.compiler.horizontal_fusion": (
        "backends/ascend/compiler/test_kernels.py",
        "part of every graph's kernels",
    ),
    "pipeline.backends.ascend.compiler.map_layouts": (
        "backends/ascend/compiler/test_dataflow.py",
        "conversions of maps",
    ),
    "pipeline.backends.ascend.cost.vector_work": (
        "backends/ascend/cost/test_task_time_laws.py",
        "laws of prices, and hand-worked ones in test_task_time.py",
    ),
    "pipeline.backends.ascend.published.networks.*": (
        "backends/ascend/published/test_networks.py",
        "parameter counts of all networks",
    ),
    "pipeline.backends.ascend.published.workloads": (
        "backends/ascend/test_validate.py",
        "all published steps",
    ),
    "pipeline.backends.ascend.simulate.streams": (
        "backends/ascend/simulate/test_launch_modes.py",
        "streams of each launch mode",
    ),
    "pipeline.backends.ascend.simulate.timeline": (
        "backends/ascend/simulate/test_launch_modes.py",
        "timelines of each launch mode",
    ),
    # Devices, programs and plans.
    "pipeline.backends.base": ("backends/test_xla.py", "types"),
    "pipeline.backends.device_spec": ("stages/test_run.py", "types"),
    "pipeline.backends.devices.xla": ("config/test_device_checks.py", WHOLE_RUN),
    "pipeline.backends.find_draws": (
        "backends/test_initialisation.py",
        "draws of every initialiser",
    ),
    "pipeline.backends.gpu.step_programs": (
        "backends/gpu/test_gpu_backend.py",
        "programs, run by the processor",
    ),
    "pipeline.backends.graph.tracing": (
        "backends/graph/test_graph.py",
        "graphs of traced functions",
    ),
    "pipeline.backends.planner.blocks": ("backends/planner/test_find_blocks.py", "types"),
    "pipeline.backends.planner.decisions": (
        "backends/planner/test_search.py",
        "prices of decisions, against every plan",
    ),
    "pipeline.backends.rates": ("backends/planner/test_rates.py", "rates of both kinds of devices"),
    "pipeline.backends.step_loops": ("backends/test_xla.py", "loops of compiled steps"),
    # What a run keeps, and its recipe.
    "pipeline.config.compose": ("config/test_checks.py", "all problems of a recipe at once"),
    "pipeline.core.deprecations": ("test_promises.py", "each lasts two minor versions"),
    "pipeline.core.files.error_text": ("config/test_checks.py", "texts of all kinds of problems"),
    "pipeline.core.host.limited_child": (
        "core/host/test_limited_process.py",
        "the other end of the pipe",
    ),
    # Data.
    "pipeline.data.batch": ("training/test_step.py", "types, and samples in chunks"),
    "pipeline.data.copies.mirror_transfer": (
        "data/copies/test_download.py",
        "transfers that are cut and resumed",
    ),
    "pipeline.data.records.*": (
        "data/sources/test_example_files_records.py",
        "records written and read",
    ),
    "pipeline.data.records.example_images": (
        "data/sources/test_example_files.py",
        "images of examples",
    ),
    "pipeline.data.sources.class_folders": (
        "data/sources/test_image_folder.py",
        "folders of images",
    ),
    "pipeline.data.sources.image_columns": (
        "data/sources/test_image_folder.py",
        "columns of folders",
    ),
    "pipeline.data.tables.parquet_child": ("hostile/test_parquet_files.py", "files good and bad"),
    "pipeline.data.text.tokenizer_file": ("data/text/test_tokenizer.py", "with the tokenizers"),
    "pipeline.data.text.tokenizer_child": ("hostile/test_tokenizer_files.py", "files good and bad"),
    # The loop.
    "pipeline.engine.batches": ("engine/test_sink.py", "batches of custom loops"),
    "pipeline.engine.callbacks.callback": ("engine/test_callback_calls.py", "calls of every hook"),
    "pipeline.engine.run_sink": ("engine/test_sink.py", "sinks of custom loops"),
    "pipeline.engine.sink_folder": ("engine/test_sink.py", "folders that resume custom loops"),
    "pipeline.engine.sink_settings": ("engine/test_sink.py", "settings of custom loops"),
    # One run looked at.
    "pipeline.inspect.autopsy.*": ("inspect/autopsy/test_on_failure.py", "autopsies of runs"),
    "pipeline.inspect.compare.*": ("cli/runs/test_compare.py", "the command, of runs and dumps"),
    "pipeline.inspect.report.*": ("inspect/report/test_write_report.py", "reports of runs"),
    # Models.
    "pipeline.models.imported.*": (
        "models/imported/test_imported_runs.py",
        "runs of custom networks",
    ),
    "pipeline.models.layers.token_mixers": (
        "models/modules/test_token_mixers.py",
        "the layers compute by their modules",
    ),
    "pipeline.models.layers.tokens": (
        "models/modules/test_tokens.py",
        "each layer with its module",
    ),
    "pipeline.models.modules.recurrent": (
        "models/modules/test_layers_golden.py",
        "values and gradients of PyTorch",
    ),
    "pipeline.models.layers.tables": (
        "models/modules/test_tables.py",
        "the layers with their descriptions",
    ),
    "pipeline.stages.export.onnx.composite_nodes": (
        "stages/test_table_runs.py",
        "whole runs, exported",
    ),
    "pipeline.models.torch_graph.conversion.*": (
        "models/torch_graph/conversion/test_export_module.py",
        "modules of PyTorch",
    ),
    # Stages of a run.
    "pipeline.stages.layer_table": ("cli/test_summary.py", "the table that `summary` prints"),
    "pipeline.study.population.shared_program": (
        "study/sweep/test_vectorized.py",
        "sweeps of one program",
    ),
    # Training.
    "pipeline.training.features.curvature": (
        "training/optimizers/thor/test_thor_transform.py",
        "sums over made-up layers",
    ),
    "pipeline.training.features.accumulation": ("training/test_state.py", "gradients of steps"),
    "pipeline.training.step_feature": (
        "training/features/components/test_weight_averages.py",
        "types",
    ),
    "pipeline.training.features.hardest_samples": (
        "training/test_losses_reduction.py",
        "losses of batches",
    ),
    "pipeline.training.features.parameter_rates": ("training/test_update.py", "rates of updates"),
    "pipeline.training.estimated_step": ("stages/test_estimate.py", "estimated steps of recipes"),
    "pipeline.training.forward_pass": ("training/test_step.py", "gradients of steps"),
    "pipeline.training.step_config": ("training/test_step.py", "configurations of steps"),
    "pipeline.training.metric_names": ("engine/test_early_stop.py", "a list"),
    "pipeline.training.parallel.*": (
        "training/parallel/test_layouts.py",
        "runs on several devices",
    ),
    "pipeline.training.component_specs": ("training/optimizers/test_first_order.py", "types"),
}
"""Modules without a test file of their name: the tests that cover them, below tests/, and why.

PACKAGE.* is for all such modules of a package.
"""

CROSS_CUTTING = frozenset(
    {
        "backends/ascend/compiler/test_float32_norms.py",
        "backends/graph/test_one_reader.py",
        "backends/planner/test_compiled_collectives.py",
        "backends/test_eager.py",
        "core/plugins/test_runs.py",
        "data/test_pixel_labels.py",
        "engine/test_streamed_images.py",
        "engine/test_left_out.py",
        "inspect/autopsy/test_injections.py",
        "models/lowerings/tune/test_runs.py",
        "models/modules/test_decoders_golden.py",
        "models/modules/test_layers_golden.py",
        "models/test_conf.py",
        "models/test_trainable.py",
        "models/torch_graph/operators/test_core_operators.py",
        "stages/launch/test_several_processes.py",
        "stages/test_adversarial_runs.py",
        "stages/test_image_runs.py",
        "stages/test_learning_rates.py",
        "stages/test_parameters.py",
        "stages/test_recomputation.py",
        "stages/test_audio_runs.py",
        "stages/test_series_runs.py",
        "stages/test_several_inputs.py",
        "stages/test_table_runs.py",
        "stages/test_text_pair_runs.py",
        "stages/test_text_runs.py",
        "training/optimizers/thor/test_runs.py",
        "training/parallel/test_layouts.py",
        "training/test_accumulated_memory.py",
        "training/test_custom_backward.py",
        "training/test_reductions_golden.py",
        "training/test_trajectories.py",
    }
)
"""Test files of what no module does alone, in the folder that does most of it."""


def twin(module: str, end: str = "") -> Path:
    """Return the test file of a module's name."""
    *packages, name = module.split(".")[1:]
    return TESTS.joinpath(*packages, f"test_{name}{end}.py")


def has_twin(module: str) -> bool:
    """Return whether a test file has the name of the module."""
    return any(twin(module, end).exists() for end in ("", *COMPARED))


def without_twin() -> list[str]:
    """Return the modules, but packages, that no test file has the name of."""
    leaves = (name for name, file in modules().items() if file.name != "__init__.py")
    return sorted(name for name in leaves if not has_twin(name))


def row_of(module: str) -> str | None:
    """Return the row of a module, or that of its package."""
    of_package = f"{module.rpartition('.')[0]}.*"
    return next((row for row in (module, of_package) if row in COVERED), None)


@cache
def imports(file: Path) -> frozenset[str]:
    """Return what a file imports or names in a string, inside functions too, as dotted names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"\bpipeline(?:\.\w+)+", node.value))
    return frozenset(names)


def imported_files(file: Path, top: str) -> Iterator[Path]:
    """Yield the modules of the package, or of the tests (`top`), that a file imports."""
    for name in imports(file):
        if name.split(".")[0] == top:
            path = ROOT.joinpath(*name.split("."))
            yield from (f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file())


def with_helpers(file: Path) -> set[Path]:
    """Return a test file and the modules of tests that it imports."""
    files = {file}
    waiting = [file]
    while waiting:
        for helper in set(imported_files(waiting.pop(), "tests")) - files:
            files.add(helper)
            waiting.append(helper)
    return files


def called_commands(file: Path) -> Iterator[Path]:
    """Yield the modules of the commands that a test calls."""
    for command in (ROOT / "pipeline" / "cli").rglob("*.py"):
        is_named = f'"{command.stem.replace("_", "-")}"' in file.read_text()
        if is_named or f"tests.command_line.{command.stem}" in imports(file):
            yield command


def covers(file: Path, covered: Collection[str]) -> bool:
    """Return whether a test imports one of some modules, or one that leads there in `STEPS`."""
    targets = {modules()[module] for module in covered}
    reached = {path for test in with_helpers(file) for path in imported_files(test, "pipeline")}
    reached |= set(called_commands(file))
    for _ in range(STEPS):
        if targets & reached:
            break
        reached |= {path for one in reached for path in imported_files(one, "pipeline")}
    return bool(targets & reached)


def test_modules_have_twin_tests_or_a_row() -> None:
    assert [name for name in without_twin() if not row_of(name)] == []


def test_rows_name_modules_without_twins() -> None:
    assert sorted(set(COVERED) - {row_of(name) for name in without_twin()}) == []


@pytest.mark.medium
@pytest.mark.parametrize("row", COVERED)
def test_tests_of_a_row_reach_its_modules(row: str) -> None:
    file, reason = COVERED[row]
    assert reason
    assert covers(TESTS / file, [name for name in without_twin() if row_of(name) == row])


@pytest.mark.medium
def test_test_files_have_a_module_or_are_listed() -> None:
    assert sorted(unpaired()) == sorted(CROSS_CUTTING)


def unpaired() -> Iterator[str]:
    """Yield test files without a module or package that their names begin with."""
    packages = {path.parent for path in (ROOT / "pipeline").rglob("*.py")}
    for file in sorted(TESTS.rglob("test_*.py")):
        place = file.relative_to(TESTS)
        folder = ROOT / "pipeline" / place.parent
        names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        names |= {path.name for path in packages if folder in (path, path.parent)}
        stem = place.stem.removeprefix("test_")
        is_mirror = len(place.parts) > 1 and place.parts[0] not in HARNESSES
        if is_mirror and not any(stem == name or stem.startswith(f"{name}_") for name in names):
            yield place.as_posix()


def test_unrelated_test_does_not_cover_a_module() -> None:
    assert covers(TESTS / "core/files/test_csv_file.py", ["pipeline.core.files.csv_file"])
    assert not covers(TESTS / "core/files/test_csv_file.py", ["pipeline.stages.fine_tuning"])
