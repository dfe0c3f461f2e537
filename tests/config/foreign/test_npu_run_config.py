"""Settings of a script by name: every assignment and keyword has a line, in code too.

Scripts with an NPURunConfig as recipes: parsed, never run.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import load_recipe
from pipeline.config.foreign.adopt import Adoption, adopt, make_recipe_text
from pipeline.config.foreign.npu_run_config import NAME, RULES, adopt_npu_run_config, read_settings
from pipeline.config.foreign.script import Script
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from tests.config.foreign.files import EAGER_RUN, FULL_RUN, PLAIN_RUN, REFUSED_RUN

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


def adopt_script(folder: Path, text: str) -> Adoption:
    """Adopt the text of a script."""
    file = folder / "train.py"
    file.write_text(text)
    return adopt_npu_run_config(file)


def write_recipe(folder: Path, text: str) -> Recipe:
    """Adopt the text of a script, and return the recipe of the file."""
    file = folder / "adopted.yaml"
    file.write_text(make_recipe_text(adopt_script(folder, text), file))
    return load_recipe(str(file))


def find_problems(folder: Path, text: str) -> list[str]:
    """Return the problems of a script without the file's name."""
    with pytest.raises(RecipeError) as caught:
        adopt_script(folder, text)
    return [problem.partition(".py: ")[2] for problem in caught.value.problems]


@pytest.mark.medium
def test_short_run_config_becomes_a_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, PLAIN_RUN)
    assert recipe.device.name == "ascend"
    assert (recipe.train.steps, recipe.train.sink_size, recipe.seed) == (200, 10, 3)
    assert recipe.checkpoint.every_steps == 100


@pytest.mark.medium
def test_full_run_config_becomes_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, FULL_RUN)
    train = recipe.train
    assert (train.steps, train.sink_size, train.batch_size) == (1000, 10, 16)
    assert (train.precision, train.sink) == ("O2", True)
    assert (recipe.device.auto_tune, recipe.autotune) == ("rl,ga", "bank")
    assert (recipe.checkpoint.keep, recipe.checkpoint.keep_minutes) == (5, 120)
    assert (recipe.profile.mode, recipe.profile.task_trace) == ("on", False)
    assert (recipe.dump.steps, recipe.dump.what) == ("0|5", "all")
    assert recipe.monitor.loss_every == 50
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_script_without_literal_steps_trains_one_loop(tmp_path: Path) -> None:
    text = "config = NPURunConfig(iterations_per_loop=100)\nestimator.train(f, max_steps=FLAGS.n)"
    assert write_recipe(tmp_path, text).train.steps == 100


def test_steps_not_divisible_by_the_loop_are_refused(tmp_path: Path) -> None:
    text = "config = NPURunConfig(iterations_per_loop=100)\nestimator.train(f, max_steps=250)"
    with pytest.raises(RecipeError, match=r"iterations_per_loop = 100: must divide the 250 steps"):
        write_recipe(tmp_path, text)


@pytest.mark.slow
def test_eager_mode_and_closed_sessions_are_accepted(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, EAGER_RUN)
    assert (recipe.train.mode, recipe.train.sink_size) == ("eager", 1)


def test_adapter_error_lists_all_problems(tmp_path: Path) -> None:
    """G-01 and G-02: five parameters, and six rules."""
    problems = find_problems(tmp_path, REFUSED_RUN)
    assert problems == [
        "line 10: train_distribute: NPURunConfig refuses it",
        "line 11: device_fn: NPURunConfig refuses it",
        "line 12: protocol: NPURunConfig refuses it",
        "line 13: eval_distribute: NPURunConfig refuses it",
        "line 14: experimental_distribute: NPURunConfig refuses it",
        "line 5: tf.device must be deleted",
        "line 7: batches need drop_remainder=True, a static shape",
        "line 6: a placeholder needs sizes, a static shape, not None",
        "rewrite_options.remapping must be set to RewriterConfig.OFF",
        "line 4: disable_model_pruning must stay off",
        "line 8: a session must be in `with`, or end by close()",
    ]


