"""Recipes: whole trees, texts of files, overrides; checked, built, trained, and by command."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from pipeline.cli.train import main as launch
from pipeline.config.compose import check_tree, load_recipe
from pipeline.config.defaults import fill_missing
from pipeline.config.files import SECTIONS
from pipeline.config.recipe import Recipe
from pipeline.core.errors import PipelineError, RecipeError
from pipeline.core.files.paths import CONF, RECIPES
from tests.conftest import ROOT, TINY
from tests.fuzz.mutate import VALUES, mutate_bytes, mutate_tree, nudge_tree, walk
from tests.whole_run import run

COMPONENT_GROUPS = tuple(SECTIONS)

SNIPPETS: Sequence[bytes] = (
    *(b"&a ", b"*a", b"<<: *a\n", b"? ", b"- ", b"{", b"}", b"[", b"]", b": ", b"\n", b"\t", b"#"),
    *(b"!!binary ", b"!!python/object/apply:os.system [x]\n", b"!!set ", b"!x ", b"%YAML 9\n"),
    *(b"---\n", b"...\n", b"|\n", b">-\n", b"'", b'"', b"\x00", b"\xff", b"\xef\xbb\xbf"),
    *(b"${seed}", b"${oc.env:HOME}", b"${hydra:runtime.cwd}", b"${", b"\\${x}", b"${..seed}"),
    *(b"defaults:\n  - _self_\n", b"  - override /model@hydra: lenet5\n", b"hydra: {}\n"),
    *(b"cache: {root: /x}\n", b"train: {resume: /x}\n", b"name: ../../x\n", b"1e999", b"0x" * 60),
    *(b"9" * 5000, b"[" * 200, b"a: &a [*a]\n", b"1:2:3", b"~", b"null", b"2020-01-01", b"=\n"),
    *(b"???", b"1:30", b"0x10", b"yes", b"# @package hydra\n"),
)
"""What means something in YAML, to OmegaConf or to Hydra."""


@cache
def recipe_names() -> Sequence[str]:
    """The shipped recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


@cache
def whole_trees() -> Sequence[dict[str, Any]]:
    """Resolved recipes: those that are shipped, and each component in the place of another."""
    goldens = sorted((ROOT / "tests" / "golden").glob("recipe_*.yaml"))
    shipped = [fill_missing(yaml.safe_load(file.read_text())) for file in goldens]
    trees = list(shipped)
    for group, (*sections, last) in SECTIONS.items():
        for file in sorted((CONF / group).glob("*.yaml")):
            tree = copy.deepcopy(shipped[len(trees) % len(shipped)])
            section = tree[sections[0]] if sections else tree
            section[last] = yaml.safe_load(file.read_text())
            trees.append(tree)
    return trees


@cache
def tiny_tree() -> dict[str, Any]:
    """The tiny recipe of the tests, four steps long."""
    return load_recipe("lenet5_digits", [*TINY, "train.steps=4"]).model_dump(mode="json")


def prepare() -> None:
    """Make what all cases start from."""
    whole_trees()
    tiny_tree()
    recipe_texts()


@cache
def recipe_texts() -> Sequence[bytes]:
    """Return the shipped recipe files, and a complete recipe at the end."""
    shipped = [file.read_bytes() for file in sorted(RECIPES.glob("*.yaml"))]
    return [*shipped, yaml.safe_dump(tiny_tree(), sort_keys=False).encode()]


def check_recipe_tree(rng: Random, folder: Path) -> None:
    """A whole recipe with a few changes is checked."""
    tree = mutate_tree(rng, rng.choice(whole_trees()))
    if isinstance(tree, dict):
        check_tree({str(key): value for key, value in tree.items()})


def check_recipe_text(rng: Random, folder: Path) -> None:
    """A recipe file, broken as a text, is composed and checked."""
    content = bytearray(rng.choice(recipe_texts()))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(content) + 1)
        if rng.random() < 0.7:
            # Where keys and values begin, a snippet says more than in the middle of a word.
            at = content.rfind(b" ", 0, at) + 1 or content.rfind(b"\n", 0, at) + 1
            content[at:at] = rng.choice(SNIPPETS)
        else:
            content = bytearray(mutate_bytes(rng, bytes(content)))
    (folder / "mine.yaml").write_bytes(content)
    load_recipe("mine.yaml")


def check_component_file(rng: Random, folder: Path) -> None:
    """A file of one component, broken as a text or as a tree, is composed and checked."""
    group = rng.choice(COMPONENT_GROUPS)
    content = rng.choice(sorted((CONF / group).glob("*.yaml"))).read_bytes()
    if rng.random() < 0.5:
        at = content.rfind(b"\n", 0, rng.randrange(len(content) + 1)) + 1
        content = content[:at] + rng.choice(SNIPPETS) + content[at:]
    else:
        tree = mutate_tree(rng, yaml.safe_load(content))
        content = yaml.safe_dump(tree, sort_keys=False).encode()
    (folder / "component.yaml").write_bytes(content)
    load_recipe("lenet5_mnist", [f"{group}=component.yaml"])


