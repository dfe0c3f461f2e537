"""Error messages for recipes: dotted key, value, what is allowed, and the nearest known name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.core.errors import MAX_PROBLEMS, printable
from pipeline.core.files.tree_diff import Where, dotted_key, value_at
from pipeline.core.files.value_text import show
from pipeline.core.plugins.loading import missing_flag_hint
from pipeline.core.registry import MAX_FLOAT, MAX_INT, all_parts, kind_of

MAX_NAME_LENGTH = 255
"""Longest name, in characters, that is compared with known ones as a possible misspelling."""

SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "init_lr", "base_lr"), "lr"),
    **dict.fromkeys(("num_epochs", "max_epochs", "n_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("num_steps", "max_steps", "total_steps", "max_iters"), "steps"),
    **dict.fromkeys(("bs", "train_batch_size", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "accumulate_steps"),
    **dict.fromkeys(("random_seed", "random_state"), "seed"),
    **dict.fromkeys(("cuda", "nvidia"), "gpu"),
}
"""Words of other frameworks, by which people look for keys and parts, and the words here."""

_NOTHING: Mapping[Where, str] = {}
_LARGEST = {MAX_INT: f"{MAX_INT:,}", MAX_FLOAT: f"{MAX_FLOAT:.4g}, the largest of float32"}
_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
    "path_type": "a path",
}


def describe(
    error: ValidationError,
    tree: Mapping[str, Any],
    unfit: Mapping[Where, str] = _NOTHING,
) -> list[str]:
    """Return every problem that pydantic found in `tree`, one line each.

    `unfit` has one line for a section whose keys belong to another part, in place of one per key.
    The first MAX_PROBLEMS show the value and guess what was meant; the others, of which a file can
    have thousands, have only their place and kind.
    """
    problems = [
        (details, where, tags)
        for details in error.errors(include_url=False)
        for where, tags in [locate(details["loc"], tree)]
        if details["type"] not in ("missing", "extra_forbidden") or where[:-1] not in unfit
    ]
    unknown = {where for details, where, _ in problems if details["type"] == "extra_forbidden"}
    lines = list(unfit.values())
    for details, where, tags in problems[:MAX_PROBLEMS]:
        lines.append(_describe_problem(details, where, _KeyGuesser(tree, tags, unknown)))
    for details, where, _ in problems[MAX_PROBLEMS:]:
        kind = details["type"]
        key_problem = {"extra_forbidden": "there is no such key", "missing": "missing"}.get(kind)
        lines.append(f"{shown(dotted_key(where))}: {key_problem or _rule(details)}")
    return lines


def no_such(noun: str, name: str, choices: Iterable[str]) -> str:
    """`there is no such model; did you mean lenet5? There is layers, lenet5, mlp, resnet`."""
    names = sorted(choices)
    guess = nearest(name, names)
    question = f"; did you mean {shown(guess)}?" if guess else "."
    return f"there is no such {noun}{question} There is {', '.join(map(shown, names)) or 'none'}"


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the known name that is a synonym of `name`, or spelled most like it; None without
    either."""
    choices = set(choices)
    if len(name) > MAX_NAME_LENGTH:
        return None
    if SYNONYMS.get(name) in choices:
        return SYNONYMS[name]
    return next(iter(get_close_matches(name, sorted(choices), n=1, cutoff=0.6)), None)


