"""The law of keys: a changed key is observable, or refused, or listed with a reason.

    python -m tests.recipe_keys [KEY ...]

Trains small recipes, each again with one key changed, and prints the keys whose change nothing
shows: neither losses, evaluations and checkpoints nor messages and files of the run. The exit
status is 1 if there is one. Without keys, all keys of the recipes are changed, which takes a while.
"""

from __future__ import annotations

import ast
import io
import json
import re
import struct
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from pipeline import run
from pipeline.config.compose import check_tree
from pipeline.config.recipe import Recipe
from pipeline.core.errors import PipelineError, RecipeError
from pipeline.core.registry import Spec, load_all

ROOT = Path(__file__).parents[1]
KeyPath = tuple[str | int, ...]

HOST_ONLY: Mapping[str, str] = {
    "autotune_search": "only with autotune=tune: how lowerings are searched",
    "dataset.mirrors": "only for a download: where the files come from",
    "cache.root": "where copies and programs are stored; numbers are the same",
    "checkpoint.every_seconds": "how much work a crash loses: the run is shorter",
    "checkpoint.optimizer": "only with checkpoint.prefix: what MindSpore's files have",
    "checkpoint.partial": "only with checkpoint.restore",
    "checkpoint.renames": "only with checkpoint.restore",
    "checkpoint.rules": "only with checkpoint.restore",
    "model.init.conv": "only for networks with convolutions, which these don't have",
    "dataset.eval.batch_size": "how many samples an evaluation reads at once: metrics are of all",
    "debug": "whether an unexpected error shows its traceback",
    "train.dispatch_seconds": "how soon a signal is handled in a long sink",
    "train.remat_bytes": "only with remat: auto: where memory is saved",
    "train.resume_changed": "only for a run that resumes",
    "train.iterations_per_loop": "another word for sink_size: refused unless it has its value",
    "checkpoint.every_epochs": "the steps at its epochs are saved already, every three steps",
    "monitor.early_stop.patience": "only with monitor.early_stop.metric",
    "dump.layers": "only with dump.steps: what is written",
    "dump.what": "only with dump.steps: what is written",
    "dump.content": "only with dump.steps: what is written",
    "dump.max_mib": "only with dump.steps: what is written",
    "profile.start": "only with profile.mode",
    "profile.training_trace": "only with profile.mode",
    "profile.task_trace": "only with profile.mode",
    "profile.aicpu": "only with profile.mode",
    "profile.fp_point": "only with profile.mode",
    "profile.bp_point": "only with profile.mode",
    "monitor.early_stop.min_delta": "only with monitor.early_stop.metric",
    "launch.start_seconds": "only with several processes: how long they wait",
    "launch.stuck_seconds": "only with several processes: how long they wait",
    "launch.end_seconds": "only with several processes: how long they wait",
    "profile.aic_metrics": "only with profile.mode: then counters that nothing has are refused",
    "launch.name": "without a launcher around, auto finds one process, as none does",
    "monitor.lineage": "facts of the user, which recipe.yaml and reports show",
    "train.planned_for": "only for a run that resumes: finds it by its deadline",
    "monitor.log_level": "which messages are shown, and a tiny run has none",
}
"""Keys or sections whose change a run of a moment doesn't show, and why."""
_DUMPS, _STOPS, _SAVES, _LOADS = (
    ("dump.steps=3",),
    ("monitor.early_stop.metric=loss", "eval.every_steps=2", "monitor.early_stop.patience=1"),
    ("checkpoint.every_steps=null",),
    ("checkpoint.restore=WEIGHTS",),
)
PARTNERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "checkpoint.every_epochs": (_SAVES, "1"),
    "checkpoint.every_seconds": (_SAVES, "0.0001"),
    "checkpoint.optimizer": (("checkpoint.prefix=net",), "true"),
    "checkpoint.partial": ((*_LOADS, "model.hidden=[12]"), "true"),
    "checkpoint.renames": (_LOADS, "[{match: another, to: dense_0}]"),
    "checkpoint.rules": (_LOADS, "torch"),
    "dump.content": (_DUMPS, "statistics"),
    "dump.layers": (_DUMPS, "[dense_0]"),
    "dump.what": (_DUMPS, "input"),
    "model.init.conv": (("model=lenet5",), "zeros"),
    "monitor.early_stop.min_delta": (_STOPS, "1000"),
    "monitor.early_stop.patience": ((*_STOPS, "monitor.early_stop.min_delta=1000"), "3"),
    "monitor.log_level": (("schedule=constant", "train.schedule.warmup_steps=500"), "error"),
}
"""Keys whose change shows together with other keys: those keys, and a value; WEIGHTS is a run."""
UNTRIED = "untried: no other value is known for its type"
COPIES = {"Chip": "Hardware"}
"""Classes whose fields are copied, by name, to those of another class."""
TIMES = re.compile(r"\d[\d,.:e+-]*")
STAMPS = re.compile(r"\d{13,}")
"""Times in names of files."""
SIZED = (".ckpt", ".npy")
"""Endings of files that are of the same size in each run of a recipe."""