def check_overrides(rng: Random, folder: Path) -> None:
    """A shipped recipe with overrides that make no sense, or barely."""
    load_recipe(
        rng.choice(recipe_names()), [draw_override(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    )


def draw_override(rng: Random) -> str:
    """An override as it might be typed, most often of a key that there is."""
    tree = rng.choice(whole_trees())
    key = ".".join(map(str, rng.choice(list(walk(tree)))))
    if rng.random() < 0.15:
        key = rng.choice(
            (*COMPONENT_GROUPS, "hydra.run.dir", "recipe", "", "x", key + "x", "/" + key)
        )
    value = rng.choice(VALUES)
    if rng.random() < 0.3:
        value = rng.choice(("lenet5", "resnet20", "adam", "choice(1,2)", "1,2", "range(3)", "off"))
    text = value if isinstance(value, str) else _format_value(value)
    prefix = rng.choice(("", "", "", "", "+", "++", "~"))
    return f"{prefix}{key}{rng.choice(('=', '=', '=', '=', '', '@x='))}{text}"


def _format_value(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value).replace('"', "'") if isinstance(value, list | dict) else str(value)


def _is_affordable(recipe: Recipe) -> bool:
    """Return whether a recipe is small enough to run thousands of times."""
    samples = getattr(recipe.dataset, "train_size", None) or 0
    return (samples <= 2000 or samples > 10**9) and recipe.train.batch_size <= 512


def build_recipe(rng: Random, folder: Path) -> None:
    """The tiny recipe with a few changes is read and built, if it passes the check."""
    change = mutate_tree if rng.random() < 0.2 else nudge_tree
    tree = change(rng, _draw_model(rng))
    tree["stages"] = ["data", "build"]
    _run(tree, folder)


def train_recipe(rng: Random, folder: Path) -> None:
    """The tiny recipe with a few changes is trained, if it passes the check."""
    tree = nudge_tree(rng, tiny_tree())
    tree["monitor"] = {**tiny_tree()["monitor"], "tensorboard": rng.random() < 0.2}
    _run(tree, folder)


def _draw_model(rng: Random) -> dict[str, Any]:
    tree = dict(tiny_tree())
    if rng.random() < 0.5:
        tree["model"] = rng.choice(whole_trees())["model"]
    if rng.random() < 0.3:
        tree["train"] = {
            **tree["train"],
            "optimizer": rng.choice(whole_trees())["train"]["optimizer"],
        }
    return tree


def _run(tree: dict[str, Any], folder: Path) -> None:
    fields = {str(key): value for key, value in tree.items()}
    if isinstance(fields.get("cache"), dict):
        fields["cache"] = {**fields["cache"], "root": str(folder / "cache")}
    recipe = check_tree(fields)
    if _is_affordable(recipe):
        run(recipe, folder / "run")


def launch_command(rng: Random, folder: Path) -> None:
    """A command line, in this process but for the last step: what Hydra does with it."""
    overrides = [draw_override(rng) for _ in range(rng.choice((1, 1, 2)))]
    flags = rng.choice(([], [], ["--cfg", "job"], ["--help"], ["-m"], ["--cfg"], ["-x"]))
    overrides = [item for item in overrides if "hydra" not in item]
    (folder / "tiny.yaml").write_bytes(recipe_texts()[-1])
    tiny = ["+recipe=tiny.yaml", "stages=[data]", f"cache.root={folder / 'cache'}"]
    launch([*flags, *tiny, *overrides])


def run_process(rng: Random, folder: Path) -> None:
    """A command in a process of its own: its status and what it says are as promised."""
    command = [sys.executable, "-m", "pipeline"]
    if rng.random() < 0.3:
        content = bytearray(rng.choice(recipe_texts()))
        at = content.rfind(b"\n", 0, rng.randrange(len(content) + 1)) + 1
        content[at:at] = rng.choice(SNIPPETS)
        (folder / "mine.yaml").write_bytes(content)
        command += ["+recipe=mine.yaml", "stages=[data]"]
    else:
        (folder / "tiny.yaml").write_bytes(recipe_texts()[-1])
        command += ["+recipe=tiny.yaml", "stages=[data]", draw_override(rng), draw_override(rng)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=180)
    said = done.stderr.decode(errors="replace")
    assert done.returncode in (0, 1, 2), f"exit {done.returncode}\n{said}"
    assert "Traceback" not in said, said
    assert "debug=true" not in said, said
    if done.returncode == 2:
        raise RecipeError([said or "nothing said"])
    if done.returncode == 1:
        raise PipelineError(said)
