"""Searches of small runs: mutants fool the network, again and within the radius.

Changes of images stay within their limits, whatever is drawn.
Coverage of neurons against its definition.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from pipeline.cli.runs import fuzz
from pipeline.config.compose import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, RunError
from pipeline.data.columns import IMAGES, ColumnSpec, Targets
from pipeline.data.random import seed_words
from pipeline.inspect.dumps.opened_recipe import make_silent_reporter, open_recipe
from pipeline.inspect.fuzz import (
    KINDS,
    SECTIONS,
    ChangeLimits,
    FuzzSearch,
    NeuronCoverage,
    _blur,
    apply_with_neurons,
    make_predict,
    mutate,
    require_fuzzable,
)
from pipeline.inspect.replay import replay_state
from pipeline.stages.record.trained_run import read_run_recipe
from pipeline.training.step import get_evaluated_weights
from tests.conftest import MLP
from tests.whole_run import run


@pytest.fixture(scope="module")
def trained_run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("fuzzed") / "run"
    length = ("train.steps=60", "checkpoint.every_steps=60", "monitor.tensorboard=false")
    digits = [*MLP, *length, "model.hidden=[32]", f"cache.root={cache}"]
    run(load_recipe("lenet5_digits", digits), run_dir)
    return run_dir


@pytest.mark.medium
def test_reported_mutants_fool_the_network(trained_run: Path) -> None:
    opened = open_recipe(read_run_recipe(trained_run), trained_run)
    state = replay_state(opened, trained_run, 60, make_silent_reporter())
    variables = get_evaluated_weights(opened.built.step_config, state)
    predict = make_predict(opened, 60)

    def predict_images(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return predict(variables, images)

    search = FuzzSearch(opened.dataset, predict_images, 1, ChangeLimits(0.2, 16))
    result = search.search(np.arange(40), 700)
    assert result.right + result.wrong == 40
    assert result.fooling
    images = np.stack([mutant.candidate.image for mutant in result.fooling])
    predicted = predict_images(images)[0].argmax(axis=1)
    labels = opened.dataset.eval.columns["label"][
        np.array([mutant.candidate.sample for mutant in result.fooling])
    ]
    assert (predicted != labels).all()
    for mutant, number, label in zip(result.fooling, predicted, labels, strict=True):
        assert mutant.predicted == number
        assert mutant.candidate.label == label
        assert mutant.distance <= 0.2
        assert mutant.candidate.changes.count("affine") <= 1
    assert result.coverage["multisection"] < result.coverage_with_mutants["multisection"]
    # A search repeats, and a shorter one is the beginning of a longer one.
    shorter = search.search(np.arange(40), 300)
    assert shorter.fooling
    for again, mutant in zip(shorter.fooling, result.fooling, strict=False):
        assert again.candidate.changes == mutant.candidate.changes
        assert np.array_equal(again.candidate.image, mutant.candidate.image)


@pytest.mark.slow
def test_command_writes_a_sheet_tables_and_facts(trained_run: Path, tmp_path: Path) -> None:
    result = fuzz.main(trained_run, 0.2, 30, 300, with_faults=True)
    folder = trained_run / "fuzz"
    facts = json.loads((folder / "fuzz.json").read_text())
    assert {**facts, "folder": str(folder)} == result.facts
    with open(folder / "fooling.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == facts["fooling"] > 0
    assert all(row["label"] != row["prediction"] for row in rows)
    assert len({row["sample"] for row in rows}) == facts["fooled_samples"]
    with Image.open(folder / "sheet.png") as picture:
        assert picture.size[0] > 100
    header = (folder / "faults.csv").read_text().splitlines()[0]
    assert header == "fault,count,accuracy,least"
    assert {row["fault"] for row in facts["faults"]} == {"bit flips", "zeros", "sign flips"}
    # Nothing of an earlier search stays.
    fuzz.main(trained_run, 0.0, 30, 1, with_faults=False)
    assert not (folder / "faults.csv").exists()
    fuzz.main(trained_run, 0.2, 30, 1, with_faults=False, out=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "fuzz.json").exists()


@pytest.mark.slow
def test_refusals(trained_run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="isn't a run directory"):
        fuzz.main(tmp_path, 0.1, 10, 10, with_faults=False)
    copy = tmp_path / "run"
    shutil.copytree(trained_run, copy)
    shutil.rmtree(copy / "fuzz", ignore_errors=True)
    (copy / "fuzz").symlink_to(tmp_path)
    with pytest.raises(DataError, match="is a link"):
        fuzz.main(copy, 0.1, 10, 10, with_faults=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't be written"):
        fuzz.main(trained_run, 0.1, 10, 10, with_faults=False, out=tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"text": "a tokenizer"}, "has tokens, whose changes would be other texts"),
        ({"table": "columns"}, "doesn't have images"),
        ({"raw_image": None}, "doesn't have images"),
        ({"raw_image": ColumnSpec((8, 8, 1), "float32")}, "has float32 of shape"),
        ({"raw_image": ColumnSpec((8, 8, 2), "uint8")}, "not bytes of 1 or 3 channels"),
        ({"targets": Targets(("a", "b"), "multi_label")}, "doesn't have one class"),
    ],
    ids=["text", "table", "series", "float", "channels", "labels"],
)
def test_inputs_without_pixels_are_refused(changed: dict[str, Any], problem: str) -> None:
    facts: dict[str, Any] = {"text": None, "table": None, "unit": IMAGES, "label_positions": ()}
    facts |= {"targets": Targets(("a", "b")), "raw_image": ColumnSpec((8, 8, 1), "uint8")}
    with pytest.raises(RecipeError, match=f"dataset = made up: .*{problem}"):
        require_fuzzable(SimpleNamespace(**{**facts, **changed}), "made up")  # type: ignore[arg-type]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("radius", "white", "channels"),
    [
        pytest.param(0.0, 255, 1, marks=pytest.mark.slow),
        pytest.param(0.3, 16, 1, marks=pytest.mark.slow),
        (0.11, 255, 3),
    ],
)
def test_changes_are_within_the_limits(radius: float, white: int, channels: int) -> None:
    seed = 5
    generator = np.random.default_rng(seed)
    images = generator.integers(0, white + 1, (40, 8, 8, channels), dtype=np.uint8)
    is_affine = generator.random(40) < 0.5
    words = seed_words(seed)
    change = jax.jit(partial(mutate, ChangeLimits(radius, white)))
    changed, references, kinds = map(
        np.asarray, change(images, images, is_affine, words, np.int32(3))
    )
    distance = np.abs(changed.astype(int) - references.astype(int))
    assert distance.max() <= radius * white + 1e-6
    assert changed.max() <= white
    assert not (is_affine & (kinds == 0)).any()
    assert np.array_equal(references[kinds != 0], images[kinds != 0])
    again = change(images, images, is_affine, words, np.int32(3))
    assert np.array_equal(changed, np.asarray(again[0]))


@pytest.mark.medium
def test_every_change_is_drawn_and_changes() -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(50, 150, (256, 8, 8, 1), dtype=np.uint8)
    nothing = np.zeros(256, bool)
    change = jax.jit(partial(mutate, ChangeLimits(0.3, 255)))
    changed, _, kinds = map(np.asarray, change(images, images, nothing, seed_words(1), np.int32(0)))
    assert set(kinds.tolist()) == set(range(len(KINDS)))
    is_changed = (changed != images).any(axis=(1, 2, 3))
    for kind in range(len(KINDS)):
        assert is_changed[kinds == kind].mean() > 0.8


@pytest.mark.medium
def test_blur_is_a_binomial_average() -> None:
    image = np.random.default_rng(2).integers(0, 256, (1, 5, 7, 1), dtype=np.uint8)
    padded = np.pad(image[0, :, :, 0].astype(int), 1, mode="edge")
    weights = np.outer([1, 2, 1], [1, 2, 1])
    for row in range(5):
        for column in range(7):
            mean = (padded[row : row + 3, column : column + 3] * weights).sum() / 16
            assert int(_blur(jnp.asarray(image))[0, row, column, 0]) == pytest.approx(mean, abs=0.5)


def test_sections_match_the_definition() -> None:
    generator = np.random.default_rng(1)
    train = generator.normal(size=(50, 6)).astype(np.float32)
    train[:, 5] = 2.0
    coverage = NeuronCoverage(train)
    reached: set[tuple[int, int]] = set()
    for sample in generator.normal(scale=2, size=(300, 6)).astype(np.float32):
        before = len(reached)
        for neuron, value in enumerate(sample.tolist()):
            low = float(train[:, neuron].min())
            high = float(train[:, neuron].max())
            if value < low:
                section = 0
            elif value > high:
                section = SECTIONS + 1
            else:
                section = 1 + min(int((value - low) / (high - low) * SECTIONS), SECTIONS - 1)
            reached.add((neuron, section))
        assert coverage.add(sample) == (len(reached) > before)
    inside = [section for _, section in reached if 0 < section <= SECTIONS]
    shares = coverage.compute_shares()
    assert shares["multisection"] == len(inside) / (6 * SECTIONS)
    assert shares["boundary"] == (len(reached) - len(inside)) / 12
    assert coverage.reached.sum() == len(reached)


@pytest.mark.medium
def test_neurons_are_features_of_all_layers(tiny: Callable[..., Recipe]) -> None:
    opened = open_recipe(tiny())
    config = opened.programs(0).config
    variables = get_evaluated_weights(config, opened.fresh_state())
    images = jnp.asarray(np.random.default_rng(0).random((3, 32, 32, 1), np.float32))
    logits, neurons = apply_with_neurons(config, variables, images)
    expected = config.network.apply(variables, images, train=False)
    assert np.array_equal(logits, expected)
    # The last layer's features are the logits.
    assert np.array_equal(neurons[:, -10:], logits)
    assert neurons.shape[1] > 200


@pytest.mark.medium
def test_neurons_inside_views_are_means_over_views(tiny: Callable[..., Recipe]) -> None:
    layers = "[{name: views, shift: 1, body: [flatten, {name: dense, features: $classes}]}, tanh]"
    opened = open_recipe(tiny("model=layers", f"model.layers={layers}"))
    config = opened.programs(0).config
    variables = get_evaluated_weights(config, opened.fresh_state())
    images = jnp.asarray(np.random.default_rng(0).random((3, 32, 32, 1), np.float32))
    logits, neurons = apply_with_neurons(config, variables, images)
    # The network's dense layer, its views and the activation.
    assert neurons.shape == (3, 30)
    means, last = neurons[:, :20].reshape(3, 2, 10), neurons[:, 20:]
    assert np.allclose(means, np.arctanh(logits)[:, None], atol=1e-5)
    assert np.array_equal(last, logits)
