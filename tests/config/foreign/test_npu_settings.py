"""Settings of a script by name: every assignment and keyword has a line, in code too."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.foreign.adopt import Adoption, adopt
from pipeline.config.foreign.npu_run_config import RULES
from pipeline.config.foreign.npu_settings import NAME, read_settings
from pipeline.config.foreign.script import Script

ARGUMENTS = (
    "model_dir", "tf_random_seed", "save_summary_steps", "save_checkpoints_steps",
    "save_checkpoints_secs", "session_config", "keep_checkpoint_max",
    "keep_checkpoint_every_n_hours", "log_step_count_steps", "iterations_per_loop",
    "profiling_config", "enable_data_pre_proc", "precision_mode", "variable_placement",
    "enable_reduce_precision", "variable_format_optimize", "mix_compile_mode", "hcom_parallel",
    "graph_memory_max_size", "variable_memory_max_size", "auto_tune_mode", "dump_config",
    "stream_max_parallel_num", "is_tailing_optimization", "horovod_mode", "graph_run_mode",
    "op_debug_level", "enable_scope_fusion_passes", "enable_exception_dump",
    "op_select_implmode", "optypelist_for_implmode", "dynamic_input_config", "aoe_mode",
    "work_path", "buffer_optimize", "enable_small_channel", "fusion_switch_file",
    "enable_compress_weight", "compress_weight_conf", "op_compiler_cache_mode",
    "op_compiler_cache_dir", "debug_dir", "hccl_timeout", "op_wait_timeout",
    "op_execute_timeout", "HCCL_algorithm", "customize_dtypes", "op_precision_mode",
    "modify_mixlist", "device_type", "soc_config", "session_device_id", "distribute_config",
    "jit_compile", "topo_sorting_mode", "deterministic", "memory_config",
)  # fmt: skip
"""NPURunConfig's arguments, in the documents of CANN 5 to 8."""
PARAMETERS = (
    "use_off_line", "mix_compile_mode", "enable_data_pre_proc", "iterations_per_loop",
    "precision_mode", "auto_tune_mode", "hcom_parallel", "graph_memory_max_size",
    "profiling_mode", "profiling_options", "enable_dump", "dump_path", "dump_step", "dump_mode",
    "enable_dump_debug", "dynamic_input", "aoe_mode", "min_group_size", "in_out_pair",
    "local_rank_id", "my_own_switch",
)  # fmt: skip
"""Names of custom_op.parameter_map."""
ESTIMATOR = (
    "model_fn", "model_dir", "params", "warm_start_from",
)  # fmt: skip
TRAIN = (
    "input_fn", "hooks", "steps", "max_steps", "saving_listeners",
)  # fmt: skip
EVALUATE = (
    "input_fn", "steps", "hooks", "checkpoint_path", "name",
)  # fmt: skip
SESSION = (
    "allow_soft_placement", "log_device_placement", "intra_op_parallelism_threads",
)  # fmt: skip


