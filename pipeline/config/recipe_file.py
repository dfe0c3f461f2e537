"""Recipe files, files of one component, and their references from one key to another.

Files may come from a stranger, so they are checked.

A file may name shipped or installed files as bases, and refer to keys of the recipe. Some keys are
only for the command line: those that decide where a run writes, and Hydra's section, which can name
code to run.

References must be bounded in number and depth. A recipe file may have no other interpolations of
OmegaConf.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import MISSING

from pipeline.config.files import SECTIONS
from pipeline.core.errors import RecipeError
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.safe_yaml import MAX_BYTES, MAX_DEPTH, parse_yaml
from pipeline.core.files.tree_diff import TreePath, find_value, format_key, iterate_leaves
from pipeline.core.files.value_text import show

Tree = dict[str, Any]

USER_KEYS: Mapping[tuple[str, ...], Any] = {
    ("cache", "root"): None,
    ("device", "tune_bank"): None,
    ("train", "resume"): None,
    ("train", "resume_changed"): "refuse",
    ("dataset", "follow_links"): False,
    ("profile", "output"): None,
    ("dump", "path"): None,
    ("checkpoint", "directory"): None,
    ("checkpoint", "mirror"): None,
}
"""Keys that only the user may set, with harmless values. These keys decide where a run writes, or
allow data to be outside of a folder or to change."""
RESUME_ANY = "auto"
"""Value of `train.resume` that a file may set, since it doesn't name a directory."""
YAML = (".yaml", ".yml")

_OPTION = re.compile(r"\w[\w.+-]{0,99}")
"""Name of a recipe, or of an option of a group."""
_COMPONENT_FILE = re.compile(r"(?:\./)?(?:\w[\w.+-]{0,99}/){0,9}\w[\w.+-]{0,99}\.ya?ml")
"""Path of a component's file, in the recipe's folder or below it."""
_PACKAGE = re.compile(
    r"(?:[ \t]*(?:#(?![ \t]*@package\b)[^\n]*)?\n)*[ \t]*#[ \t]*@package[ \t:]+(\S+)"
)
"""Hydra's directive `# @package PATH` among the first comments of a file."""
_CHOICE = re.compile(r"(?:override )?/(\w+)")
"""Key of an item of `defaults` that chooses the option of a group."""
MAX_SIZE = 100_000
"""A recipe has at most this many values after its references are resolved."""
MAX_CHAIN = 24
"""Longest chain of references. OmegaConf resolves chains recursively, and Python's stack allows
about 50."""
CHARACTERS_A_VALUE = 64
"""A text has the size of one value, and of one more for each of these many characters."""

_OPENING = "${"
_REFERENCE = re.compile(r"\$\{(\w[\w-]*(?:\.\w[\w-]*|\[\w+\])*)\}")


def read_recipe_file(file: Path) -> Tree:
    """Read a recipe file. Raises RecipeError if it can't be read, or has forbidden content."""
    tree = _read(file, "recipe", "_global_")
    return _require_data(file, tree, list(_check_recipe_defaults(tree)))


def read_component_file(file: Path, group: str) -> Tree:
    """Read the file of a component of a recipe. Raises RecipeError as for a recipe."""
    tree = _read(file, group, ".".join(SECTIONS[group]))
    problems = [
        f"defaults: {show(item)}: must be _self_ or the name of a {group}"
        for item in _list_defaults(tree)
        if not isinstance(item, str) or not _OPTION.fullmatch(item)
    ]
    return _require_data(file, tree, [*problems, *find_user_keys(tree, SECTIONS[group])])


def find_component_file(recipe: Path, path: str) -> Path:
    """Return the file of a component, whose path is relative to the folder of the recipe file.

    Raises RecipeError if the path, or a link, leads out of that folder. Otherwise the contents of
    any file could be shown in errors about a stranger's recipe, or stored in a run directory.
    """
    folder = recipe.parent.resolve()
    file = (folder / path).resolve()
    if not file.is_relative_to(folder):
        raise RecipeError([f"{recipe}: defaults: {path}: leads out of the folder of the recipe"])
    return file


def reset_user_keys(tree: Tree) -> Tree:
    """Return the recipe with harmless values of the keys that only the user may set."""
    copy = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for (section, key), harmless in USER_KEYS.items():
        if isinstance(copy.get(section), dict) and key in copy[section]:
            copy[section][key] = harmless
    return copy