def list_specs() -> set[type[Spec]]:
    """Return the classes of all sections and components."""
    load_all()
    found: set[type[Spec]] = set()
    stack: list[type[Spec]] = [Spec]
    while stack:
        for cls in stack.pop().__subclasses__():
            if cls not in found and cls.__module__.startswith("pipeline."):
                found.add(cls)
                stack.append(cls)
    return found


@cache
def _read_sources() -> tuple[Mapping[str, set[str]], set[str]]:
    """Return the attributes that each class reads of `self`, and the names that all else reads."""
    of_self: dict[str, set[str]] = defaultdict(set)
    elsewhere: set[str] = set()
    for file in (ROOT / "pipeline").rglob("*.py"):
        tree = ast.parse(file.read_text())
        _collect_reads(tree, None, of_self, elsewhere)
    return of_self, elsewhere


def _collect_reads(
    node: ast.AST, owner: str | None, of_self: dict[str, set[str]], elsewhere: set[str]
) -> None:
    for child in ast.iter_child_nodes(node):
        name = child.name if isinstance(child, ast.ClassDef) else owner
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
            if isinstance(child.value, ast.Name) and child.value.id in ("self", "cls") and owner:
                of_self[owner].add(child.attr)
            else:
                elsewhere.add(child.attr)
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            elsewhere.update([child.value, *child.value.split(".")])
        _collect_reads(child, name, of_self, elsewhere)


def is_read(cls: type[Spec], name: str) -> bool:
    """Return whether code reads a field: of `self` in its class or a related one, or elsewhere."""
    of_self, elsewhere = _read_sources()
    relatives = [item.__name__ for item in (*cls.__mro__, *_list_subclasses(cls))]
    copies = [COPIES[item] for item in relatives if item in COPIES]
    return name in elsewhere or any(name in of_self[item] for item in (*relatives, *copies))


def _list_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _list_subclasses(subclass)


def list_unread_fields() -> list[str]:
    """Return the fields of sections and components that no code reads."""
    return sorted(
        f"{cls.__name__}.{name}"
        for cls in list_specs()
        for name in cls.model_fields
        if not is_read(cls, name)
    )


@dataclass(frozen=True)
class Key:
    """A key of a recipe, and the type of its value."""

    path: KeyPath
    annotation: Any
    value: Any

    def __str__(self) -> str:
        return ".".join(map(str, self.path))


def list_keys(spec: Spec, path: KeyPath = ()) -> list[Key]:
    """Return the keys of a recipe, and those of its sections and components."""
    keys: list[Key] = []
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        here = (*path, name)
        if isinstance(value, Spec):
            keys += list_keys(value, here)
        elif isinstance(value, tuple) and value and all(isinstance(i, Spec) for i in value):
            for number, item in enumerate(value):
                keys += list_keys(item, (*here, number))
        elif get_origin(field.annotation) is not Literal or len(get_args(field.annotation)) > 1:
            annotation: Any = field.annotation
            for item in field.metadata:
                annotation = Annotated[annotation, item]
            keys.append(Key(here, annotation, value))
    return keys


