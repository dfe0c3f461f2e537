"""The settings of a script for Ascend's adapter for TensorFlow, and the code that they leave."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.config.foreign.script import Expression, Script

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
