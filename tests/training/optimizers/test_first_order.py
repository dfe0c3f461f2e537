"""Optimizers against optax, float64 loops and hand-worked numbers (L-03)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from pipeline.training.component_specs import DecayRule
from pipeline.training.optimizers.adaptive import (
    AdaBelief,
    Adagrad,
    AdaMax,
    AmsGrad,
    Lion,
    NAdam,
    RAdam,
    RmsProp,
)
from pipeline.training.optimizers.first_order import Adam, AdamW, Momentum, Sgd, add_weight_decay
from pipeline.training.optimizers.layerwise import Lamb, Lars, Muon

CONF = Path(__file__).parents[3] / "conf" / "optimizer"
SPECS = (
    *(Sgd, Momentum, Adam, AdamW),
    *(NAdam, RAdam, AdaMax, AmsGrad, AdaBelief, Lion, Adagrad, RmsProp),
    *(Lars, Lamb, Muon),
)
LR = 0.05
COMMON = {"lr": LR, "weight_decay": 0.1, "decay_rules": ()}
MOMENTS = {"b1": 0.9, "b2": 0.99, "eps": 1e-6}
DECAY = optax.add_decayed_weights(0.1)

SAME_AS_OPTAX = {
    "sgd": (Sgd(**COMMON), optax.chain(DECAY, optax.sgd(LR))),
    "momentum": (
        Momentum(**COMMON, momentum=0.9, nesterov=False),
        optax.chain(DECAY, optax.sgd(LR, momentum=0.9)),
    ),
    "nesterov": (
        Momentum(**COMMON, momentum=0.9, nesterov=True),
        optax.chain(DECAY, optax.sgd(LR, momentum=0.9, nesterov=True)),
    ),
    "adam": (Adam(**COMMON, **MOMENTS), optax.chain(DECAY, optax.adam(LR, **MOMENTS))),
    "adamw": (AdamW(**COMMON, **MOMENTS), optax.adamw(LR, **MOMENTS, weight_decay=0.1)),
}


def some_params():
    rng = np.random.default_rng(7)
    return {
        "conv_0": {
            "kernel": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32),
            "bias": jnp.asarray(rng.normal(size=2), jnp.float32),
        },
        "dense_0": {"kernel": jnp.asarray(rng.normal(size=(2, 2)), jnp.float32)},
    }


def some_gradients(params):
    """Different at every call's parameters, so that a wrong path shows."""
    return jax.tree.map(lambda p: jnp.sin(3 * p) + 0.2, params)


def directions(optimizer, params, gradients):
    """The directions of one parameter with the given gradients, updated with LR between."""
    state = optimizer.init({"p": params})
    result = []
    for gradient in gradients:
        step, state = optimizer.update({"p": jnp.float32(gradient)}, state, {"p": params})
        params = params - LR * step["p"]
        result.append(float(step["p"]))
    return result


