"""`python -m pipeline test [RECIPES]`: do runs of recipes meet their section `expect`?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import printable
from pipeline.stages.record.run_directory import find_run_dir
from pipeline.study.expect.expectations import find_tested_recipes
from pipeline.study.expect.judge import judge_recipe
from pipeline.study.expect.outcomes import (
    ExpectationOutcome,
    count_verdicts,
    describe_facts,
    find_exit_status,
    write_junit,
)
from pipeline.study.expect.sides import CodeSide, open_commit


def main(
    recipes: Sequence[str],
    against: str | None = None,
    junit: Path | None = None,
    pairs: int = 16,
    *,
    record: bool = False,
    other_draws: bool = False,
) -> CommandResult:
    """Train recipes, and print a line for each of their expectations.

    The exit status is 0 if all are met, 1 if one isn't or nothing could be compared, 2 if a recipe
    is refused. Raises RecipeError with every problem of the recipes, and UsageError if `against` is
    neither a run nor a commit.
    """
    tested_recipes = find_tested_recipes(recipes)
    outcomes: list[ExpectationOutcome] = []
    with _open_side(against) as other:
        for tested in tested_recipes:
            judged = judge_recipe(
                tested, other, most_pairs=pairs, records=record, draws_differ=other_draws
            )
            for outcome in judged:
                print(printable(str(outcome)), flush=True)
            outcomes += judged
    print(count_verdicts(outcomes))
    if junit is not None:
        write_junit(junit, outcomes)
    return CommandResult(describe_facts(outcomes), find_exit_status(outcomes))


@contextmanager
def _open_side(against: str | None) -> Iterator[CodeSide | Path | None]:
    """Open the run or the commit to compare with, during the block."""
    is_path = against is not None and Path(against).exists()
    run_dir = find_run_dir(Path(against)) if against is not None and is_path else None
    if against is None or run_dir is not None:
        yield run_dir
        return
    with open_commit(against) as side:
        yield side
