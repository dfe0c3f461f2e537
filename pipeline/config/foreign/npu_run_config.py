"""Settings of scripts for TensorFlow's Estimator with Ascend's NPURunConfig.

A script is parsed, and never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.deadline import MAX_MINUTES
from pipeline.config.foreign.adopt import Adoption, KeyRow, Settings, adopt
from pipeline.config.foreign.script import Expression, Script
from pipeline.config.profile_spec import MODE, OPTIONS, parse_profiling_variables
from pipeline.core.errors import RecipeError
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.safe_yaml import parse_yaml

MAX_BYTES = 2**18
NAME = "NPURunConfig"
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
BATCHES = ("batch", "map_and_batch", "padded_batch")
SESSIONS = ("Session", "InteractiveSession")


def adopt_npu_run_config(file: Path) -> Adoption:
    """Map the arguments of the script's NPURunConfig, its steps and its batch size.

    Raises OSError, ValueError if the file isn't Python, and RecipeError with all statements that
    the adapter would refuse.
    """
    try:
        script = Script(ast.parse(read_text(file, MAX_BYTES)))
        problems = [*_find_refused_arguments(script), *_find_broken_rules(script)]
        settings = _read_settings(script) if not problems else {}
    except (SyntaxError, RecursionError, MemoryError) as error:
        # A MemoryError of the parser has no text.
        reason = str(error) or "it is nested too deeply"
        raise ValueError(f"isn't Python: {reason}") from error
    if problems:
        raise RecipeError([f"{file}: {problem}" for problem in problems])
    return adopt(NAME, f"{NAME} of {file.name}", settings, [_map_run])


def _find_refused_arguments(script: Script) -> Iterator[str]:
    """Yield a problem for each argument that can't be read, or that NPURunConfig refuses."""
    calls = script.find_calls([NAME])
    if len(calls) != 1:
        yield f"has {len(calls)} calls of {NAME}; must have one"
    for call in calls:
        if call.args or any(item.arg is None for item in call.keywords):
            yield f"line {call.lineno}: {NAME} must have arguments as NAME=VALUE alone"
        for item in call.keywords:
            if item.arg in REFUSED and script.read_value(item.value) is not None:
                yield f"line {item.value.lineno}: {item.arg}: {NAME} refuses it"


def _read_settings(script: Script) -> dict[str, Any]:
    """Return the arguments of NPURunConfig, with the steps and the batch size of the script."""
    settings = script.read_value(script.find_calls([NAME])[0])
    for call in script.find_calls(["train", "TrainSpec"]):
        for item in call.keywords:
            if item.arg in ("max_steps", "steps"):
                settings["max_steps"] = script.read_value(item.value)
    for call in script.find_calls(BATCHES):
        sizes = [item.value for item in call.keywords if item.arg == "batch_size"]
        sizes += call.args[:1]
        size = script.read_value(sizes[0]) if sizes else None
        if isinstance(size, int):
            settings["batch_size"] = size
    return settings


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
    """Yield the rows of the device, of values that aren't literals, profiles and dumps."""
    yield KeyRow("device", {"device": "ascend910"}, f"{NAME} is for an Ascend 910")
    for name, value in settings.items():
        if isinstance(value, Expression):
            yield KeyRow(name, note=NOT_LITERAL)
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
    profiling = settings.get("profiling_config")
    if isinstance(profiling, dict) and profiling.get("enable_profiling"):
        options = str(profiling.get("profiling_options") or "{}")
        overrides = parse_profiling_variables({MODE: "true", OPTIONS: options})
        keys = {}
        for override in overrides:
            key, _, value = override.partition("=")
            keys[key] = parse_yaml(value)
        keys.pop("profile.output", None)
        yield KeyRow("profiling_config", keys, "the command line sets profile.output")
    dump = settings.get("dump_config")
    if isinstance(dump, dict) and dump.get("enable_dump") and dump.get("dump_step"):
        keys = {"dump.steps": dump["dump_step"], "dump.what": dump.get("dump_mode", "output")}
        yield KeyRow("dump_config", keys, "the command line sets dump.path")
