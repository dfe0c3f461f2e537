"""Error messages for recipes: dotted key, value, what is allowed, and the nearest known name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.core.errors import MAX_PROBLEMS, printable
from pipeline.core.files.value_text import show
from pipeline.core.plugins.loading import missing_flag_hint
from pipeline.core.registry import MAX_FLOAT, MAX_INT, all_parts, kind_of

Location = tuple[int | str, ...]

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

_NOTHING: Mapping[Location, str] = {}
_LARGEST = {MAX_INT: f"{MAX_INT:,}", MAX_FLOAT: f"{MAX_FLOAT:.4g}, the largest of float32"}
_OF_KEYS = ("missing", "extra_forbidden")
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
    unfit: Mapping[Location, str] = _NOTHING,
) -> list[str]:
    """Every problem that pydantic found in `tree`, one line each.

    `unfit` has one line for a section whose keys belong to another part, in place of one per key.
    The first MAX_PROBLEMS show the value and guess what was meant; the rest, of which a file can
    have thousands, give only their place and kind.
    """
    every = error.errors(include_url=False)
    found = [(details, *locate(details["loc"], tree)) for details in every]
    found = [one for one in found if not (one[0]["type"] in _OF_KEYS and one[1][:-1] in unfit)]
    unknown = {where for details, where, _ in found if details["type"] == "extra_forbidden"}
    lines = list(unfit.values())
    for details, where, tags in found[:MAX_PROBLEMS]:
        lines.append(_describe_one(details, where, _KnownKeys(tree, tags, unknown)))
    for details, where, _ in found[MAX_PROBLEMS:]:
        lines.append(f"{shown(dotted(where))}: {_kind_of_problem(details)}")
    return lines


def no_such(noun: str, name: str, known: Iterable[str]) -> str:
    """`there is no such model; did you mean lenet5? There is layers, lenet5, mlp, resnet`."""
    names = sorted(known)
    guess = nearest(name, names)
    question = f"; did you mean {shown(guess)}?" if guess else "."
    return f"there is no such {noun}{question} There is {', '.join(map(shown, names)) or 'none'}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is a synonym of `name`, or spelled most like it; None without either."""
    known = set(known)
    if len(name) > MAX_NAME_LENGTH:
        return None
    if SYNONYMS.get(name) in known:
        return SYNONYMS[name]
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=0.6)), None)


def shown(name: str) -> str:
    """A name from a file, made printable: shortened, control characters escaped."""
    text = printable(name)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _describe_one(details: ErrorDetails, where: Location, known: _KnownKeys) -> str:
    key, value, context = shown(dotted(where)), details["input"], details.get("ctx", {})
    match details["type"]:
        case "extra_forbidden":
            guess = known.nearest(where)
            question = f"; did you mean {shown(dotted(guess))}?" if guess else ""
            return f"{key} = {show(value)}: there is no such key{question}"
        case "missing":
            return f"{key}: missing; it needs a value"
        case "union_tag_invalid":
            names = [name.strip("' ") for name in context["expected_tags"].split(",")]
            tag, kind = str(context["tag"]), kind_of(names) or "part"
            problem = f"{key}.name = {show(tag)}: {no_such(kind, tag, names)}"
            return f"{problem}; {missing_flag_hint()}"
        case "union_tag_not_found":
            return f"{key} = {show(value)}: must be a section with a `name`"
        case "part_without_name":
            names = context["fitting"]
            items = [f"{own}: {show(inner)}" for own, inner in value.items()]
            section = ", ".join([f"name: {names[0]}", *items]) if names else ""
            example = f", as in {key}={{{section}}}" if names else ""
            return f"{key} = {show(value)}: must be a section with a `name`{example}"
        case "literal_error":
            return f"{key} = {show(value)}: must be {context['expected']}"
        case "value_error":
            return f"{key}: {context['error']}" if key else str(context["error"])
        case "string_too_short":
            return f"{key} = {show(value)}: must not be empty"
        case "string_too_long":
            return f"{key} = {show(value)}: must have at most {context['max_length']} characters"
        case "too_short":
            return f"{key} = {show(value)}: must have at least {context['min_length']}"
        case "less_than_equal" if context["le"] in _LARGEST:
            return f"{key} = {show(value)}: must be at most {_LARGEST[context['le']]}"
        case "greater_than_equal" if -context["ge"] in _LARGEST:
            return f"{key} = {show(value)}: must be at least -{_LARGEST[-context['ge']]}"
        case "float_type" if _beyond(value):
            return f"{key} = {show(value)}: must be at most {_LARGEST[MAX_FLOAT]}"
        case "expected" if _beyond(value):
            return f"{key} = {show(value)}: {details['msg']}, and at most {_LARGEST[MAX_INT]}"
        case kind:
            expected = _EXPECTED.get(kind)
            message = f"must be {expected}" if expected else _sentence(details["msg"])
            return f"{key} = {show(value)}: {message}"


