"""Texts of names for messages, the known name nearest to a wrong one, and names split by spaces."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from pipeline.core.errors import printable, shorten

MAX_NAME_LENGTH = 255
"""Longest name, in characters, for which a similar valid name is searched."""

SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "init_lr", "base_lr"), "lr"),
    **dict.fromkeys(("num_epochs", "max_epochs", "n_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("num_steps", "max_steps", "total_steps", "max_iters"), "steps"),
    **dict.fromkeys(("bs", "train_batch_size", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "accumulate_steps"),
    **dict.fromkeys(("random_seed", "random_state"), "seed"),
    **dict.fromkeys(("cuda", "nvidia"), "gpu"),
}
"""Names of keys and components by their names in other frameworks."""


def explain_unknown_name(noun: str, name: str, choices: Iterable[str]) -> str:
    """Return, for example, `there is no such model; did you mean mlp? Choose from lenet5, mlp`, or
    in place of the question a sentence about a task that isn't trained here."""
    names = sorted(filter(None, choices))
    sentence = None
    if noun in ("dataset", "model", "recipe"):
        # Imported here, since a run without a wrong name doesn't need it.
        from pipeline.core.files.other_tasks import explain_other_task

        sentence = explain_other_task(name[:MAX_NAME_LENGTH])
    guess = find_nearest(name, names) if sentence is None else None
    question = f"; did you mean {show_name(guess)}?" if guess else "."
    question = question if sentence is None else f"; {sentence}."
    listed = f" Choose from {', '.join(map(show_name, names))}" if names else " There are none"
    return f"there is no such {noun}{question}{listed}"


def find_nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is a synonym of `name` or is spelled like it; None without one."""
    choices = set(choices)
    if len(name) > MAX_NAME_LENGTH:
        return None
    if SYNONYMS.get(name) in choices:
        return SYNONYMS[name]
    matches = get_close_matches(name, sorted(choices), n=1, cutoff=0.6)
    return matches[0] if matches else None


def show_name(name: str) -> str:
    """Return a name from a file in at most 120 characters, with control characters escaped."""
    return shorten(printable(name), 120)


def join_at_equals(words: Sequence[str]) -> tuple[str, int] | None:
    """Return the override that spaces around its = have split into the first of some words, and
    the number of these words. The first may have a space before its =, if it was typed in quotes.
    Returns None if the first word isn't such a part."""
    key, *values = words
    if match := re.fullmatch(r"([^\s=]+)\s+=\s*(.+)", key, re.DOTALL):
        return shlex.quote(f"{match[1]}={match[2]}"), 1
    if key.endswith("=") and "=" not in key[:-1]:
        has_value = bool(values) and "=" not in values[0]
        return (shlex.quote(f"{key}{values[0]}"), 2) if has_value else None
    if not values or "=" in key or not values[0].startswith("="):
        return None
    count = 3 if values[0] == "=" and len(values) > 1 else 2
    return shlex.quote("".join(words[:count])), count
