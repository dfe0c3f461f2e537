"""The ledger: readings against NumPy, and the same bits in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.training.features.ledger import (
    EARLY_READINGS,
    Readings,
    add_readings,
    make_ledger,
    read_samples,
)
from tests import outcome
from tests.outcome import assert_equal_arrays, assert_same_run
from tests.whole_run import run

Compose = Callable[..., Recipe]
LEDGER = "train.ledger=true"
LEDGER_PATH = "features/ledger/"
READINGS = f"{LEDGER_PATH}readings"
MARGINS = f"{LEDGER_PATH}margin_sum"
RUN = ("model=mlp", "model.hidden=[8]", "train.steps=14", "checkpoint.every_steps=7", LEDGER)
ATTACK = "++train.adversarial={attack: pgd, radius: 0.1, steps: 2, share: 0.7}"
TRADES = "++train.adversarial={attack: trades, radius: 0.1, steps: 2}"
SHARDS = ("parallel.mode=data", "parallel.devices=2", "parallel.shards=4")
RESCALE = "{name: rescale, factor: 0.1, shift: 0.0}"
MIXING = (
    f"dataset.train.ops=[{RESCALE}, {{name: mix_up, alpha: 0.2}}]",
    f"dataset.eval.ops=[{RESCALE}]",
)


@pytest.mark.medium
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_readings_match_numpy(scale: float) -> None:
    random = np.random.default_rng(0)
    logits = (scale * random.normal(size=(50, 7))).astype(np.float32)
    labels = random.integers(0, 7, 50).astype(np.int32)
    mask = np.arange(50) < 45
    one_hot = np.eye(7, dtype=np.float32)[labels]
    wide = logits.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    log_p = wide - top - np.log(np.exp(wide - top).sum(axis=1, keepdims=True))
    others = np.where(one_hot > 0, -np.inf, wide)
    rows = np.arange(50)
    for form in (labels, one_hot):
        readings = read_samples(jnp.asarray(logits), jnp.asarray(form), jnp.asarray(mask))
        np.testing.assert_allclose(readings.loss, -log_p[rows, labels], rtol=2e-5, atol=1e-6)
        margin = wide[rows, labels] - others.max(axis=1)
        np.testing.assert_allclose(readings.margin, margin, rtol=2e-5, atol=1e-5)
        norm = np.linalg.norm(np.exp(log_p) - one_hot, axis=1)
        np.testing.assert_allclose(readings.gradient_norm, norm, rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(readings.rival, others.argmax(axis=1))
        np.testing.assert_array_equal(readings.valid, mask)


@pytest.mark.medium
@given(st.integers(0, 1000), st.booleans())
def test_ledger_matches_a_loop_over_readings(seed: int, repeats: bool) -> None:
    random = np.random.default_rng(seed)
    ledger = make_ledger(6)
    add = jax.jit(add_readings, static_argnames="repeats")
    expected = {name: [0.0] * 6 for name in vars(ledger)}
    for _ in range(8):
        rows = random.integers(0, 6, 4) if repeats else random.permutation(6)[:4]
        numbers = random.normal(size=(3, 4)).astype(np.float32)
        rival = random.integers(0, 3, 4)
        valid = random.integers(0, 2, 4)
        applied = bool(random.integers(0, 4))
        readings = Readings(*map(jnp.asarray, (*numbers, rival, valid)))
        ledger = add(ledger, jnp.asarray(rows), readings, jnp.asarray(applied), repeats=repeats)
        read = set()
        for place, row in enumerate(rows.tolist()):
            if not (applied and valid[place]) or row in read:
                continue
            read.add(row)
            was_right = expected["learnt"][row] > expected["forgotten"][row]
            is_right = numbers[1, place] > 0
            if expected["readings"][row] < EARLY_READINGS:
                expected["early_gradient_sum"][row] += numbers[2, place]
            expected["loss"][row] = numbers[0, place]
            if numbers[1, place] * expected["readings"][row] <= expected["margin_sum"][row]:
                expected["rival"][row] = rival[place]
            expected["margin_sum"][row] += numbers[1, place]
            expected["readings"][row] += 1
            expected["learnt"][row] += is_right and not was_right
            expected["forgotten"][row] += was_right and not is_right
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(ledger, name), values, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_label_learnt_by_heart_keeps_its_early_rival() -> None:
    """The network first sees the true class, 2. Later the wrong label fits, by chance before 1."""
    ledger = make_ledger(1)
    one = jnp.ones(1, jnp.int32)
    for margin, rival in ((-1.0, 0), (-3.0, 2), (2.0, 1), (5.0, 1)):
        number = jnp.full(1, margin)
        readings = Readings(number, number, number, one * rival, one)
        applied = jnp.asarray(True)
        ledger = add_readings(ledger, 0 * one, readings, applied, repeats=False)
    assert ledger.rival.tolist() == [2]


def strip_ledger(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        path: array for path, array in arrays.items() if not path.startswith("features/ledger/")
    }


@pytest.mark.medium
@pytest.mark.usefixtures("optimized_programs")
def test_ledger_does_not_change_training(tiny: Compose, tmp_path: Path) -> None:
    run(tiny(*RUN), tmp_path / "on")
    run(tiny(*RUN, "train.ledger=false"), tmp_path / "off")
    assert outcome.metrics(tmp_path / "on") == outcome.metrics(tmp_path / "off")
    on = outcome.arrays(tmp_path / "on")
    assert_equal_arrays(strip_ledger(on), outcome.arrays(tmp_path / "off"))
    assert on[READINGS].sum() == 14 * tiny(*RUN).train.batch_size


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_ledger_does_not_depend_on_sinks_resume_and_devices(
    tiny: Compose, tmp_path: Path, microbatches: int
) -> None:
    settings = (*RUN, f"train.accumulate_steps={microbatches}")
    data = "parallel.mode=data"
    for name, *overrides in (
        ("1", "train.sink_size=1"),
        ("7", "train.sink_size=7"),
        ("all", "train.sink_size=14"),
        ("one", data, "parallel.devices=1", "parallel.shards=4"),
        ("four", data, "parallel.devices=4", "parallel.shards=4"),
    ):
        run(tiny(*settings, *overrides), tmp_path / name)
    assert_same_run(tmp_path / "1", tmp_path / "7")
    assert_same_run(tmp_path / "1", tmp_path / "all")
    assert_same_run(tmp_path / "one", tmp_path / "four")
    half = tmp_path / "half"
    run(tiny(*settings, "train.end_step=7"), half)
    run(tiny(*settings, f"train.resume={half}"))
    assert outcome.metrics(half) == outcome.metrics(tmp_path / "7")
    assert_equal_arrays(outcome.arrays(half), outcome.arrays(tmp_path / "7"))
    shared, whole = (outcome.arrays(tmp_path / name) for name in ("four", "all"))
    np.testing.assert_array_equal(shared[READINGS], whole[READINGS])
    np.testing.assert_allclose(
        shared[MARGINS],
        whole[MARGINS],
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.slow
def test_ledger_with_fsdp_layouts_and_eager_mode(tiny: Compose, tmp_path: Path) -> None:
    for name, *overrides in (
        ("plain",),
        ("eager", "train.mode=eager"),
        ("fsdp", "parallel.mode=fsdp", "parallel.devices=2"),
        ("layout", "parallel.mode=data", "parallel.devices=2", "parallel.reproducible=layout"),
    ):
        run(tiny(*RUN, *overrides), tmp_path / name)
    plain = outcome.arrays(tmp_path / "plain")
    for name in ("eager", "fsdp", "layout"):
        other = outcome.arrays(tmp_path / name)
        np.testing.assert_array_equal(other[READINGS], plain[READINGS])
        np.testing.assert_allclose(
            other[MARGINS],
            plain[MARGINS],
            rtol=1e-3,
            atol=1e-3,
        )


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize(
    "overrides",
    [
        (ATTACK, "train.accumulate_steps=2", "train.gradients=sam"),
        (TRADES, "train.accumulate_steps=2"),
        (ATTACK, *SHARDS, "train.gradients=sam"),
        (TRADES, *SHARDS, "train.accumulate_steps=2"),
    ],
    ids=["pgd sam", "trades", "pgd sam shards", "trades shards"],
)
def test_attacked_steps_keep_a_ledger(
    tiny: Compose, tmp_path: Path, overrides: Sequence[str]
) -> None:
    settings = (*RUN, *overrides)
    for name, *more in (
        ("off", "train.ledger=false", "train.sink_size=7"),
        ("1", "train.sink_size=1"),
        ("7", "train.sink_size=7"),
        ("half", "train.end_step=7"),
    ):
        run(tiny(*settings, *more), tmp_path / name)
    run(tiny(*settings, f"train.resume={tmp_path / 'half'}"))
    on = outcome.arrays(tmp_path / "7")
    assert_equal_arrays(strip_ledger(on), outcome.arrays(tmp_path / "off"))
    assert outcome.metrics(tmp_path / "7") == outcome.metrics(tmp_path / "off")
    for name in ("1", "half"):
        assert_equal_arrays(outcome.arrays(tmp_path / name), on)
    assert on[READINGS].sum() == 14 * tiny(*settings).train.batch_size


@pytest.mark.slow
def test_resume_with_other_data_is_refused(tiny: Compose, tmp_path: Path) -> None:
    file = tmp_path / "wrong.csv"
    file.write_text("3\n")
    settings = (*RUN, f"dataset.exclude={file}")
    run(tiny(*settings, "train.end_step=7"), tmp_path / "run")
    file.write_text("4\n5\n")
    resumed = f"train.resume={tmp_path / 'run'}"
    with pytest.raises(DataError, match="the data have changed since the run was trained"):
        run(tiny(*settings, resumed))
    problem = "train.ledger = true: the ledger is of other data than these.*train image: was"
    with pytest.raises(RecipeError, match=problem):
        run(tiny(*settings, resumed, "train.resume_changed=allow"))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (
            "lenet5_digits",
            ("model=mlp", "model.hidden=[8]", *MIXING),
            r"must be false with dataset.train.ops.1 \(mix_up\)",
        ),
        ("diabetes_mlp", (), "must be false unless each sample has one of several classes"),
        ("gpt_text", (), "must be false unless each sample has one of several classes"),
    ],
)
def test_invalid_ledger_recipes_are_refused(
    recipe: str, overrides: Sequence[str], message: str, tmp_path: Path
) -> None:
    quiet = ("monitor.tensorboard=false", "stages=[data,build]")
    composed = load_recipe(recipe, [*overrides, *quiet, LEDGER])
    with pytest.raises(RecipeError, match=f"train.ledger = true: {message}"):
        run(composed, tmp_path / "run")
