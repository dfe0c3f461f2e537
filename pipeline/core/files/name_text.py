"""Texts of names for messages: the known name nearest to a wrong one, names split by spaces, and
sentences about tasks that aren't trained here, such as detection."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from pipeline.core.errors import printable, shorten

OTHER_TASKS: Mapping[str, str] = {
    r"coco|voc|yolo|ssd|.*rcnn|retinanet|.*detr|fcos|centernet|(?:.*(?:object|face)_)?detect\w*": (
        "boxes of objects aren't predicted here; an image has a class, numbers or a mask"
    ),
    r"whisper|librispeech|asr|.*speech_recogn\w*": (
        "sound isn't transcribed here; it has a class or numbers"
    ),
    r"wmt|t5|bart|seq2seq|.*translat\w*|.*summariz\w*": (
        "texts aren't translated here; they are continued, classified or matched"
    ),
    r"stable_diffusion|ddpm|.*diffusion": "images aren't made by diffusion here",
    r"gym|atari|cartpole|ppo|dqn|.*reinforce\w*": "there is no reinforcement learning here",
    r"cora|ogb\w*|gcn|gat|gnn|graphsage": "graphs of nodes and edges aren't read here",
    r"kinetics|ucf101|hmdb\w*|.*video\w*": "videos aren't read here; images and series are",
    r"modelnet|shapenet|pointnet|kitti|.*point_cloud": "clouds of points aren't read here",
}
"""Sentences about tasks that aren't trained here, by patterns of the first part of the names of
datasets and networks."""


def explain_other_task(name: str) -> str | None:
    """Return a sentence about the task of a dataset or a network that isn't trained here."""
    lowered = name.lower().replace("-", "_")
    for pattern, sentence in OTHER_TASKS.items():
        if re.match(rf"(?:{pattern})(?:v\d)?(?![a-z])", lowered):
            return sentence
    return None


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
