"""Hydra's own keys on a command line: which of them a run can't have."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.overrides import value_of, without_secret_values
from pipeline.core.errors import RecipeError

SECTIONS = ("hydra.sweeper", "hydra.launcher")
OUTPUT_SUBDIR = "hydra.output_subdir"


def require_hydra_keys(args: Sequence[str]) -> None:
    """Raise RecipeError if one of Hydra's keys is misused.

    An option's name stands in place of the section that it chooses, or Hydra would write a password
    down with its own config.
    """
    values = {key: value_of(args, key) for key in SECTIONS}
    problems = [
        f"{key} = {value}: is a section; an option of it is chosen by "
        f"{key.replace('.', '/')}={value}"
        for key, value in values.items()
        if value is not None and not value.startswith("{")
    ]
    if problems:
        raise RecipeError(problems)
    folder = value_of(args, OUTPUT_SUBDIR)
    if folder not in (None, "null") and without_secret_values(args) != list(args):
        problem = "Hydra would write a password of this command into files there; leave it out"
        raise RecipeError([f"{OUTPUT_SUBDIR} = {folder}: {problem}"])
