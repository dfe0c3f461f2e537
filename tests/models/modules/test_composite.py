from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.models.layers.standard import (
    Branches,
    Conv,
    Dense,
    DualPath,
    Flatten,
    Gate,
    GatedMlp,
    GlobalAvgPool,
    LayerSpec,
    Relu,
    Sequence,
    Sigmoid,
    Tanh,
    Views,
)
from pipeline.models.layers.tokens import MeanToken
from tests.models.build import initialise, network, parameters, random, shapes

IMAGES = random(3, 6, 5, 4)
ROWS = random(6, 4)


def out(layer: LayerSpec, x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The output of the layer after a flatten, and its parameters."""
    module = network(layer, Flatten())
    variables = initialise(module, x)
    found = parameters(variables) if "params" in variables else {}
    return np.asarray(module.apply(variables, x, train=False)), found


@pytest.mark.slow
def test_branches_are_concatenated_and_empty_branches_are_identity() -> None:
    layer = Branches(branches=((Relu(),), (), (Dense(features=2, bias=False),)))
    y, p = out(layer, ROWS)
    kernel = p["branches_0/branch_2/dense_0/kernel"]
    np.testing.assert_allclose(
        y, np.concatenate([np.maximum(ROWS, 0), ROWS, ROWS @ kernel], 1), rtol=1e-4, atol=1e-6
    )


def test_split_branches_read_disjoint_channels() -> None:
    y, _ = out(Branches(branches=((), (Tanh(),)), split=True), IMAGES)
    expected = np.concatenate([IMAGES[..., :2], np.tanh(IMAGES[..., 2:])], -1)
    np.testing.assert_allclose(y, expected.reshape(3, -1), rtol=1e-5)


@pytest.mark.medium
def test_film_scales_and_shifts_each_channel() -> None:
    inputs = {"image": IMAGES, "age": random(3, 2)}
    dense = Dense(features=8, bias=False)
    layer = Branches(branches=((Tanh(),), (dense,)), inputs=("image", "age"), join="film")
    module = network(layer)
    variables = initialise(module, inputs)
    y = module.apply(variables, inputs, train=False)
    changes = inputs["age"] @ parameters(variables)["branches_0/branch_1/dense_0/kernel"]
    scale, shift = changes[:, None, None, :4], changes[:, None, None, 4:]
    np.testing.assert_allclose(y, np.tanh(IMAGES) * (1 + scale) + shift, rtol=1e-4, atol=1e-5)


def test_film_needs_a_factor_and_a_shift_for_each_channel() -> None:
    layer = Branches(branches=((), (Dense(features=4),)), inputs=("image", "age"), join="film")
    with pytest.raises(ValueError, match=r"returns shape \(3, 4\); .* must return \(3, 8\)"):
        initialise(network(layer), {"image": IMAGES, "age": random(3, 2)})
    with pytest.raises(ValidationError, match="join film needs 2 branches"):
        Branches(branches=((), (), ()), join="film")


GATES = {
    "swish": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


@pytest.mark.slow
@pytest.mark.parametrize("activation", GATES)
def test_gated_mlp_multiplies_two_dense_layers(activation: Any) -> None:
    has_bias = activation == "gelu"
    y, p = out(GatedMlp(hidden=7, activation=activation, bias=has_bias), ROWS)

    def dense(name: str, x: np.ndarray) -> np.ndarray:
        bias = p[f"gated_mlp_0/{name}/bias"] if has_bias else 0
        return x @ p[f"gated_mlp_0/{name}/kernel"] + bias

    assert len(p) == (6 if has_bias else 3)
    hidden = GATES[activation](dense("gate", ROWS)) * dense("up", ROWS)
    assert hidden.shape == (6, 7)
    np.testing.assert_allclose(y, dense("down", hidden), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_gate_scales_every_channel() -> None:
    y, p = out(Gate(body=(GlobalAvgPool(), Dense(features=4), Sigmoid())), IMAGES)
    means = IMAGES.mean((1, 2)) @ p["gate_0/dense_0/kernel"] + p["gate_0/dense_0/bias"]
    expected = IMAGES / (1 + np.exp(-means))[:, None, None]
    np.testing.assert_allclose(y, expected.reshape(3, -1), rtol=1e-4, atol=1e-6)


def test_gate_may_scale_every_value() -> None:
    y, _ = out(Gate(body=(Tanh(),)), IMAGES)
    np.testing.assert_allclose(y, (IMAGES * np.tanh(IMAGES)).reshape(3, -1), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_dual_path_adds_the_first_channels_and_appends_new_channels() -> None:
    layer = DualPath(body=(Dense(features=5, bias=False),), added=3)
    y, p = out(layer, ROWS)
    body = ROWS @ p["dual_path_0/dense_0/kernel"]
    expected = np.concatenate([body[:, :3] + ROWS[:, :3], ROWS[:, 3:], body[:, 3:]], 1)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_dual_path_computes_its_shortcut_under_a_separate_path() -> None:
    layer = DualPath(body=(Relu(),), added=2, shortcut=(Dense(features=3, bias=False),))
    y, p = out(layer, ROWS)
    positive, shortcut = np.maximum(ROWS, 0), ROWS @ p["dual_path_0/shortcut/dense_0/kernel"]
    expected = [positive[:, :2] + shortcut[:, :2], shortcut[:, 2:], positive[:, 2:]]
    np.testing.assert_allclose(y, np.concatenate(expected, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mirror", "shift", "starts"),
    [(True, 0, [(1, 1)]), (False, 1, [(1, 1), (2, 2), (0, 0)]), (False, 0, [(1, 1)])],
)
def test_views_are_averaged_in_evaluation(
    mirror: bool, shift: int, starts: list[tuple[int, int]]
) -> None:
    layer = Views(body=(Tanh(), Flatten(), Dense(features=2)), mirror=mirror, shift=shift)
    y, p = out(layer, IMAGES)
    padded = np.pad(IMAGES, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    views = [padded[:, top : top + 6, left : left + 5] for top, left in starts]
    if mirror:
        views += [np.flip(view, 2) for view in views]
    kernel, bias = p["views_0/dense_0/kernel"], p["views_0/dense_0/bias"]
    expected = np.mean([np.tanh(view).reshape(3, -1) @ kernel + bias for view in views], 0)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_views_compute_only_the_image_in_training() -> None:
    module = network(Views(body=(Flatten(),), shift=1))
    y = module.apply({}, IMAGES, train=True)
    np.testing.assert_array_equal(np.asarray(y), IMAGES.reshape(3, -1))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            Branches(scope="mix", branches=((), (Conv(features=2, kernel=3, stride=2),))),
            r"mix: the branches return shapes \(1, 6, 5, 4\), \(1, 3, 3, 2\)",
        ),
        (
            Branches(branches=((), (), ()), split=True),
            "branches_0: groups 3 does not divide the 4 channels",
        ),
        (
            Gate(body=(GlobalAvgPool(), Dense(features=3))),
            r"gate_0: the body returns shape \(1, 3\); to multiply \(1, 6, 5, 4\) it must return "
            r"\(1, 4\), a factor per channel",
        ),
        (
            DualPath(body=(Conv(features=5, kernel=1),), added=5),
            r"dual_path_0: the body returns shape \(1, 6, 5, 5\) and the shortcut \(1, 6, 5, 4\); "
            "the first 5 channels are added",
        ),
        (
            DualPath(body=(Conv(features=4, kernel=1, stride=2),), added=2),
            r"dual_path_0: the body returns shape \(1, 3, 3, 4\)",
        ),
        (
            Views(body=(Relu(),), shift=5),
            "views_0: images are 6x5; shift 5 must be below both",
        ),
        (
            Views(body=(Relu(),)),
            r"views_0: the body returns shape \(2, 6, 5, 4\); must be values without positions",
        ),
        (
            Sequence(body=(Flatten(), Views(body=(Relu(),)))),
            r"sequence_0/views_0: shape \(1, 120\) reaches the layer; must be images",
        ),
    ],
)
def test_incompatible_shapes_are_reported(layer: LayerSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(network(layer, Flatten()), (6, 5, 4))


def test_branches_need_at_least_one_branch() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        Branches(branches=())


@pytest.mark.medium
def test_branches_read_their_inputs() -> None:
    branches = ((Flatten(), Tanh()), (Relu(),))
    module = network(Branches(branches=branches, inputs=("image", "row")), Flatten())
    inputs = {"row": ROWS[: len(IMAGES)], "image": IMAGES}
    variables = initialise(module, inputs)
    y = module.apply(variables, inputs, train=False)
    expected = [np.tanh(inputs["image"].reshape(len(IMAGES), -1)), np.maximum(inputs["row"], 0)]
    np.testing.assert_allclose(y, np.concatenate(expected, 1), rtol=1e-5)


@pytest.mark.medium
def test_one_branch_reads_all_inputs_with_the_same_weights() -> None:
    module = network(Branches(branches=((Dense(features=2),),), inputs=("a", "b")))
    inputs = {"a": ROWS, "b": random(6, 4) + 1}
    variables = initialise(module, inputs)
    p = parameters(variables)
    assert list(p) == ["branches_0/branch_0/dense_0/bias", "branches_0/branch_0/dense_0/kernel"]
    y = module.apply(variables, inputs, train=False)
    kernel, bias = p["branches_0/branch_0/dense_0/kernel"], p["branches_0/branch_0/dense_0/bias"]
    expected = np.concatenate([inputs[name] @ kernel + bias for name in ("a", "b")], 1)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("has_mask", [True, False])
def test_each_branch_has_the_mask_of_its_input(has_mask: bool) -> None:
    branches = ((MeanToken(),), (MeanToken(),))
    module = network(Branches(branches=branches, inputs=("a", "b")))
    inputs = {"a": random(2, 3, 4), "b": random(2, 5, 4)}
    masks = {
        "a_mask": np.array([[1, 1, 0], [1, 1, 1]], bool),
        "b_mask": np.array([[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool),
    }
    variables = initialise(module, {**inputs, **masks} if has_mask else inputs)
    y = module.apply(variables, {**inputs, **masks} if has_mask else inputs, train=False)
    a, b = inputs["a"], inputs["b"]
    expected = [np.stack([a[0, :2].mean(0), a[1].mean(0)]), np.stack([b[0, 0], np.zeros(4)])]
    if not has_mask:
        expected = [a.mean(1), b.mean(1)]
    np.testing.assert_allclose(y, np.concatenate(expected, 1), rtol=1e-5, atol=1e-6)


def test_branch_may_read_an_input_that_is_named_like_a_mask() -> None:
    module = network(Branches(branches=((), ()), inputs=("a", "a_mask")))
    inputs = {"a": ROWS, "a_mask": random(6, 2)}
    y = module.apply(initialise(module, inputs), inputs, train=False)
    np.testing.assert_array_equal(y, np.concatenate([ROWS, inputs["a_mask"]], 1))


@pytest.mark.parametrize(
    ("layers", "inputs", "message"),
    [
        ((Flatten(),), {"a": ROWS, "b": ROWS}, r"reads a, b; its first layer must be branches"),
        (
            (Branches(branches=((),), inputs=("a",)),),
            {"b": ROWS},
            "branches_0: b reach the layer, and its branches read a",
        ),
        ((Branches(branches=((),), inputs=("a",)),), ROWS, "one array reaches the layer"),
        (
            (Relu(), Branches(branches=((),), inputs=("a",))),
            {"a": ROWS},
            "one array reaches the layer",
        ),
    ],
)
def test_inputs_that_no_branch_reads_are_refused(
    layers: tuple[LayerSpec, ...], inputs: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        initialise(network(*layers), inputs)


def test_each_branch_has_one_input() -> None:
    with pytest.raises(ValidationError, match="inputs has 1 names for 2 branches"):
        Branches(branches=((), ()), inputs=("a",))
    with pytest.raises(ValidationError, match="inputs has 3 names for 2 branches"):
        Branches(branches=((), ()), inputs=("a", "b", "c"))