@pytest.mark.parametrize("value", ["RewriterConfig.ON", "mode", "RewriterConfig.DEFAULT"])
def test_remapping_must_be_off(value: str, tmp_path: Path) -> None:
    text = f"{PLAIN_RUN}rewrite.remapping = {value}\n"
    assert find_problems(tmp_path, text) == [
        "rewrite_options.remapping must be set to RewriterConfig.OFF"
    ]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("print(1)", "has 0 calls of NPURunConfig; must have one, or a parameter_map"),
        (
            "NPURunConfig(); NPURunConfig()",
            "has 2 calls of NPURunConfig; must have one, or a parameter_map",
        ),
        ("NPURunConfig(10)", "line 1: NPURunConfig must have arguments as NAME=VALUE alone"),
        ("NPURunConfig(**keys)", "line 1: NPURunConfig must have arguments as NAME=VALUE alone"),
    ],
)
def test_arguments_must_be_readable(call: str, problem: str, tmp_path: Path) -> None:
    assert find_problems(tmp_path, call) == [problem]


@pytest.mark.parametrize(
    ("hours", "keys", "note"),
    [
        ("8784", {"checkpoint.keep_minutes": 527_040}, ""),
        ("9000", {}, "checkpoint.keep_minutes must be at most 527,040"),
        ("1e999", {}, "checkpoint.keep_minutes must be at most 527,040"),
        ("10000", {}, "is off"),
        ("0.001", {"checkpoint.keep_minutes": 1}, ""),
    ],
)
def test_hours_between_checkpoints_are_mapped_or_limited(
    hours: str, keys: dict[str, int], note: str, tmp_path: Path
) -> None:
    text = f"NPURunConfig(keep_checkpoint_every_n_hours={hours})"
    rows = {row.setting: row for row in adopt_script(tmp_path, text).rows}
    row = rows["keep_checkpoint_every_n_hours"]
    assert (row.keys, row.note) == (keys, note)


SESSION_RUN = """
config = tf.ConfigProto()
custom_op = config.graph_options.rewrite_options.custom_optimizers.add()
custom_op.name = "NpuOptimizer"
custom_op.parameter_map["use_off_line"].b = True
custom_op.parameter_map["iterations_per_loop"].i = 10
custom_op.parameter_map["precision_mode"].s = tf.compat.as_bytes("allow_mix_precision")
custom_op.parameter_map["auto_tune_mode"].s = tf.compat.as_bytes("GA")
custom_op.parameter_map["enable_dump"].b = True
custom_op.parameter_map["dump_step"].s = tf.compat.as_bytes("0|5")
custom_op.parameter_map["profiling_mode"].b = True
custom_op.parameter_map["profiling_options"].s = tf.compat.as_bytes('{"task_trace": "off"}')
config.graph_options.rewrite_options.remapping = RewriterConfig.OFF
scale = FixedLossScaleManager(512)
with tf.Session(config=config) as session:
    session.run(init)
"""