@pytest.mark.parametrize(
    ("name", "spec"), [(spec.model_fields["name"].default, spec) for spec in SPECS]
)
def test_conf_has_every_key_of_the_spec(name, spec):
    written = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert spec.model_validate(written).model_dump(mode="json") == written
    assert (CONF / f"{name}.yaml").read_text().startswith("# @package train.optimizer\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_AS_OPTAX)
def test_twenty_steps_match_optax(name):
    spec, theirs = SAME_AS_OPTAX[name]
    ours, params, expected = spec.build(), some_params(), some_params()
    state, their_state = ours.init(params), theirs.init(expected)
    step, their_step = jax.jit(ours.update), jax.jit(theirs.update)
    for _ in range(20):
        direction, state = step(some_gradients(params), state, params)
        params = jax.tree.map(lambda p, d: p - LR * d, params, direction)
        updates, their_state = their_step(some_gradients(expected), their_state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, expected)


@pytest.mark.medium
def test_momentum_matches_hand_computed_values():
    """p 1, g 0.5 twice: v 0.6, p 0.97; then v 0.9 * 0.6 + 0.5 + 0.1 * 0.97."""
    plain = Momentum(**COMMON, momentum=0.9, nesterov=False).build()
    np.testing.assert_allclose(directions(plain, 1.0, [0.5, 0.5]), [0.6, 1.137], rtol=1e-6)
    nesterov = Momentum(**COMMON, momentum=0.9, nesterov=True).build()
    np.testing.assert_allclose(directions(nesterov, 1.0, [0.5]), [0.6 + 0.9 * 0.6], rtol=1e-6)


@pytest.mark.slow
def test_adam_decays_inside_the_moments_and_adamw_outside():
    """Without a gradient Adam normalises its decay to 1; AdamW adds 0.1 * 2."""
    adam, adamw = Adam(**COMMON, **MOMENTS).build(), AdamW(**COMMON, **MOMENTS).build()
    np.testing.assert_allclose(directions(adam, 2.0, [0.0]), [1.0], rtol=1e-4)
    np.testing.assert_allclose(directions(adamw, 2.0, [0.0]), [0.2], rtol=1e-6)


@pytest.mark.medium
def test_adam_adds_eps_to_the_corrected_root():
    """With eps = |g| the first direction is one half; MindSpore's placement would give 0.091."""
    spec = Adam(lr=LR, weight_decay=0.0, decay_rules=(), b1=0.9, b2=0.99, eps=1e-3)
    np.testing.assert_allclose(directions(spec.build(), 1.0, [1e-3]), [0.5], rtol=1e-5)


def test_adam_matches_a_float64_loop():
    spec = Adam(**COMMON, **MOMENTS)
    gradients = [0.5, -1.0, 0.25, 2.0]
    p, m, v, expected = 1.0, 0.0, 0.0, []
    for t, gradient in enumerate(gradients, start=1):
        g = gradient + 0.1 * p
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        expected.append(m / (1 - 0.9**t) / ((v / (1 - 0.99**t)) ** 0.5 + 1e-6))
        p -= LR * expected[-1]
    np.testing.assert_allclose(directions(spec.build(), 1.0, gradients), expected, rtol=1e-5)


def decay_rates(default, *rules):
    """The rate each parameter gets, read off updates of ones on parameters of ones."""
    ones = jax.tree.map(jnp.ones_like, some_params())
    decay = add_weight_decay(
        default, [DecayRule(pattern=pattern, weight_decay=rate) for pattern, rate in rules]
    )
    updates, _ = decay.update(jax.tree.map(jnp.zeros_like, ones), decay.init(ones), ones)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): round(float(leaf.max()), 6)
        for path, leaf in jax.tree.leaves_with_path(updates)
    }


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], (0.5, 0.5, 0.5)),
        ([("*/bias", 0.0)], (0.0, 0.5, 0.5)),
        ([("conv_0/*", 0.25), ("*/bias", 0.0)], (0.0, 0.25, 0.5)),
        ([("*/bias", 0.0), ("conv_0/*", 0.25)], (0.25, 0.25, 0.5)),
        ([("*", 0.0), ("dense_[0-9]/kernel", 0.125)], (0.0, 0.0, 0.125)),
        ([("*nel", 0.25)], (0.5, 0.25, 0.25)),
        ([("conv_0", 0.25)], (0.25, 0.25, 0.5)),
        ([("*_0", 0.0), ("dense_*", 0.25)], (0.0, 0.0, 0.25)),
    ],
)
def test_last_matching_rule_sets_the_decay(rules, expected):
    names = ("conv_0/bias", "conv_0/kernel", "dense_0/kernel")
    assert decay_rates(0.5, *rules) == dict(zip(names, expected, strict=True))


def test_decay_rules_of_a_spec_reach_the_optimizer():
    spec = Sgd.model_validate(
        {
            "lr": LR,
            "weight_decay": 0.5,
            "decay_rules": [{"pattern": "*/bias", "weight_decay": 0.0}],
        }
    )
    params = some_params()
    direction, _ = spec.build().update(params, spec.build().init(params), params)
    np.testing.assert_array_equal(direction["conv_0"]["bias"], params["conv_0"]["bias"])
    np.testing.assert_allclose(direction["conv_0"]["kernel"], 1.5 * params["conv_0"]["kernel"])


@pytest.mark.parametrize("spec", [pair[0] for pair in SAME_AS_OPTAX.values()])
def test_pattern_without_a_match_is_refused_at_init(spec):
    rules = (
        DecayRule(pattern="*/kernel", weight_decay=0.0),
        DecayRule(pattern="bias", weight_decay=0.0),
    )
    optimizer = spec.model_copy(update={"decay_rules": rules}).build()
    message = (
        r"decay_rules: pattern 'bias' matches none of the 3 parameters in conv_0 \(2\), dense_0, "
        "such as conv_0/bias$"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.init(some_params())


def test_unmatched_pattern_error_lists_the_scopes():
    decay = add_weight_decay(0.1, [DecayRule(pattern="x", weight_decay=0.0)])
    with pytest.raises(ValueError, match=r"parameters in a, b, c, d, e, f, such as a$"):
        decay.init({name: jnp.zeros(1) for name in "abcdef"})


def test_update_without_parameters_is_refused():
    decay = add_weight_decay(0.1, [])
    with pytest.raises(ValueError, match="weight decay needs the parameters"):
        decay.update(some_params(), decay.init(some_params()))


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        (Momentum, "momentum", 1.0),
        (Adam, "b1", 1.0),
        (AdamW, "b2", -0.1),
        (Adam, "eps", 0.0),
        (Sgd, "lr", 0.0),
        (Sgd, "weight_decay", -1e-4),
    ],
)
def test_values_out_of_range_are_refused(spec, field, value):
    good = OmegaConf.to_container(
        OmegaConf.load(CONF / f"{spec.model_fields['name'].default}.yaml")
    )
    with pytest.raises(ValidationError, match=field):
        spec.model_validate(good | {field: value})
