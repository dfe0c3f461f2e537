"""Run directories: made so that no two runs share one, found again to resume.

outputs/<date>/<time>_<recipe>/  recipe.yaml  metrics.jsonl  evals.jsonl  summary.json  run.log
                                 checkpoints/  tensorboard/
On an emulated device also price.json, trace.json, timeline.html, and AutoTune's result.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError, RunError
from pipeline.problems import dotted, show
from pipeline.whole_file import write_whole

OUTPUTS = Path("outputs")
RECIPE, SUMMARY, LOG = "recipe.yaml", "summary.json", "run.log"

LENGTH = (("train", "epochs"), ("train", "passes"), ("train", "steps"))
FREE_TO_CHANGE = (
    *LENGTH,
    ("train", "sink"),
    ("train", "sink_size"),
    ("train", "mechanism"),
    ("train", "dispatch_seconds"),
    ("train", "feed"),
    ("train", "resume"),
    ("dataset", "root"),
    ("dataset", "mirrors"),
    ("stages",),
    ("autotune",),
    ("autotune_search",),
    ("debug",),
    ("checkpoint",),
    ("eval",),
    ("monitor",),
    ("cache",),
)
"""What a resumed run may have other than the run it continues: nothing that decides its losses,
but its length (the learning-rate schedule stretches with it), and that only when it is named."""


def create(name: str, outputs: Path = OUTPUTS) -> Path:
    """A new directory for a run of the named recipe. Raises RunError where none can be made."""
    day, clock = time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S")
    return make_unique(outputs / day / f"{clock}_{name}")


def make_unique(wanted: Path) -> Path:
    """Make a directory that did not exist before, `wanted` or `wanted_1`, `wanted_2`, ...

    `mkdir` either makes the directory or fails, so two processes never get the same one.
    """
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            path = wanted if attempt == 0 else wanted.with_name(f"{wanted.name}_{attempt}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise RunError(f"{wanted}: can't make the run directory: {error.strerror}") from error
    raise RunError(f"{wanted}: a thousand directories of that name are there already")


def make(run_dir: Path) -> Path:
    """Make a directory that the user has named, unless it is there.

    Raises RunError where it can't be made, or holds a run that would be overwritten.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{run_dir}: can't make the run directory: {error.strerror}") from error
    if (run_dir / RECIPE).exists():
        raise RunError(
            f"{run_dir}: holds a run already; name another directory, or go on with that run: "
            f"train.resume={run_dir}"
        )
    return run_dir


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Keep the resolved recipe beside what it made."""
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    write_whole(run_dir / RECIPE, text)


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Keep every other process out of a run directory. Raises RunError where one is in there."""
    with (run_dir / LOG).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{run_dir}: another process is writing this run") from None
        yield


def _is_free(run_dir: Path) -> bool:
    try:
        with owned(run_dir):
            return True
    except RunError:
        return False


def to_resume(recipe: Recipe, outputs: Path = OUTPUTS) -> Path | None:
    """The run directory that `train.resume` means; None when `auto` finds no unfinished run.

    Raises RecipeError when the named directory is no run, or one of a recipe that would have
    had other losses.
    """
    wanted = recipe.train.resume
    if wanted is None:
        return None
    if wanted != "auto":
        before = _read_recipe(Path(wanted), wanted)
        differences = list(_differences(recipe, before, FREE_TO_CHANGE))
        if differences:
            raise RecipeError(differences)
        return Path(wanted)
    runs = sorted(outputs.glob(f"*/*/{RECIPE}"), key=lambda file: file.stat().st_mtime_ns)
    return next((f.parent for f in reversed(runs) if _is_unfinished(f.parent, recipe)), None)


def _is_unfinished(run_dir: Path, recipe: Recipe) -> bool:
    """Is this a run of the same recipe and length that isn't done, and that nobody is at?

    One whose recipe can't be read is none.
    """
    try:
        before = _read_recipe(run_dir, "auto")
    except RecipeError:
        return False
    free = [where for where in FREE_TO_CHANGE if where not in LENGTH]
    same = not list(_differences(recipe, before, free))
    return same and read_status(run_dir) != "done" and _is_free(run_dir)


def read_status(run_dir: Path) -> str | None:
    """The status in a run's summary; None for a run that was killed before it wrote one."""
    try:
        return json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError):
        return None


def _read_recipe(run_dir: Path, wanted: str) -> Mapping[str, Any]:
    try:
        tree = yaml.safe_load((run_dir / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = f"no run directory, {RECIPE} can't be read from it"
        raise RecipeError([f"train.resume = {wanted}: {reason}"]) from error
    return tree if isinstance(tree, dict) else {}


def _differences(
    recipe: Recipe, before: Mapping[str, Any], free: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    """The keys that are not as they were, but for those that are free to change."""
    now = dict(_leaves(recipe.model_dump(mode="json")))
    then = dict(_leaves(before))
    for where in dict.fromkeys((*now, *then)):
        may_change = any(where[: len(prefix)] == prefix for prefix in free)
        if not may_change and now.get(where) != then.get(where):
            yield (
                f"{dotted(where)} = {show(now.get(where))}: was {show(then.get(where))} in the run "
                f"to resume; keep it, or start a new run with checkpoint.restore"
            )


def _leaves(tree: Any, where: tuple[int | str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*where, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*where, index))
    else:
        yield where, tree