def list_values(annotation: Any) -> list[Any]:
    """Return JSON values that a type may have."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return list_values(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [value for part in get_args(annotation) for value in list_values(part)]
    if origin is Literal:
        return list(get_args(annotation))
    plain: Mapping[Any, list[Any]] = {
        bool: [True, False],
        int: [2, 1, 0, 3, 5, 7],
        float: [0.01, 0.5, 1.5, 2.0, 0.25, 0.0],
        str: ["another"],
        NoneType: [None],
    }
    if annotation in plain:
        return plain[annotation]
    if origin is tuple:
        return [[], *([value] for value in list_values(get_args(annotation)[0]))]
    if origin is dict:
        return [{"another": 1}]
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        required = [f for f in annotation.model_fields.values() if f.default is PydanticUndefined]
        return [] if required else [{}]
    return []


def change_key(recipe: Recipe, key: Key) -> Iterator[Recipe]:
    """Yield valid recipes in which the key, and if need be nothing else, has another value."""
    before = recipe.whole_tree()
    for value in list_values(key.annotation):
        tree = json.loads(json.dumps(before))
        node = tree
        for part in key.path[:-1]:
            node = node[part]
        name = key.path[-1]
        # Words of other frameworks, such as precision_mode, are only in a tree that sets them.
        current = node.get(name) if isinstance(node, dict) else node[name]
        if json.dumps(current) == json.dumps(value):
            continue
        node[key.path[-1]] = value
        try:
            yield check_tree(tree, length_replaced=True)
        except RecipeError:
            continue


def observe(recipe: Recipe) -> dict[str, Any]:
    """Run a recipe, and return what can be seen of it, without times."""
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        try:
            with redirect_stdout(output), redirect_stderr(output):
                run(recipe, run_dir)
        except PipelineError as error:
            return {"error": TIMES.sub("#", str(error))}
        sizes = {str(file.relative_to(run_dir)): _read_size(file) for file in run_dir.rglob("*")}
        named = [f"{STAMPS.sub('#', name)} {size}".strip() for name, size in sizes.items()]
        seen: dict[str, Any] = {"files": sorted(re.sub(r"tfevents\..*", "", n) for n in named)}
        for name in ("metrics.jsonl", "evals.jsonl"):
            file = run_dir / name
            seen[name] = file.read_text() if file.exists() else None
        summary = json.loads((run_dir / "summary.json").read_text())
        for part in ("time", "run_dir", "versions", "feed", "modelled", "recipe"):
            summary.pop(part, None)
        seen["summary"] = summary
        lines = output.getvalue().replace(str(run_dir), "RUN_DIR").splitlines()
        # A part that takes long says so.
        steady = (line for line in lines if not line.startswith("busy"))
        seen["lines"] = sorted({TIMES.sub("#", line) for line in steady})
        seen["events"] = sorted(
            size for file in run_dir.glob("events*") for size in _list_sizes(file.read_bytes())
        )
    return seen


def _read_size(file: Path) -> str:
    return str(file.stat().st_size) if file.name.endswith(SIZED) else ""


def _list_sizes(events: bytes) -> Iterator[int]:
    """Yield the sizes of the records in a file of TensorBoard, whose bytes have times.

    Records with texts are left out: they show the recipe itself.
    """
    start = 0
    while start < len(events):
        (size,) = struct.unpack_from("<Q", events, start)
        record = events[start : start + size]
        if b"text" not in record and b"hparams" not in record:
            yield size
        start += 8 + 4 + size + 4


def explain_key(recipe: Recipe, key: Key, before: Mapping[str, Any]) -> str | None:
    """Return how a changed key shows, such as `refused` or `metrics.jsonl`; None if it doesn't.

    `before` is what is seen of the recipe itself.
    """
    if not list_values(key.annotation):
        return UNTRIED
    is_accepted = False
    for changed in list(change_key(recipe, key))[:4]:
        is_accepted = True
        after = observe(changed)
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                return name
    return None if is_accepted else "refused"


def describe_host_only(key: Key) -> str | None:
    """Return why a key needs no observable change; None if it needs one."""
    reasons = (reason for name, reason in HOST_ONLY.items() if f"{key}.".startswith(f"{name}."))
    return next(reasons, None)


def main() -> int:
    """Print the keys whose change nothing shows; return the exit status."""
    from tests.test_recipe_keys import BASES, compose_base

    silent = 0
    for base in BASES:
        recipe = compose_base(base, None)
        before = observe(recipe)
        for key in list_keys(recipe):
            if sys.argv[1:] and str(key) not in sys.argv[1:]:
                continue
            how = describe_host_only(key) or explain_key(recipe, key, before)
            print(base, key, how or "NOTHING", sep=" | ", flush=True)
            silent += how is None
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
