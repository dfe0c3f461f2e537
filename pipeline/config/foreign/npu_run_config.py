"""Settings of scripts for Ascend's adapter for TensorFlow, such as its NPURunConfig.

A script is parsed, and never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.deadline import MAX_MINUTES
from pipeline.config.foreign.adopt import Adoption, KeyRow, Settings, adopt, read_table
from pipeline.config.foreign.script import Expression, Script, convert_script_errors, parse_script
from pipeline.config.inspection_specs import MODE, OPTIONS, parse_profiling_variables
from pipeline.core.errors import RecipeError
from pipeline.core.files.safe_yaml import parse_yaml

NAME = "NPURunConfig"
BATCHES = ("batch", "map_and_batch", "padded_batch")
SESSIONS = ("Session", "InteractiveSession")
RULED = ("remapping", "disable_model_pruning")
"""Fields of rewrite_options that the adapter has rules for."""
ESTIMATORS = ("NPUEstimator", "Estimator")
PARAMETERS = {
    **dict.fromkeys(ESTIMATORS, ("model_fn", "model_dir", "config", "params", "warm_start_from")),
    "train": ("input_fn", "hooks", "steps", "max_steps", "saving_listeners"),
    "TrainSpec": ("input_fn", "max_steps", "hooks"),
    "evaluate": ("input_fn", "steps", "hooks", "checkpoint_path", "name"),
    "EvalSpec": (
        "input_fn", "steps", "name", "hooks", "exporters", "start_delay_secs", "throttle_secs",
    ),
    "FixedLossScaleManager": ("loss_scale",),
    "ExponentialUpdateLossScaleManager": (
        "init_loss_scale", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio",
        "decr_ratio",
    ),
}  # fmt: skip
"""Parameters by call, in the order of their positions."""
SHARED = {"steps": "max_steps"}
"""Names of settings, if a parameter of `train` has another name."""
LOSS_SCALES = ("FixedLossScaleManager", "ExponentialUpdateLossScaleManager")
PREFIXED = ("evaluate", "EvalSpec", *LOSS_SCALES)
"""Calls whose parameters have the call's name before theirs."""
REFUSED = (
    "train_distribute",
    "device_fn",
    "protocol",
    "eval_distribute",
    "experimental_distribute",
)
"""Parameters of RunConfig that NPURunConfig refuses."""
KEEP_HOURS = "keep_checkpoint_every_n_hours"
OFF_HOURS = 10_000
"""TensorFlow's default of `KEEP_HOURS`, which turns it off."""
NOT_LITERAL = "isn't a literal, and the script isn't run"
CODE = {
    "model_fn": "is code: choose model= and optimizer=",
    "input_fn": "is code: choose dataset=",
}
NESTED = tuple(f"{name}." for name in read_table(NAME)["nested"])


class RepeatedValue(Expression):
    """A value of a setting that another line of the script sets first."""


def read_settings(script: Script) -> dict[str, Any]:
    """Return all settings of a script by name.

    These are the arguments of NPURunConfig, of the Estimator and of its calls, the values of
    `custom_op.parameter_map`, rewrite options, the batch size and the loss scale. Nested arguments
    have dotted names. All other statements are settings named `line N`. A value is plain data or an
    `Expression`.
    """
    settings: dict[str, Any] = {}
    read: list[ast.AST] = []

    def add(name: str, value: Any, line: int) -> None:
        if isinstance(value, dict) and value:
            for inner, inner_value in value.items():
                add(f"{name}.{inner}", inner_value, line)
        elif name in settings and settings[name] != value:
            name = f"{name} of line {line}"
            earlier = f"{settings[name]}; " if name in settings else ""
            settings[name] = RepeatedValue(f"{earlier}{value!r}")
        else:
            settings[name] = value

    for call in script.find_calls([NAME]):
        read.append(call)
        for item in call.keywords:
            if item.arg is not None:
                add(item.arg, script.read_value(item.value), item.value.lineno)
    for name, node, line in find_parameters(script):
        read.append(node)
        add(name, script.read_value(node), line)
    for assignment in script.assignments:
        for target in assignment.targets:
            if isinstance(target, ast.Attribute) and target.attr in RULED:
                read.append(assignment)
                value = script.read_value(assignment.value)
                add(ast.unparse(target), value, assignment.lineno)
    for call_name, parameters in PARAMETERS.items():
        for call in script.find_calls([call_name]):
            # Code around a loss scale, as around a batch, is listed too: it is most of a model.
            if call_name not in LOSS_SCALES:
                read.append(call)
            prefix = f"{call_name}." if call_name in PREFIXED else ""
            for parameter, node in _list_arguments(call, call_name, parameters):
                if parameter == "config" and _is_run_config(script, node):
                    continue
                shared = parameter if prefix else SHARED.get(parameter, parameter)
                add(f"{prefix}{shared}", script.read_value(node), node.lineno)
    for call in sorted(script.find_calls(BATCHES), key=lambda call: call.lineno):
        sizes = [item.value for item in call.keywords if item.arg == "batch_size"]
        sizes += call.args[:1]
        size = script.read_value(sizes[0]) if sizes else None
        if isinstance(size, int):
            add("batch_size", size, call.lineno)
    for line, text in script.list_other_code(read):
        before = f"{settings[f'line {line}']}; " if f"line {line}" in settings else ""
        settings[f"line {line}"] = Expression(f"{before}{text}")
    return settings


