"""Recipe files of strangers: each ends in one clear message, and nothing of it happens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeline import load_recipe
from pipeline.backends.ascend.chip.chip_files import ChipError, load_chip
from pipeline.config.compose import load_recipe as compose
from pipeline.config.recipe_file import MAX_CHAIN, require_bounded
from pipeline.core.errors import RecipeError

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(text: str | bytes, *overrides: str) -> str:
    """The one problem of a recipe file of this text."""
    content = text if isinstance(text, bytes) else text.encode()
    Path("mine.yaml").write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe("mine.yaml", overrides)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:SECRET}",
        "${ oc.env:SECRET }",
        "x${oc.env:SECRET}",
        r"\${oc.env:SECRET}",
        "$${oc.env:SECRET}",
        "${oc.decode:${oc.env:SECRET}}",
        "${oc.create:'{a: 1}'}",
        "${${name}:SECRET}",
        "${hydra:runtime.cwd}",
        "${now:%Y}",
        "${.seed}",
        "${",
    ],
)
def test_resolvers_in_a_recipe_file_are_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "mellon")
    problem = refused(f"dataset: {{root: {json.dumps(value)}}}\n")
    assert problem.startswith("mine.yaml: dataset.root = ")
    assert "a recipe file may refer to other keys, as in ${train.batch_size}" in problem
    assert "mellon" not in problem


@pytest.mark.slow
def test_override_can_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data")
    recipe = compose("lenet5_mnist", ["dataset.root=${oc.env:DATA}"])
    assert recipe.dataset.root == Path("/data")


@pytest.mark.slow
def test_references_to_keys_are_resolved() -> None:
    Path("mine.yaml").write_text(
        "train: {batch_size: 8, steps: '${train.batch_size}'}\nseed: '${train.steps}'\n"
        "dataset: {eval: {ops: '${dataset.train.ops}'}}\n"
    )
    recipe = load_recipe("mine.yaml")
    assert (recipe.train.steps, recipe.seed) == (8, 8)
    assert recipe.dataset.eval.ops == recipe.dataset.train.ops


def chain(depth: int, first: str) -> str:
    """Keys each of which stands ten times for the one before."""
    keys = [f"k0: {first}"]
    keys += [f"k{n}: [{', '.join([repr(f'${{k{n - 1}}}')] * 10)}]" for n in range(1, depth)]
    return "\n".join(keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (chain(9, "[x, x, x]"), "references make more than 100,000 values of it"),
        (chain(9, "x").replace("[", "'").replace("]", "'").replace("'$", "$"), "mine.yaml: "),
        ("a: '${b}'\nb: '${a}'\n", "references must not be circular"),
        ("a: {b: '${a}'}\n", "references must not be circular"),
        ("a: ['${a[0]}']\n", "references must not be circular"),
        ("a: '${a.b}'\n", "references must not be circular"),
        ("a: '${b.x}'\nb: '${a.x}'\n", "references must not be circular"),
        (
            "l0: {k: [1, 1]}\nr1: '${l0}'\n"
            + "".join(
                "l{0}: {{k: [{1}]}}\nr{2}: '${{l{0}}}'\n".format(n, f"'${{r{n}.k}}', " * 10, n + 1)
                for n in range(1, 6)
            ),
            "references make more than 100,000 values of it",
        ),
    ],
    ids=[
        *("doubled", "texts", "circle", "into itself", "item", "below itself", "below another"),
        "through references",
    ],
)
def test_circular_or_excessive_references_are_refused(text: str, message: str) -> None:
    assert message in refused(text)


def chained(length: int, *, backwards: bool) -> dict[str, str]:
    """A chain of so many references, from either end."""
    keys = {"k0": "7", **{f"k{n}": f"${{k{n - 1}}}" for n in range(1, length + 1)}}
    return dict(reversed(keys.items())) if backwards else keys


@pytest.mark.parametrize("backwards", [False, True])
def test_reference_chain_length_is_limited(backwards: bool) -> None:
    require_bounded(chained(MAX_CHAIN, backwards=backwards))
    with pytest.raises(ValueError, match="a chain of references must have at most 24; refer to"):
        require_bounded(chained(MAX_CHAIN + 1, backwards=backwards))


@pytest.mark.slow
def test_longest_reference_chain_is_resolved() -> None:
    rules = ["{pattern: '*', weight_decay: 0.5}"]
    for n in range(MAX_CHAIN):
        before = f"${{train.optimizer.decay_rules[{n}].weight_decay}}"
        rules.append(f"{{pattern: '*', weight_decay: '{before}'}}")
    text = f"train: {{steps: 1, optimizer: {{decay_rules: [{', '.join(rules)}]}}}}\n"
    Path("mine.yaml").write_text(text)
    found = load_recipe("mine.yaml").train.optimizer.decay_rules
    assert [rule.weight_decay for rule in found] == [0.5] * (MAX_CHAIN + 1)


@pytest.mark.parametrize("backwards", [False, True])
def test_nesting_by_references_is_limited(backwards: bool) -> None:
    keys = {f"k{n}": _nested(40, f"${{k{n - 1}}}" if n else 1) for n in range(3)}
    tree = dict(reversed(keys.items())) if backwards else keys
    with pytest.raises(ValueError, match="references nest it more than 64 levels deep"):
        require_bounded(tree)


def _nested(levels: int, leaf: object) -> object:
    for _ in range(levels):
        leaf = {"x": leaf}
    return leaf


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "more than 20,000 keys and values, with aliases expanded"),
        ("a: &a {x: 1}\nb: {<<: [" + ", ".join(["*a"] * 9000) + "]}\n", "more than 20,000"),
        ("a: &a [*a]\n", "line 1: *a contains itself"),
        ("a: *b\n", "found undefined alias"),
        ("a: " + "[" * 100 + "]" * 100, "nested more than 64 levels deep"),
        ("a: " + "{a: " * 100 + "}" * 100, "nested more than 64 levels deep"),
        ("a: !!python/object/apply:os.system [touch pwned]\n", "the tag !!python/object/apply:os"),
        ("a: !!python/object/apply:pathlib.Path [x]\n", "the tag !!python/object/apply:pathlib"),
        ("a: !!python/name:os.system x\n", "the tag !!python/name:os.system"),
        ("a: !!binary aGk=\n", "the tag !!binary; values must be texts, numbers"),
        ("a: !!set {x}\n", "the tag !!set"),
        ("a: !mine x\n", "the tag !mine"),
        ("a: !!int x\n", "write a decimal number, or a text in quotes: 'x'"),
        ("a: !!bool x\n", "not readable as YAML: "),
        ("seed: " + "9" * 5000, "a number of 5,000 characters"),
        ("seed: 0x" + "f" * 9000, "a number of 9,002 characters"),
        ("a: " + "1:" * 9000 + "1", "a number of 18,001 characters"),
        ("1: x\n", "the key 1 must be a text"),
        ("on: x\n", "the key on must be a text"),
        ("? [a]\n: x\n", "the key a collection must be a text"),
        ("seed: 1\nseed: 2\n", "found duplicate key seed"),
        ("- 1\n", "must hold keys and values, not a list"),
        ("x", "must hold keys and values, not a single value"),
        ("a: \x00\n", "not readable as YAML: "),
        (b"a: \xff\xfe\n", "not readable as YAML: "),
        ("# " + "x" * 300_000, "has more than 262,144 bytes"),
    ],
)
def test_hostile_or_malformed_yaml_is_refused(text: str | bytes, message: str) -> None:
    problem = refused(text)
    assert problem.startswith("mine.yaml: ")
    assert message in problem
    assert problem.isprintable()
    assert os.listdir() == ["mine.yaml"]


@pytest.mark.slow
def test_pipe_as_recipe_is_refused() -> None:
    os.mkfifo("mine.yaml")
    with pytest.raises(RecipeError, match="isn't a regular file"):
        load_recipe("mine.yaml")
    Path("recipes").mkdir()
    os.mkfifo("recipes/other.yaml")
    assert load_recipe().name == "lenet5_digits"


TOUCH = "evil: {_target_: os.mkdir, path: pwned}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "defaults",
    [
        "[{recipe@hydra.callbacks: evil}]",
        "[{/recipe@hydra.callbacks: evil}]",
        "[{override /model@hydra: evil}]",
        "[{override hydra/launcher: joblib}]",
        "[{/hydra: default}]",
        "[{override /train: default}]",
        "[../../../etc/passwd]",
        f"[{'x' * 300}]",
        "[/etc/passwd]",
        "[{override /model: ../device/cpu}]",
        "[{override /model: [lenet5, mlp]}]",
        "[{override /model: '${oc.env:HOME}'}]",
        "[{optional /model: lenet5}]",
        "[[lenet5]]",
        "[1]",
        "{model: lenet5}",
    ],
)
def test_hostile_defaults_are_refused(defaults: str, folder: Path) -> None:
    """Hydra would also put files into its own section, whose callbacks it makes and calls."""
    (folder / "recipes").mkdir()
    (folder / "recipes" / "evil.yaml").write_text(TOUCH)
    problem = refused(f"defaults: {defaults}\n")
    assert "mine.yaml: d" in problem
    assert not (folder / "pwned").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../secret.yaml", "and NAME an option or a file beside the recipe or below it"),
        ("/etc/secret.yaml", "a file beside the recipe or below it, as in ./mine.yaml"),
        ("a/../../secret.yaml", "a file beside the recipe or below it"),
        ("~/secret.yaml", "a file beside the recipe or below it"),
        ("'${oc.env:HOME}.yaml'", "a file beside the recipe or below it"),
        ("link.yaml", "mine.yaml: defaults: link.yaml: leads out of the folder of the recipe"),
        ("folder/secret.yaml", "defaults: folder/secret.yaml: leads out of the folder of the rec"),
        ("none.yaml", "none.yaml: there is no such file"),
        ("evil.yaml", "evil.yaml: hydra: must not be in a file; set it on the command line"),
        ("bank.yaml", "bank.yaml: device.tune_bank = /etc/passwd: must not be in a file"),
    ],
)
def test_unsafe_component_files_are_refused(path: str, message: str, folder: Path) -> None:
    """A link or a path out of it would bring other files of the disk into messages and runs."""
    work = folder / "work"
    work.mkdir()
    os.chdir(work)
    (folder / "secret.yaml").write_text("password: mellon\n")
    (work / "link.yaml").symlink_to(folder / "secret.yaml")
    (work / "folder").symlink_to(folder)
    (work / "evil.yaml").write_text("name: cpu\nhydra: {run: {dir: x}}\n")
    (work / "bank.yaml").write_text("name: cpu\ntune_bank: /etc/passwd\n")
    problem = refused(f"defaults: [override /device: {path}]\n")
    assert message in problem
    assert "mellon" not in problem


@pytest.mark.slow
def test_recipe_extends_another_recipe(folder: Path) -> None:
    (folder / "recipes").mkdir()
    (folder / "recipes" / "base.yaml").write_text("seed: 7\ntrain: {epochs: null, steps: 3}\n")
    (folder / "mine.yaml").write_text("defaults: [base, override /model: mlp, _self_]\n")
    recipe = load_recipe("mine.yaml")
    assert (recipe.seed, recipe.train.steps, recipe.model.name) == (7, 3, "mlp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("cache: {root: /}\n", "cache.root"),
        ("cache: ${dataset}\n", "cache.root"),
        ("train: {resume: ../other}\n", "train.resume"),
        ("train: ${dataset}\n", "train.resume"),
        ("train: ${dataset}\n", "train.resume_changed"),
        ("train: {resume_changed: allow}\n", "train.resume_changed"),
        ("dataset: {follow_links: true}\n", "dataset.follow_links"),
        ("device: {tune_bank: /etc/passwd}\n", "device.tune_bank"),
        ("profile: {mode: 'on', output: /tmp/elsewhere}\n", "profile.output"),
        ("dump: {steps: '0', path: /tmp}\n", "dump.path"),
    ],
)
def test_only_the_command_line_sets_where_to_write(text: str, key: str) -> None:
    Path("mine.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe("mine.yaml")
    (problem,) = (p for p in caught.value.problems if p.startswith(f"mine.yaml: {key} = "))
    said = f"must not be in a file, which may be a stranger's; set it on the command line: {key}="
    assert said in problem


def test_component_file_is_checked_like_a_recipe() -> None:
    Path("chip.yaml").write_text("defaults: [ascend910, _self_]\ntune_bank: /etc/passwd\n")
    with pytest.raises(RecipeError, match=r"chip.yaml: device.tune_bank = /etc/passwd: must not"):
        load_recipe("lenet5_digits", ["device=chip.yaml"])
    Path("net.yaml").write_text("defaults: [lenet5, {/optimizer: adam}, _self_]\n")
    with pytest.raises(RecipeError, match=r"net.yaml: defaults: .*must be _self_ or the name of a"):
        load_recipe("lenet5_digits", ["model=net.yaml"])


@pytest.mark.slow
def test_recipe_of_a_run_does_not_choose_where_to_write(folder: Path) -> None:
    """It holds every key; those are of the machine on which the run was made."""
    from pipeline.stages.record.recorded_recipe import write_recipe

    made = load_recipe("lenet5_digits", [f"cache.root={folder / 'cache'}"])
    write_recipe(folder, made)
    again = load_recipe(str(folder / "recipe.yaml"))
    assert again.cache.root is None
    assert load_recipe(str(folder / "recipe.yaml"), ["cache.root=mine"]).cache.root == Path("mine")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: ../../x\n", "name = ../../x: "),
        ("name: " + "x" * 200, "must have at most 100"),
        ("seed: .nan\n", "seed = nan: must be a whole number"),
        ("train: {optimizer: {lr: .inf}}\n", "train.optimizer.lr = inf: must be a finite number"),
        ("seed: 1e999\n", "seed = inf: must be a whole number"),
        ("seed: '['\n", "seed = '[': must be a whole number"),
        ('seed: "\\e[31m"\n', r"seed = '\x1b[31m': must be a whole number"),
        ("_target_: os.system\n", "_target_ = os.system: there is no such key"),
        ("model: {_target_: os.system}\n", "model._target_ = os.system: there is no such key"),
        ("train: {steps: 99999999999999999999}\n", "must be at most 2,147,483,647"),
    ],
)
def test_values_out_of_range_are_refused(text: str, message: str) -> None:
    assert message in refused(text, "train.epochs=null") or message in refused(text)


def blocks(depth: int) -> str:
    """Blocks each of which uses the one before twice."""
    uses = [
        f"    b{n}: [{{use: b{n - 1}, with: {{}}}}, {{use: b{n - 1}, with: {{}}}}]"
        for n in range(1, depth)
    ]
    return "\n".join(
        [
            "defaults: [override /model: layers]",
            "model:",
            "  blocks:",
            "    b0: [relu]",
            *uses,
            f"  layers: [{{use: b{depth - 1}, with: {{}}}}, flatten, {{name: dense, "
            "features: $classes}]",
        ]
    )


@pytest.mark.slow
def test_block_multiplication_is_limited() -> None:
    assert "blocks are used more than 1,000 times" in refused(blocks(40))


@pytest.mark.slow
def test_hostile_override_is_refused() -> None:
    for override in (
        "dataset.root=" + "[" * 500 + "]" * 500,
        "seed=" + "1" * 20_000,
        "model=" + "9" * 5000,
        "model=" + "9" * 300 + ".yaml",
        "model=[[lenet5]]",
    ):
        with pytest.raises(RecipeError) as caught:
            load_recipe("lenet5_digits", [override])
        assert len(caught.value.problems) == 1


def test_hostile_chip_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs load chips without a recipe."""
    monkeypatch.setenv("SECRET", "mellon")
    for text in ("chip: '${oc.env:SECRET}'\n", "defaults: [../../etc/passwd]\n", LAUGHS):
        Path("chip.yaml").write_text(text)
        with pytest.raises(ChipError) as caught:
            load_chip("chip.yaml")
        assert "mellon" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: ???\n", "mine.yaml: seed = ???: the value is missing; give one, or"),
        ("train:\n  steps: ???\n", "mine.yaml: train.steps = ???: the value is missing"),
        ("# @package hydra\nrun: {}\n", "mine.yaml: # @package hydra: its keys would go elsewhere"),
        ("\n# a\n #@package: x\nseed: 1\n", "mine.yaml: # @package x: its keys would go elsewhere"),
        (
            "train:\n  steps: 1:30\n",
            "mine.yaml: not readable as YAML: line 2: steps = 1:30: a text",
        ),
        ("monitor: {tensorboard: off}\n", "line 1: tensorboard = off: a text on the command line"),
    ],
)
def test_ambiguous_yaml_is_refused(text: str, problem: str) -> None:
    assert problem in refused(text)


@pytest.mark.medium
def test_component_package_must_match_its_kind() -> None:
    Path("net.yaml").write_text("# @package hydra\nname: mlp\n")
    with pytest.raises(RecipeError, match=r"net.yaml: # @package hydra: .*; must be model$"):
        load_recipe("lenet5_digits", ["model=net.yaml"])
    Path("net.yaml").write_text("# A net\n# @package model\nname: mlp\n")
    assert load_recipe("lenet5_digits", ["model=net.yaml"]).model.name == "mlp"


@pytest.mark.medium
@pytest.mark.parametrize("option", ["//etc", "/etc/passwd", "etc/", "./"])
def test_option_with_slashes_is_reported_as_typed(option: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_digits", [f"model={option}"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"model = {option}: there is no such model. Choose from alexnet, ")
