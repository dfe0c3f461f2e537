"""Phases of training within one program: what is trained when, and what its optimizer remembers."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.batch import Batch
from pipeline.data.random import seed_words
from pipeline.models.layers import standard
from pipeline.models.layers.path_patterns import is_frozen
from pipeline.stages.fine_tuning import compute_depth_rates
from pipeline.training.component_specs import AverageSpec
from pipeline.training.features.freezing import FreezePhase, optimize_by_phase, select_phase
from pipeline.training.optimizers.first_order import Adam, ClipSpec, Momentum
from pipeline.training.state import TrainState, split_params
from pipeline.training.step import TrainStep
from tests.conftest import ROOT
from tests.models.build import network
from tests.training.step_configs import read_image
from tests.training.test_step import assert_same, make_batch, make_config, make_step, start

GOLDEN = ROOT / "tests" / "golden" / "fine_tuning.npz"
RATE, DECAY = 0.05, 0.5
CLIPS_NOT = ClipSpec(norm=None, value=None).build()
FROZEN, THAWED = ("conv_0", "batch_norm_*"), ("conv_0", "batch_norm_*", "!*")
LAYERS = (
    standard.Conv(features=4, kernel=3, padding=1, bias=True),
    standard.BatchNorm(),
    standard.Relu(),
    standard.Conv(features=5, kernel=3, padding=1, bias=True),
    standard.BatchNorm(),
    standard.Relu(),
    standard.GlobalAvgPool(),
    standard.Dense(features=3),
)
DEPTHS = (("conv_0", "batch_norm_0"), ("conv_1", "batch_norm_1"), ("dense_0",))
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "momentum": Momentum(
        lr=RATE, momentum=0.9, nesterov=False, weight_decay=0.01, decay_rules=()
    ).build(),
    "adam": Adam(lr=RATE, b1=0.9, b2=0.99, eps=1e-4, weight_decay=0.0, decay_rules=()).build(),
}


@cache
def theirs() -> dict[str, np.ndarray]:
    """What PyTorch computed."""
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


def tuning(optimizer: str) -> TrainStep:
    """The step of the golden values."""
    return make_step(
        network=network(*LAYERS).clone(fixed_statistics=FROZEN),
        inputs=read_image((5, 5, 2)),
        train_ops=(),
        optimizer=optimize_by_phase(
            CLIPS_NOT, [(each, OPTIMIZERS[optimizer]) for each in (FROZEN, THAWED)]
        ),
        frozen=FROZEN,
        phases=(FreezePhase(3, THAWED),),
        fixes_statistics=True,
        layer_rates=dict(compute_depth_rates(DEPTHS, DECAY)),
    )


def arrays_at(when: str) -> dict[str, np.ndarray]:
    """PyTorch's arrays by path."""
    found = theirs().items()
    return {key.removeprefix(f"{when} "): a for key, a in found if key.startswith(f"{when} ")}


def list_paths(state: TrainState) -> dict[str, np.ndarray]:
    """Parameters and statistics by path."""
    tree = state.variables
    return {path: np.asarray(leaf) for path, leaf in flatten_dict(tree, sep="/").items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fine_tuning_parity_with_pytorch(name: str) -> None:
    """Frozen batch norm, rates by depth, and parameters that join later with a fresh state."""
    step = tuning(name)
    fresh = start(step)
    given = unflatten_dict(arrays_at("start"), sep="/")
    state = jax.tree.map(np.asarray, fresh)
    state = state.replace_variables(given)
    losses = []
    for number in range(6):
        columns = {"image": theirs()["images"][number], "label": theirs()["labels"][number]}
        batch = Batch(
            columns, seed_words(0), np.int32(0), np.arange(6, dtype=np.int32), np.int32(6)
        )
        state, record = step.step(state, batch, np.float32([RATE]))
        losses.append(float(record.loss))
        when = {2: f"{name} thaws", 5: f"{name} ends"}.get(number)
        if when is not None:
            own, expected = list_paths(state), arrays_at(when)
            assert own.keys() == expected.keys()
            for path, array in expected.items():
                np.testing.assert_allclose(own[path], array, rtol=2e-4, atol=2e-5, err_msg=path)
        if number == 2:
            untouched = [p for p in own if is_frozen(FROZEN, tuple(p.split("/")[1:]))]
            assert len(untouched) == 10
            assert all(np.array_equal(own[p], arrays_at("start")[p]) for p in untouched)
    np.testing.assert_allclose(losses, theirs()[f"{name} losses"], rtol=1e-4)


PATHS = [("a", "kernel"), ("a", "bias"), ("b", "x", "kernel"), ("b", "bias"), ("c",)]
PATTERNS = st.sampled_from(["a", "b", "*/bias", "b/x", "*", "c", "*kernel"])


@pytest.mark.medium
@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), PATTERNS), max_size=5), PATTERNS)
def test_last_matching_pattern_decides(rules: list[tuple[bool, str]], last: str) -> None:
    patterns = tuple(f"!{pattern}" if out else pattern for out, pattern in rules)
    for path in PATHS:
        before = is_frozen(patterns, path)
        covered = is_frozen((last,), path)
        assert is_frozen((*patterns, last), path) == (before or covered)
        if patterns:
            assert is_frozen((*patterns, f"!{last}"), path) == (before and not covered)


def test_negated_patterns_exclude_from_freezing() -> None:
    assert [path for path in PATHS if not is_frozen(("!b",), path)] == [PATHS[2], PATHS[3]]
    assert [path for path in PATHS if not is_frozen(("!b", "b/bias"), path)] == [PATHS[2]]
    assert not any(is_frozen((), path) for path in PATHS)