def _list_arguments(
    call: ast.Call, call_name: str, parameters: Sequence[str]
) -> list[tuple[str, ast.expr]]:
    """Return names and values of a call's arguments. Those beyond `parameters` are named by their
    position."""
    arguments: list[tuple[str, ast.expr]] = [*zip(parameters, call.args, strict=False)]
    arguments += [(item.arg or "**", item.value) for item in call.keywords]
    further = enumerate(call.args[len(parameters) :], len(parameters) + 1)
    return arguments + [(f"{call_name} argument {number}", node) for number, node in further]


def find_parameters(script: Script) -> Iterator[tuple[str, ast.expr, int]]:
    """Yield name, value and line of each `custom_op.parameter_map["NAME"].s = VALUE`. A name that
    isn't a literal is its text in brackets."""
    for node in script.assignments:
        for target in node.targets:
            entry = target.value if isinstance(target, ast.Attribute) else None
            if isinstance(entry, ast.Subscript) and _is_parameter_map(entry.value):
                name = script.read_value(entry.slice)
                yield (name if isinstance(name, str) else f"[{name}]"), node.value, node.lineno


def _is_parameter_map(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "parameter_map"


def _is_run_config(script: Script, node: ast.expr) -> bool:
    """Return whether an argument is the script's NPURunConfig."""
    if isinstance(node, ast.Name):
        node = script.constants.get(node.id, node)
    return isinstance(node, ast.Call) and node in script.find_calls([NAME])


def adopt_npu_run_config(file: Path) -> Adoption:
    """Map the arguments of the script's NPURunConfig, its steps and its batch size.

    Raises OSError, ValueError if the file isn't Python, and RecipeError with all statements that
    the adapter would refuse.
    """
    script = parse_script(file)
    with convert_script_errors():
        problems = [*_find_refused_arguments(script), *_find_broken_rules(script)]
        settings = read_settings(script) if not problems else {}
    if problems:
        raise RecipeError([f"{file}: {problem}" for problem in problems])
    return adopt(NAME, f"{NAME} of {file.name}", settings, RULES)


def sets_npu_run_config(script: Script) -> bool:
    """Return whether a script has settings of NPURunConfig."""
    return bool(script.find_calls([NAME])) or any(find_parameters(script))


def _find_refused_arguments(script: Script) -> Iterator[str]:
    """Yield a problem for each argument that can't be read, or that NPURunConfig refuses."""
    calls = script.find_calls([NAME])
    if len(calls) > 1 or not (calls or any(find_parameters(script))):
        yield f"has {len(calls)} calls of {NAME}; must have one, or a parameter_map"
    for call in calls:
        if call.args or any(item.arg is None for item in call.keywords):
            yield f"line {call.lineno}: {NAME} must have arguments as NAME=VALUE alone"
        for item in call.keywords:
            if item.arg in REFUSED and script.read_value(item.value) is not None:
                yield f"line {item.value.lineno}: {item.arg}: {NAME} refuses it"


def _find_broken_rules(script: Script) -> Iterator[str]:
    """Yield a problem for each of the adapter's rules that the script breaks."""
    for call in script.find_calls(["device"]):
        if ast.unparse(call.func).startswith(("tf.", "tensorflow.")):
            yield f"line {call.lineno}: tf.device must be deleted"
    for call in script.find_calls(BATCHES):
        drops = [item.value for item in call.keywords if item.arg == "drop_remainder"]
        drops += call.args[1:2]
        if not drops or script.read_value(drops[0]) in (False, None):
            yield f"line {call.lineno}: batches need drop_remainder=True, a static shape"
    for call in script.find_calls(["placeholder"]):
        if any(isinstance(node, ast.Constant) and node.value is None for node in ast.walk(call)):
            yield f"line {call.lineno}: a placeholder needs sizes, a static shape, not None"
    remapping = [ast.unparse(node) for node in script.find_values("remapping")]
    is_off = remapping and all(text.endswith("OFF") for text in remapping)
    if not is_off and (remapping or script.find_calls(("ConfigProto", *SESSIONS))):
        yield "rewrite_options.remapping must be set to RewriterConfig.OFF"
    for node in script.find_values("disable_model_pruning"):
        if script.read_value(node) is not False:
            yield f"line {node.lineno}: disable_model_pruning must stay off"
    targets = {node.value: node.targets for node in script.assignments}
    # Texts of the expressions that `close()` or `with` closes.
    closed = {
        ast.unparse(call.func).removesuffix(".close") for call in script.find_calls(["close"])
    }
    closed |= set(map(ast.unparse, script.contexts))
    entered = {node for context in script.contexts for node in ast.walk(context)}
    for call in script.find_calls(SESSIONS):
        if call not in entered and closed.isdisjoint(map(ast.unparse, targets.get(call, []))):
            yield f"line {call.lineno}: a session must be in `with`, or end by close()"


def _map_run(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of the device, of values that aren't literals, and of other code."""
    yield KeyRow("device", {"device": "ascend910"}, f"{NAME} is for an Ascend 910")
    for name, value in settings.items():
        if isinstance(value, RepeatedValue):
            yield KeyRow(name, note="another line sets it first")
        elif name.startswith("line "):
            yield KeyRow(name, note="is code, and the script isn't run")
        elif name.rpartition(".")[2] in RULED:
            yield KeyRow(name, note="is checked; the device configures XLA")
        elif isinstance(value, Expression):
            yield KeyRow(name, note=CODE.get(name.rpartition(".")[2], NOT_LITERAL))
        elif name.startswith(NESTED):
            yield KeyRow(name, note=read_table(NAME)["nested"][name.partition(".")[0]])
    loop = settings.get("iterations_per_loop")
    if isinstance(loop, int) and not isinstance(settings.get("max_steps"), int):
        yield KeyRow("length of training", {"train.steps": loop}, "max_steps is missing: one loop")
    hours = settings.get(KEEP_HOURS)
    if isinstance(hours, int | float) and hours > 0:
        minutes = round(min(hours, OFF_HOURS) * 60)
        if minutes <= MAX_MINUTES:
            yield KeyRow(KEEP_HOURS, {"checkpoint.keep_minutes": max(minutes, 1)})
        else:
            limit = f"checkpoint.keep_minutes must be at most {MAX_MINUTES:,}"
            yield KeyRow(KEEP_HOURS, note="is off" if hours == OFF_HOURS else limit)


def _map_tuning(settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of AutoTune's modes, in the order that `device.auto_tune` has."""
    modes = settings.get("auto_tune_mode")
    if isinstance(modes, str) and modes.strip():
        yield KeyRow("auto_tune_mode", {"device.auto_tune": modes})


def _map_start(settings: Settings) -> Iterator[KeyRow]:
    """Yield the row of the checkpoint that training starts from, and of a loss scale."""
    for name in ("warm_start_from", "warm_start_from.ckpt_to_initialize_from"):
        path = settings.get(name)
        if isinstance(path, str) and path:
            note = "names of TensorFlow may need checkpoint.renames"
            yield KeyRow(name, {"checkpoint.restore": path}, note)
    fixed = "FixedLossScaleManager.loss_scale"
    if isinstance(settings.get(fixed), int | float):
        yield KeyRow(fixed, {"train.loss_scale": settings[fixed]})
        return
    dynamic = "ExponentialUpdateLossScaleManager"
    first = f"{dynamic}.init_loss_scale"
    if isinstance(settings.get(first), int | float):
        scale = {"train.loss_scale.name": "dynamic", "train.loss_scale.init": settings[first]}
        yield KeyRow(first, scale)
        window = f"{dynamic}.incr_every_n_steps"
        if isinstance(settings.get(window), int):
            yield KeyRow(window, {"train.loss_scale.window": settings[window]})


def _map_observers(settings: Settings) -> Iterator[KeyRow]:
    """Yield the rows of profiles and dumps, in the words of NPURunConfig or of parameter_map."""
    for switch, options in (
        ("profiling_config.enable_profiling", "profiling_config.profiling_options"),
        ("profiling_mode", "profiling_options"),
    ):
        if settings.get(switch) is not True:
            continue
        yield KeyRow(switch, {"profile.mode": "on"})
        text = settings.get(options)
        if isinstance(text, str):
            keys = {}
            for override in parse_profiling_variables({MODE: "true", OPTIONS: text}):
                key, _, value = override.partition("=")
                keys[key] = parse_yaml(value)
            for key in ("profile.output", "profile.mode"):
                keys.pop(key, None)
            yield KeyRow(options, keys, "the command line sets profile.output")
    for prefix in ("dump_config.", ""):
        steps = settings.get(f"{prefix}dump_step")
        if settings.get(f"{prefix}enable_dump") is not True:
            continue
        if not isinstance(steps, str | int) or not steps:
            yield KeyRow(f"{prefix}enable_dump", note="would dump every step; set dump.steps")
            continue
        what = settings.get(f"{prefix}dump_mode")
        keys = {"dump.steps": str(steps)}
        if isinstance(what, str):
            yield KeyRow(f"{prefix}dump_mode", {"dump.what": what})
        else:
            keys["dump.what"] = "output"
        yield KeyRow(f"{prefix}dump_step", keys)
        yield KeyRow(f"{prefix}enable_dump", note="dump.steps sets it")
        if f"{prefix}dump_path" in settings:
            yield KeyRow(f"{prefix}dump_path", note="the command line sets dump.path")


RULES = (_map_run, _map_tuning, _map_start, _map_observers)