def _beyond(value: Any) -> bool:
    """Return whether a number, or one in a list, is too large."""
    if isinstance(value, list | tuple):
        return any(map(_beyond, value))
    return isinstance(value, int | float) and abs(value) > MAX_INT


def _kind_of_problem(details: ErrorDetails) -> str:
    kind = details["type"]
    of_keys = {"extra_forbidden": "there is no such key", "missing": "missing"}.get(kind)
    expected = f"must be {_EXPECTED[kind]}" if kind in _EXPECTED else None
    return of_keys or expected or _sentence(details["msg"])


def _sentence(message: str) -> str:
    return message.replace("Input should", "must").replace("must be a valid", "must be a")


def dotted(where: Sequence[int | str]) -> str:
    """("dataset", "ops", 0, "size") as `dataset.ops.0.size`, as Hydra writes it."""
    return ".".join(map(str, where))


def locate(loc: Location, tree: Mapping[str, Any]) -> tuple[Location, tuple[str, ...]]:
    """Split a pydantic location into the path in the recipe and the part names on it.

    Pydantic puts a part's name between the key that holds the part and the part's own keys.
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
        inside = isinstance(node, Mapping) and step in node
        indexed = isinstance(node, list) and isinstance(step, int) and step < len(node)
        node = node[step] if inside or indexed else None
        is_part = isinstance(node, str) or (isinstance(node, Mapping) and "name" in node)
    return tuple(where), tuple(tags)


class _KnownKeys(NamedTuple):
    """Source of the keys to propose in place of an unknown one."""

    tree: Mapping[str, Any]
    tags: Sequence[str]
    """Names of the parts on the path to the unknown key."""
    unknown: AbstractSet[Location]
    """Other unknown keys, which are not proposed."""

    def nearest(self, where: Location) -> Location | None:
        """The valid key that an unknown one may stand for, in its section or in another one."""
        name = str(where[-1])
        elsewhere = self._place(SYNONYMS.get(name, name))
        if name in SYNONYMS and SYNONYMS[name] not in self.keys(where) and elsewhere:
            return elsewhere
        sibling = nearest(name, self.keys(where))
        return (*where[:-1], sibling) if sibling else elsewhere

    def _place(self, name: str) -> Location | None:
        """The place of the key of this name that is nearest to the root of the recipe."""
        sections: list[tuple[Location, Any]] = [((), self.tree)]
        for where, section in sections:
            if not isinstance(section, Mapping) or where in self.unknown:
                continue
            if name in section and (*where, name) not in self.unknown:
                return (*where, name)
            sections += [((*where, key), inner) for key, inner in section.items()]
        return None

    def keys(self, where: Location) -> set[str]:
        """The valid keys of the section in which the unknown key `where` stands."""
        node: Any = self.tree
        for step in where[:-1]:
            known_step = step in node if isinstance(node, Mapping) else isinstance(node, list)
            node = node[step] if known_step else None
        own = node if isinstance(node, Mapping) else {}
        known = {str(key) for key in own if (*where[:-1], key) not in self.unknown}
        if self.tags:
            known |= {field for cls in all_parts(self.tags[-1]) for field in cls.model_fields}
        return known