@pytest.mark.medium
def test_each_phase_has_a_separate_state() -> None:
    """The count of updates too; what no gradient is of keeps its state, and clipping sees all."""
    params = {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32), "c": np.ones(1, np.float32)}
    phases = [("b", "c"), ("b", "c", "!b"), ("b", "c", "!b", "!c")]
    adam = optax.scale_by_adam()
    optimizer = optimize_by_phase(optax.clip_by_global_norm(1.0), [(each, adam) for each in phases])
    state = optimizer.init(params)
    assert [int(own.count) for own in state] == [0, 0, 0]
    first = {"a": 3 * params["a"]}
    directions, state = optimizer.update(first, state, {"a": params["a"]})
    assert set(directions) == {"a"}
    assert [int(own.count) for own in state] == [1, 0, 0]
    both = {name: params[name] for name in "ab"}
    directions, after = optimizer.update(both, state, both)
    assert [int(own.count) for own in after] == [2, 1, 0]
    clipped, _ = optax.clip_by_global_norm(1.0).update(both, optax.EmptyState())
    alone, _ = optax.scale_by_adam().update(
        {"b": clipped["b"]}, optax.scale_by_adam().init({"b": params["b"]})
    )
    np.testing.assert_array_equal(directions["b"], alone["b"])


def thawing(**changed: Any) -> dict[str, Any]:
    """Dense_0 frozen for two steps."""
    phases = (FreezePhase(2, ("Dense_0", "!*")),)
    patterns = ("Dense_0",), ("Dense_0", "!*")
    optimizer = optimize_by_phase(CLIPS_NOT, [(each, OPTIMIZERS["adam"]) for each in patterns])
    return {"frozen": ("Dense_0",), "phases": phases, "optimizer": optimizer, **changed}


def run_steps(step: TrainStep, state: TrainState, first: int, last: int) -> TrainState:
    for number in range(first, last):
        state, _ = step.step(state, make_batch(number), np.float32([0.05]))
    return state


@pytest.mark.slow
def test_phases_match_runs_with_other_patterns() -> None:
    """Before: a run with these frozen. After: every parameter moves, the first as ever."""
    step, frozen = (
        make_step(**thawing()),
        make_step(frozen=("Dense_0",), optimizer=OPTIMIZERS["adam"]),
    )
    before, alone = (run_steps(each, start(each), 0, 2) for each in (step, frozen))
    for mine, other in zip(*(jax.tree.leaves(s.params) for s in (before, alone)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-7)
    after = run_steps(step, before, 2, 3)
    assert not np.array_equal(after.params["Dense_0"]["kernel"], before.params["Dense_0"]["kernel"])
    counts = [int(leaf) for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim == 0]
    assert counts == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", [{"accumulate": 2}, {"average": AverageSpec(decay=0.9, warmup=False)}]
)
def test_state_structure_is_equal_in_all_phases(changed: dict[str, Any]) -> None:
    """Structure and types stay; an average covers what is trained later, from the start on."""
    step = make_step(**thawing(**changed))
    state = start(step)
    shapes = jax.tree.map(np.shape, state)
    for number in range(4):
        state = run_steps(step, state, number, number + 1)
        assert jax.tree.map(np.shape, state) == shapes
        if changed.get("average") and number == 1:
            assert_same(state.features["average"]["Dense_0"], state.params["Dense_0"])


def test_config_of_a_phase_has_its_frozen_patterns() -> None:
    config = make_config(**thawing())
    assert [select_phase(config, step).frozen for step in (0, 1, 2, 9)] == [
        *(("Dense_0",), ("Dense_0",), ("Dense_0", "!*"), ("Dense_0", "!*")),
    ]
    assert config.never_trained == ("Dense_0", "!*")
    trained, _ = split_params({"Dense_0": {"x": 1}, "Dense_1": {"x": 2}}, config.never_trained)
    assert set(trained) == {"Dense_0", "Dense_1"}


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 1.0), st.integers(1, 12))
def test_rates_decay_with_depth(decay: float, count: int) -> None:
    factors = dict(compute_depth_rates([[str(depth)] for depth in range(count)], decay))
    assert factors[str(count - 1)] == 1.0
    for depth in range(count - 1):
        assert factors[str(depth)] == pytest.approx(decay * factors[str(depth + 1)])


@pytest.mark.medium
def test_groups_have_separate_optimizers_from_a_common_start() -> None:
    """Each parameter moves as by its optimizer alone, of the last pattern that covers it."""
    params = {name: np.linspace(1, 2, 3, dtype=np.float32) for name in "abc"}
    gradients = {name: 0.3 * value for name, value in params.items()}
    adam, sign = optax.scale_by_adam(), optax.scale_by_sign()
    groups = [(("b", "c"), adam), (("c",), sign), ((), optax.identity())]
    optimizer = optimize_by_phase(optax.identity(), groups)
    state = optimizer.init(params)
    for _ in range(2):
        directions, state = optimizer.update(gradients, state, params)
    alone = adam.init({"a": params["a"]})
    for _ in range(2):
        expected, alone = adam.update({"a": gradients["a"]}, alone)
    np.testing.assert_array_equal(directions["a"], expected["a"])
    np.testing.assert_array_equal(directions["b"], np.ones(3))
    np.testing.assert_array_equal(directions["c"], gradients["c"])
