"""`python -m pipeline better +recipe=NAME ... -- KEY=VALUE ...`: is side B better than side A?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.cli.train import RESUME_KEYS, TrainArguments, run_sweep
from pipeline.config.compose import compose_and_check
from pipeline.config.hydra_options import (
    DEFAULT_COMPONENTS,
    DEFAULT_RECIPE,
    find_stored_recipe,
    resolve_recipe,
    store_option,
)
from pipeline.config.overrides import (
    get_key,
    hide_secret_values,
    quote_value,
    require_hydra_keys,
    sets_key,
    value_of,
)
from pipeline.core.errors import UsageError, printable
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.study.runs.ranking import directions
from pipeline.study.sweep.verdict import (
    PairedVerdict,
    SideTexts,
    describe_contrast,
    read_pairs,
    read_verdict,
    require_comparable,
    write_verdict_page,
)

SIDE_B = "-side_b"
"""Suffix of the name under which Hydra stores side B's recipe. Side B needs a copy, since choosing
a component removes that component's section from the stored recipe."""


def main(
    overrides: Sequence[str],
    metric: str | None,
    pairs: int,
    minutes: float | None,
    other: Sequence[str] = (),
    out: Path | None = None,
) -> CommandResult:
    """Run pairs until one side is better, print the verdict, and write it on the page `out`.

    Both sides have `overrides`; side B also has `other`. At most `pairs` pairs are run, and no
    further pair that would probably end after `minutes`. `metric` None: the runs' main metric.

    Raises UsageError if `other` is empty or has keys of the sweep, or for an unknown metric.
    Raises RecipeError if a recipe is invalid or the two aren't comparable, and RunError if the
    metric is missing or the page can't be written.
    """
    _require_side_b(overrides, other)
    _require_metric(metric)
    require_hydra_keys(overrides)
    components = {"recipe", *DEFAULT_COMPONENTS}
    if components.isdisjoint(get_key(item) for item in overrides):
        overrides = [f"+recipe={DEFAULT_RECIPE}", *overrides]
    recipe_a = [item for item in overrides if not _is_about_sweep(item)]
    chosen_groups = {get_key(item) for item in other if not sets_key(item)}
    recipe_b = [item for item in recipe_a if get_key(item) not in chosen_groups]
    recipe_b += other
    checked_b = compose_and_check(recipe_b)
    # Interpolations are escaped: side B resolves them, not the sweep.
    side_b = [quote_value(item.replace("${", r"\${")) for item in _register_side_b(recipe_b)]
    checked_a = compose_and_check(recipe_a)
    require_comparable(checked_a, checked_b, metric)
    contrast = describe_contrast(checked_a, checked_b)
    print(printable(contrast))
    settings = [
        "hydra/sweeper=pairs",
        f"hydra.sweeper.other=[{','.join(side_b)}]",
        f"hydra.sweeper.metric={metric or 'null'}",
        f"hydra.sweeper.pairs={pairs}",
        f"hydra.sweeper.minutes={minutes or 'null'}",
    ]
    options = {"--metric": metric, "--pairs": pairs, "--minutes": minutes, "--out": out}
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    sweep_dir, status = run_sweep(
        TrainArguments(
            words=["better", *overrides, *words, "--", *other],
            flags=["-m"],
            typed=[*overrides, *settings],
            overrides=[*resolve_recipe(overrides), *settings],
        )
    )
    verdict = read_verdict(sweep_dir, metric)
    facts = verdict.to_dict() if isinstance(verdict, PairedVerdict) else {"verdict": verdict}
    if out is not None:
        pairs_by_seed, _ = read_pairs(sweep_dir)
        sides = SideTexts(contrast, describe_sides(overrides, other))
        write_verdict_page(out, verdict, pairs_by_seed, sides)
        print(printable(f"the pairs: {out}"))
    return CommandResult({**facts, "sweep": str(sweep_dir)}, status)


def _require_metric(metric: str | None) -> None:
    """Raise UsageError for an unknown metric."""
    if metric is not None and metric not in directions():
        raise UsageError(
            [f"--metric {metric}"], explain_unknown_name("metric", metric, directions())
        )


def describe_sides(overrides: Sequence[str], other: Sequence[str]) -> str:
    """Return a sentence about the arguments of both sides, without secret values."""
    side_a = " ".join(hide_secret_values(overrides))
    return f"Side A: {side_a}. Side B also has {' '.join(hide_secret_values(other))}."


def _require_side_b(overrides: Sequence[str], other: Sequence[str]) -> None:
    """Raise UsageError if side B has no keys, or one that is about the sweep."""
    if not other:
        rule = "must be followed by -- and the keys of side B, as in -- train.optimizer.lr=0.02"
        raise UsageError(["better", *overrides], rule)
    misplaced = [item for item in other if _is_about_sweep(item)]
    if misplaced:
        raise UsageError(misplaced, "is about both sides; must be typed before --")


def _is_about_sweep(override: str) -> bool:
    """Return whether an override is about the sweep, not about the recipe of a side."""
    key = get_key(override)
    return key in RESUME_KEYS or re.match(r"hydra([./]|$)", key) is not None


def _register_side_b(overrides: Sequence[str]) -> list[str]:
    """Store a copy of side B's recipe in Hydra, and return the overrides that choose this copy."""
    resolved = resolve_recipe(overrides)
    name = value_of(resolved, "recipe")
    if name is None:
        return resolved
    name_b = f"{name}{SIDE_B}"
    node = find_stored_recipe(name)
    store_option(group="recipe", name=name_b, package="_global_", node=node)
    return [f"+recipe={name_b}" if get_key(item) == "recipe" else item for item in resolved]