def find_user_keys(tree: Tree, within: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a problem for every key of a file that only the user may set.

    `within` is the section of a recipe that the file contains; () for a whole recipe.
    """
    for path, harmless in USER_KEYS.items():
        if path[: len(within)] != within:
            continue
        value: Any = tree
        for key in path[len(within) :]:
            if isinstance(value, dict):
                value = value.get(key)
            elif "${" not in str(value):
                value = None
            # Else the section is a reference, which could lead to the key: a problem.
        is_resume_any = path == ("train", "resume") and value == RESUME_ANY
        if value is not None and value != harmless and not is_resume_any:
            yield (
                f"{format_key(path)} = {show(value)}: must not be in a file, which may be a "
                f"stranger's; set it on the command line: {format_key(path)}={show(value)}"
            )


def _read(file: Path, key: str, package: str) -> Tree:
    """Read a YAML file of keys and values; errors name the `key` whose value is the file. Raises
    RecipeError if it can't be read, or if its directive names another `package`."""
    try:
        text = read_text(file, MAX_BYTES)
        tree = parse_yaml(text)
    except FileNotFoundError:
        raise RecipeError([f"{key} = {file}: there is no such file"]) from None
    except OSError as error:
        raise RecipeError([f"{file}: can't be read: {error.strerror}"]) from error
    except ValueError as error:
        raise RecipeError([f"{file}: not readable as YAML: {error}"]) from error
    if tree is not None and not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else "a single value"
        raise RecipeError([f"{file}: must hold keys and values, not {kind}"])
    header = _PACKAGE.match(text)
    if header is not None and header[1] != package:
        raise RecipeError(
            [f"{file}: # @package {header[1]}: its keys would go elsewhere; must be {package}"]
        )
    return tree or {}


def _require_data(file: Path, tree: Tree, problems: list[str]) -> Tree:
    """Return the tree of a file. Raises RecipeError if there are `problems`.

    They are joined by the problems of Hydra's section, missing values and refused references.
    """
    if "hydra" in tree:
        problems.append("hydra: must not be in a file; set it on the command line")
    problems += [
        f"{format_key(path)} = ???: the value is missing; give one, or leave the key out"
        for path, text in iterate_texts(tree)
        if text == MISSING
    ]
    problems += find_refused_references({key: tree[key] for key in tree if key != "defaults"})
    if problems:
        raise RecipeError([f"{file}: {problem}" for problem in problems])
    return tree


def _list_defaults(tree: Tree) -> list[Any]:
    defaults = tree.get("defaults", [])
    return defaults if isinstance(defaults, list) else [defaults]


def _check_recipe_defaults(tree: Tree) -> Iterator[str]:
    """Yield a problem for every item that isn't a recipe's name, a component's choice or _self_."""
    for item in _list_defaults(tree):
        if isinstance(item, str) and _OPTION.fullmatch(item):
            continue
        if isinstance(item, dict) and len(item) == 1:
            ((key, option),) = item.items()
            choice = _CHOICE.fullmatch(key)
            text = option if isinstance(option, str) else ""
            pattern = _COMPONENT_FILE if text.endswith(YAML) else _OPTION
            is_option = option is None or pattern.fullmatch(text)
            if choice is not None and choice[1] in SECTIONS and is_option:
                continue
        yield (
            f"defaults: {show(item)}: must be _self_, the name of a recipe, or "
            f"`override /GROUP: NAME` with GROUP one of {', '.join(SECTIONS)}, and NAME an option "
            "or a file beside the recipe or below it, as in ./mine.yaml"
        )


def find_refused_references(tree: Any) -> Iterator[str]:
    """Yield a problem for every interpolation that isn't a reference to another key.

    Resolvers run code: `oc.env` reads the environment, `oc.create` and `oc.decode` build values
    from texts. They are allowed on the command line alone.
    """
    for path, text in iterate_texts(tree):
        if text.count(_OPENING) != len(_REFERENCE.findall(text)):
            yield (
                f"{format_key(path)} = {show(text)}: a recipe file may refer to other keys, as in "
                "${train.batch_size}, and to nothing else; resolvers such as oc.env are for the "
                "command line"
            )


def require_bounded(tree: dict[str, Any]) -> None:
    """Raise ValueError if references are circular or make a recipe too large.

    `tree` is the composed recipe, unresolved. References to missing keys are ignored.
    """
    if any(_OPENING in text for _, text in iterate_texts(tree)):
        _Measurements(tree).measure((), (), 0)


class _Measures(NamedTuple):
    """The measures of a subtree whose references are resolved."""

    size: int
    """Number of values."""
    levels: int
    """Depth of nesting."""
    chain: int
    """Length of the longest chain of references in the subtree."""


def _require_bounds(path: TreePath, measures: _Measures) -> None:
    """Raise ValueError if the subtree at `path` exceeds a bound."""
    if measures.size > MAX_SIZE:
        reason = f"references make more than {MAX_SIZE:,} values of it"
    elif measures.levels > MAX_DEPTH:
        reason = f"references nest it more than {MAX_DEPTH} levels deep"
    elif measures.chain > MAX_CHAIN:
        reason = (
            f"a chain of references must have at most {MAX_CHAIN}; refer to the key that has the "
            "value"
        )
    else:
        return
    raise ValueError(f"{format_key(path)}: {reason}")


class _Measurements:
    """The measures of a tree's subtrees. Each subtree is measured once."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree
        self._measured: dict[TreePath, _Measures] = {}

    def measure(self, path: TreePath, references: tuple[TreePath, ...], level: int) -> _Measures:
        """Return the measures of the subtree at `path`.

        `references` has the paths of the references that lead there, `level` is the depth. Raises
        ValueError as soon as a bound is exceeded, before the whole subtree is walked.
        """
        total = self._measured.get(path, _Measures(1, 0, 0))
        levels = level + total.levels
        chain = len(references) + total.chain
        _require_bounds(path, _Measures(total.size, levels, chain))
        if path not in self._measured:
            total = self._add_up(path, references, level)
            _require_bounds(path, total)
            self._measured[path] = total
        return total

    def _add_up(self, path: TreePath, references: tuple[TreePath, ...], level: int) -> _Measures:
        """Measure the node at `path` with its children, or with the targets of its references."""
        node, num_references = self._find_node(path, ())
        if isinstance(node, dict | list):
            keys = node if isinstance(node, dict) else range(len(node))
            alone = _Measures(1, 1, num_references)
            children = [self.measure((*path, key), references, level + 1) for key in keys]
        elif isinstance(node, str):
            targets = _parse_targets(node)
            if targets and path in references:
                raise ValueError(_describe_circle(path, node))
            size = 1 + len(node) // CHARACTERS_A_VALUE
            alone = _Measures(size, 0, num_references + bool(targets))
            children = [self.measure(target, (*references, path), level) for target in targets]
        else:
            return _Measures(1, 0, num_references)
        return _Measures(
            alone.size + sum(child.size for child in children),
            alone.levels + max((child.levels for child in children), default=0),
            alone.chain + max((child.chain for child in children), default=0),
        )

    def _find_node(self, path: TreePath, references: tuple[TreePath, ...]) -> tuple[Any, int]:
        """Return the node at `path` and the number of references that lead there.

        The node is None if it is missing. `references` has the paths of references before `path`.
        """
        node: Any = self._tree
        for depth, key in enumerate(path):
            if isinstance(node, str) and _REFERENCE.fullmatch(node):
                reference = path[:depth]
                if reference in references:
                    raise ValueError(_describe_circle(reference, node))
                _require_bounds(reference, _Measures(1, 0, len(references)))
                target = (*_parse_targets(node)[0], *path[depth:])
                return self._find_node(target, (*references, reference))
            is_index = isinstance(node, list) and str(key).isdecimal()
            node = find_value(node, (int(key) if is_index else key,))
        return node, len(references)


def _parse_targets(text: str) -> list[TreePath]:
    """Return the paths that the references in a text point to."""
    return [tuple(re.findall(r"\w[\w-]*", path)) for path in _REFERENCE.findall(text)]


def _describe_circle(path: TreePath, text: str) -> str:
    return f"{format_key(path)} = {show(text)}: references must not be circular"


def iterate_texts(tree: Any) -> Iterator[tuple[TreePath, str]]:
    """Yield the texts of a tree with their paths."""
    return ((path, leaf) for path, leaf in iterate_leaves(tree) if isinstance(leaf, str))