def shown(name: str) -> str:
    """Return a name from a file, made printable: shortened, control characters escaped."""
    text = printable(name)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _describe_problem(details: ErrorDetails, where: Where, guesser: _KeyGuesser) -> str:
    key = shown(dotted_key(where))
    value = details["input"]
    context = details.get("ctx", {})
    match details["type"]:
        case "missing":
            return f"{key}: missing; it needs a value"
        case "value_error":
            return f"{key}: {context['error']}" if key else str(context["error"])
        case "union_tag_invalid":
            names = [name.strip("' ") for name in context["expected_tags"].split(",")]
            tag = str(context["tag"])
            problem = f"{key}.name = {show(tag)}: {no_such(kind_of(names) or 'part', tag, names)}"
            return f"{problem}; {missing_flag_hint()}"
        case "extra_forbidden":
            guess = guesser.guess(where)
            question = f"; did you mean {shown(dotted_key(guess))}?" if guess else ""
            rule = f"there is no such key{question}"
        case "union_tag_not_found":
            rule = "must be a section with a `name`"
        case "part_without_name":
            names = context["fitting"]
            items = [f"{inner}: {show(item)}" for inner, item in value.items()]
            section = ", ".join([f"name: {names[0]}", *items]) if names else ""
            example = f", as in {key}={{{section}}}" if names else ""
            rule = f"must be a section with a `name`{example}"
        case "literal_error":
            rule = f"must be {context['expected']}"
        case "string_pattern_mismatch":
            rule = f"must match {context['pattern']}"
        case "string_too_short":
            rule = "must not be empty"
        case "string_too_long":
            rule = f"must have at most {context['max_length']} characters"
        case "too_short":
            rule = f"must have at least {context['min_length']}"
        case "less_than_equal" if context["le"] in _LARGEST:
            rule = f"must be at most {_LARGEST[context['le']]}"
        case "greater_than_equal" if -context["ge"] in _LARGEST:
            rule = f"must be at least -{_LARGEST[-context['ge']]}"
        case "float_type" if _is_too_large(value):
            rule = f"must be at most {_LARGEST[MAX_FLOAT]}"
        case "expected" if _is_too_large(value):
            rule = f"{details['msg']}, and at most {_LARGEST[MAX_INT]}"
        case _:
            rule = _rule(details)
    return f"{key} = {show(value)}: {rule}"


def _is_too_large(value: Any) -> bool:
    """Return whether a number, or one in a list, is too large."""
    if isinstance(value, list | tuple):
        return any(map(_is_too_large, value))
    return isinstance(value, int | float) and abs(value) > MAX_INT


def _rule(details: ErrorDetails) -> str:
    if details["type"] in _EXPECTED:
        return f"must be {_EXPECTED[details['type']]}"
    return details["msg"].replace("Input should", "must").replace("must be a valid", "must be a")


def locate(loc: Where, tree: Mapping[str, Any]) -> tuple[Where, tuple[str, ...]]:
    """Split a location of pydantic into the path in the recipe and the part names on it.

    Pydantic puts a part's name between the key that holds the part and the keys of the part.
    """
    where: list[int | str] = []
    tags: list[str] = []
    node: Any = tree
    is_part = False
    for step in loc:
        if is_part and step == (node if isinstance(node, str) else node.get("name")):
            tags.append(str(step))
            is_part = False
            continue
        where.append(step)
        node = value_at(node, (step,))
        is_part = isinstance(node, str) or (isinstance(node, Mapping) and "name" in node)
    return tuple(where), tuple(tags)


class _KeyGuesser(NamedTuple):
    """Keys to propose in place of an unknown one."""

    tree: Mapping[str, Any]
    tags: Sequence[str]
    """Names of the parts on the path to the unknown key."""
    unknown: AbstractSet[Where]
    """Other unknown keys, which are not proposed."""

    def guess(self, where: Where) -> Where | None:
        """Return the valid key that an unknown one may stand for, in its section or another one."""
        name = str(where[-1])
        siblings = self._siblings(where)
        elsewhere = self._place(SYNONYMS.get(name, name))
        if name in SYNONYMS and SYNONYMS[name] not in siblings and elsewhere:
            return elsewhere
        sibling = nearest(name, siblings)
        return (*where[:-1], sibling) if sibling else elsewhere

    def _place(self, name: str) -> Where | None:
        """Return the place of the key of this name that is nearest to the root of the recipe."""
        sections: list[tuple[Where, Any]] = [((), self.tree)]
        for where, section in sections:
            if not isinstance(section, Mapping) or where in self.unknown:
                continue
            if name in section and (*where, name) not in self.unknown:
                return (*where, name)
            sections += [((*where, key), inner) for key, inner in section.items()]
        return None

    def _siblings(self, where: Where) -> set[str]:
        """Return the valid keys of the section of an unknown key."""
        section = value_at(self.tree, where[:-1])
        keys = section if isinstance(section, Mapping) else {}
        siblings = {str(key) for key in keys if (*where[:-1], key) not in self.unknown}
        if self.tags:
            siblings |= {field for cls in all_parts(self.tags[-1]) for field in cls.model_fields}
        return siblings