def adopt_text(text: str) -> Adoption:
    """Adopt the settings of a script, without a check of the recipe."""
    return adopt(NAME, "a script", read_settings(Script(ast.parse(text))), RULES)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[str, set[str]]:
    """A script, and marks: a different number in each of its keywords and assignments."""
    count = 0

    def mark() -> str:
        nonlocal count
        count += 1
        number = f"77{count:03}"
        return draw(
            st.sampled_from(
                [number, f"'{number}'", f"b'{number}'", f"tf.compat.as_bytes('{number}')",
                 f"read({number})", f"[{number}]", f"Inner(a={number})", f"-{number}"]
            )
        )  # fmt: skip

    def call(name: str, names: tuple[str, ...]) -> str:
        chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=4))
        return f"{name}({', '.join(f'{item}={mark()}' for item in chosen)})"

    statements = {
        "constant": lambda: f"c{count} = {mark()}",
        "attribute": lambda: f"session_config.gpu_options.field{count} = {mark()}",
        "parameter": lambda: (
            f"op.parameter_map[{draw(st.sampled_from(PARAMETERS))!r}].s = {mark()}"
        ),
        "session": lambda: f"session = {call('tf.ConfigProto', SESSION)}",
        "train": lambda: f"estimator.{call('train', TRAIN)}",
        "evaluate": lambda: f"estimator.{call('evaluate', EVALUATE)}",
        "call": lambda: f"tf.app.run(argv={mark()}, main=f({mark()}))",
        "augmented": lambda: f"total += {mark()}",
        "annotated": lambda: f"size: int = {mark()}",
        "batch": lambda: f"data = data.shuffle(buffer_size={mark()}).batch({mark()}, True)",
    }
    kinds = draw(st.lists(st.sampled_from([*statements]), max_size=6))
    lines = [statements[kind]() for kind in kinds]
    config = f"config = {call(NAME, ARGUMENTS)}"
    estimator = f"estimator = {call('NPUEstimator', ESTIMATOR)}"
    lines.insert(draw(st.integers(0, len(lines))), config)
    lines.append(estimator)
    if draw(st.booleans()):
        lines = ["def main(_):", *(f"    {line}" for line in lines)]
    return "\n".join(lines), {f"77{number:03}" for number in range(1, count + 1)}


@pytest.mark.medium
@given(scripts())
@settings(max_examples=300, deadline=None)
def test_every_keyword_and_assignment_has_a_line(script: tuple[str, set[str]]) -> None:
    text, marks = script
    adoption = adopt_text(text)
    names = [row.setting for row in adoption.rows]
    assert len(names) == len(set(names))
    assert set(adoption.settings) <= set(names)
    assert all(row.keys or row.note for row in adoption.rows)
    shown = " ".join(f"{name} {value!r}" for name, value in adoption.settings.items())
    assert {mark for mark in marks if mark not in shown} == set()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_documented_argument_has_a_line(name: str) -> None:
    rows = {row.setting: row for row in adopt_text(f"NPURunConfig({name}='text')").rows}
    assert rows[name].keys or rows[name].note


def test_parameters_are_settings_of_their_names() -> None:
    read = read_settings(
        Script(
            ast.parse(
                "custom_op.parameter_map['precision_mode'].s = tf.compat.as_bytes('force_fp16')\n"
                "custom_op.parameter_map['iterations_per_loop'].i = 10\n"
                "custom_op.parameter_map[name].b = True"
            )
        )
    )
    assert read == {"precision_mode": "force_fp16", "iterations_per_loop": 10, "[name]": True}


def test_repeated_setting_has_a_line_of_its_own() -> None:
    rows = {
        row.setting: row
        for row in adopt_text(
            "NPURunConfig(precision_mode='force_fp16')\n"
            "op.parameter_map['precision_mode'].s = 'must_keep_origin_dtype'\n"
            "e.train(f, steps=3)\ne.train(f, steps=4)\na = 1; b = 2"
        ).rows
    }
    assert rows["precision_mode"].keys == {"train.precision_mode": "force_fp16"}
    assert rows["precision_mode of line 2"].note == "another line sets it first"
    assert rows["max_steps"].keys == {"train.steps": 3}
    assert rows["max_steps of line 4"].keys == {}
    assert "line 5" in rows


def test_code_has_a_line_for_each_statement_or_function() -> None:
    read = read_settings(
        Script(
            ast.parse(
                "import os\n"
                "def model_fn(x):\n    return f(x, units=3)\n"
                "def main(_):\n"
                "    'Trains.'\n"
                "    if os.name:\n        NPURunConfig(model_dir=DIR)\n"
                "    else:\n        other = 3\n"
                "    try:\n        NPUEstimator(f)\n"
                "    except E:\n        y = 1\n"
                "    z(NPUEstimator(f), k=2)\n"
            )
        )
    )
    lines = {name: repr(value) for name, value in read.items() if name.startswith("line")}
    assert lines == {
        "line 2": "def model_fn(x):",
        "line 6": "if os.name:",
        "line 9": "other = 3",
        "line 10": "try:",
        "line 13": "y = 1",
        "line 14": "z(NPUEstimator(f), k=2)",
    }