@pytest.mark.medium
def test_parameter_map_becomes_a_recipe(tmp_path: Path) -> None:
    """G-01: sess.run, which has no NPURunConfig."""
    recipe = write_recipe(tmp_path, SESSION_RUN)
    assert (recipe.train.steps, recipe.train.sink_size, recipe.train.precision) == (10, 10, "O2")
    assert recipe.device.auto_tune == "ga"
    assert (recipe.dump.steps, recipe.dump.what) == ("0|5", "output")
    assert (recipe.profile.mode, recipe.profile.task_trace) == ("on", False)
    assert recipe.train.loss_scale.model_dump()["scale"] == 512
    rows = {row.setting: row for row in adopt_script(tmp_path, SESSION_RUN).rows}
    assert rows["use_off_line"].note == "the device computes the whole step"
    assert rows["line 4"].keys == {}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("'ckpt'", "warm_start_from"),
        (
            "tf.estimator.WarmStartSettings(ckpt_to_initialize_from='ckpt', vars_to_warm_start=v)",
            "warm_start_from.ckpt_to_initialize_from",
        ),
    ],
)
def test_warm_start_becomes_a_restored_checkpoint(value: str, name: str, tmp_path: Path) -> None:
    """K-06."""
    text = f"{PLAIN_RUN}NPUEstimator(model_fn=f, config=config, warm_start_from={value})"
    rows = {row.setting: row for row in adopt_script(tmp_path, text).rows}
    assert rows[name].keys == {"checkpoint.restore": "ckpt"}
    if "Settings" in value:
        assert rows["warm_start_from.vars_to_warm_start"].note
    assert write_recipe(tmp_path, text).checkpoint.restore == Path("ckpt")


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ("dump_config=DumpConfig(enable_dump=True)", {}),
        ("dump_config=DumpConfig(enable_dump=False, dump_step='1')", {}),
        ("dump_config=DumpConfig(enable_dump=True, dump_step=read())", {}),
        ("profiling_config=ProfilingConfig(True, profiling_options=read())", {}),
        (
            "profiling_config=ProfilingConfig(enable_profiling=True, profiling_options=read())",
            {"profile.mode": "on"},
        ),
    ],
)
def test_incomplete_observers_are_unmapped(
    settings: str, keys: dict[str, object], tmp_path: Path
) -> None:
    rows = adopt_script(tmp_path, f"NPURunConfig({settings})").rows
    mapped = {key: value for row in rows for key, value in row.keys.items()}
    assert {key: mapped[key] for key in mapped if key[:4] in ("prof", "dump")} == keys
    assert all(row.keys or row.note for row in rows)


def test_growing_loss_scale_is_mapped(tmp_path: Path) -> None:
    text = f"{PLAIN_RUN}ExponentialUpdateLossScaleManager(1024, 50, decr_ratio=0.5)"
    rows = {row.setting: row for row in adopt_script(tmp_path, text).rows}
    manager = "ExponentialUpdateLossScaleManager"
    assert rows[f"{manager}.init_loss_scale"].keys["train.loss_scale.init"] == 1024
    assert rows[f"{manager}.incr_every_n_steps"].keys == {"train.loss_scale.window": 50}
    assert rows[f"{manager}.decr_ratio"].keys == {}


def test_non_literal_value_is_unmapped(tmp_path: Path) -> None:
    text = "N = 1\nN = 2\nNPURunConfig(save_checkpoints_steps=N, model_dir=read(1), a=1j)"
    rows = {row.setting: row for row in adopt_script(tmp_path, text).rows}
    for name in ("save_checkpoints_steps", "model_dir", "a"):
        assert rows[name].note == "isn't a literal, and the script isn't run"


@pytest.mark.parametrize(
    "text",
    [
        "def",
        "x = '\0'",
        "x" * 300_000,
        "a = a.b" + ".c" * 50_000,
        "-" * 100_000 + "1",
        pytest.param(
            "\n".join(f"a{k} = f(x=a{k + 1}, y=a{k + 1})" for k in range(60))
            + "\na60 = 1\nNPURunConfig(session_config=a0)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"a = {[1] * 10_000}\nNPURunConfig(b=f({', '.join(f'k{k}=a' for k in range(10_000))}))",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["def", "nul", "long", "attributes", "signs", "doubled calls", "repeated list"],
)
def test_hostile_script_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, RecipeError)):
        adopt_script(tmp_path, text)


def test_self_referencing_constant_is_refused(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    with pytest.raises(ValueError, match="isn't Python"):
        adopt_script(tmp_path, "x = f(k=x)\nNPURunConfig(session_config=x)")
    assert sys.getrecursionlimit() == limit
