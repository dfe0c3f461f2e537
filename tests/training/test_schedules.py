"""Learning-rate tables against closed forms, optax and the documents' numbers (L-04, L-05)."""

import math
from pathlib import Path

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import ValidationError

from pipeline.training.phased_schedules import (
    CosineLog,
    CosineRestarts,
    OneCycle,
    WarmupStableDecay,
)
from pipeline.training.schedules import (
    ConstantSchedule,
    Cosine,
    Exponential,
    LinearCosine,
    Piecewise,
    Polynomial,
    WarmupDecay,
)

CONF = Path(__file__).parents[2] / "conf" / "schedule"
SPECS = (
    *(ConstantSchedule, Piecewise, Exponential, Polynomial, Cosine, LinearCosine),
    *(CosineRestarts, WarmupStableDecay, OneCycle, CosineLog),
)
NO_WARMUP = {"warmup_steps": 0, "warmup_epochs": 0.0}
LR, SPAN, STEPS_PER_EPOCH = 0.1, 2000, 40
FLOAT32 = 3e-7

PIECEWISE = {"milestones": (100, 1500), "factors": (0.3, 0.01)}
EXPONENTIAL = {"decay_rate": 0.94, "decay_steps": 150, "decay_epochs": 0.0, "staircase": False}

RESTARTS = {"period_steps": 300, "period_epochs": 0.0, "growth": 1, "end_factor": 0.1}


def fall_over(share: float) -> float:
    """Half a cosine from 1 to 0.1."""
    return 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2


def restarted_share(t: int) -> float:
    """The share of a period, for periods of 300, 600, 1200, ..."""
    begin = next(begin for begin in (2100, 900, 300, 0) if t >= begin)
    return (t - begin) / (begin + 300)


DECAYS = {
    "restarts": (CosineRestarts, RESTARTS, lambda t: fall_over(t % 300 / 300)),
    "growing restarts": (
        CosineRestarts,
        RESTARTS | {"growth": 2},
        lambda t: fall_over(restarted_share(t)),
    ),
    "restarts in epochs": (
        CosineRestarts,
        RESTARTS | {"period_steps": 0, "period_epochs": 7.5},
        lambda t: fall_over(t % 300 / 300),
    ),
    "constant": (ConstantSchedule, {}, lambda _: 1.0),
    "piecewise": (
        Piecewise,
        PIECEWISE,
        lambda t: 1.0 if t < 100 else 0.3 if t < 1500 else 0.01,
    ),
    "exponential": (Exponential, EXPONENTIAL, lambda t: 0.94 ** (t / 150)),
    "exponential in epochs": (
        Exponential,
        EXPONENTIAL | {"decay_steps": 0, "decay_epochs": 2.5},
        lambda t: 0.94 ** (t / 100),
    ),
    "staircase": (
        Exponential,
        EXPONENTIAL | {"staircase": True},
        lambda t: 0.94 ** math.floor(t / 150),
    ),
    "polynomial": (
        Polynomial,
        {"end_factor": 0.02, "power": 2.0},
        lambda t: 0.98 * (1 - t / SPAN) ** 2 + 0.02,
    ),
    "cosine": (Cosine, {"end_factor": 0.0}, lambda t: (1 + math.cos(math.pi * t / SPAN)) / 2),
    "cosine to a floor": (
        Cosine,
        {"end_factor": 0.25},
        lambda t: 0.25 + 0.75 * (1 + math.cos(math.pi * t / SPAN)) / 2,
    ),
}

OPTAX = {
    "constant": optax.constant_schedule(LR),
    "piecewise": optax.piecewise_constant_schedule(LR, {100: 0.3, 1500: 0.01 / 0.3}),
    "exponential": optax.exponential_decay(LR, 150, 0.94),
    "staircase": optax.exponential_decay(LR, 150, 0.94, staircase=True),
    "polynomial": optax.polynomial_schedule(LR, LR * 0.02, 2, SPAN),
    "cosine": optax.cosine_decay_schedule(LR, SPAN),
    "cosine to a floor": optax.cosine_decay_schedule(LR, SPAN, alpha=0.25),
}


def written(name):
    return OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))


@pytest.mark.parametrize("spec", SPECS)
def test_conf_has_every_key_of_the_spec(spec):
    name = spec.model_fields["name"].default
    assert written(name).keys() == spec.model_fields.keys()
    assert (CONF / f"{name}.yaml").read_text().startswith("# @package train.schedule\n")


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec is not Piecewise])
def test_conf_defaults_are_valid(spec):
    """And are those of a schedule within a rule, which conf does not fill in."""
    values = written(spec.model_fields["name"].default)
    assert spec.model_validate(values).model_dump() == values == spec().model_dump()


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("warmup", [0, 30])
def test_tables_match_closed_forms_to_float32(name, warmup):
    spec, fields, factor = DECAYS[name]
    schedule = spec(**fields, warmup_steps=warmup, warmup_epochs=0.0)
    table = schedule.table(LR, SPAN + warmup, STEPS_PER_EPOCH)
    ramp = [LR * (i + 1) / warmup for i in range(warmup)]
    assert table.dtype == np.float32
    assert table.shape == (SPAN + warmup,)
    np.testing.assert_allclose(table, [*ramp, *(LR * factor(t) for t in range(SPAN))], rtol=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTAX)
def test_tables_match_optax(name):
    spec, fields, _ = DECAYS[name]
    table = spec(**fields, **NO_WARMUP).table(LR, SPAN, STEPS_PER_EPOCH)
    expected = np.broadcast_to(OPTAX[name](np.arange(SPAN)), SPAN)
    np.testing.assert_allclose(table, expected, atol=1e-6 * LR)


def linear_cosine(warmup_epochs):
    return LinearCosine(warmup_steps=0, warmup_epochs=warmup_epochs)


def test_linear_cosine_has_the_documented_values():
    table = linear_cosine(5.0).table(0.1, 90 * 195, 195)
    assert table[974] == np.float32(0.1)
    np.testing.assert_allclose(table[975], 0.0992485, rtol=1e-6)
    np.testing.assert_allclose(table[-1], 1.00034e-6, rtol=1e-5)
    np.testing.assert_allclose(linear_cosine(0.0).table(0.1, 1000, 195)[0], 0.100001, rtol=1e-6)


@pytest.mark.parametrize(("steps", "warmup"), [(2000, 0), (2000, 1), (2000, 120), (2000, 1999)])
def test_linear_cosine_matches_a_loop_of_the_formula(steps, warmup):
    expected = []
    for i in range(steps):
        if i < warmup:
            expected.append(0.1 * (i + 1) / warmup)
            continue
        linear = (steps - i) / (steps - warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * 2 * 0.47 * i / (steps - warmup)))
        expected.append(0.1 * (linear * cosine + 0.00001))
    schedule = LinearCosine(warmup_steps=warmup, warmup_epochs=0.0)
    np.testing.assert_allclose(schedule.table(0.1, steps, 195), expected, rtol=FLOAT32)


def test_linear_cosine_rises_again_only_after_a_long_warmup():
    def rises(warmup):
        table = LinearCosine(warmup_steps=warmup, warmup_epochs=0.0).table(0.1, 1000, 100)
        return bool((np.diff(table[warmup:]) > 0).any())

    assert [rises(warmup) for warmup in (0, 50, 500)] == [False, False, True]


@pytest.mark.medium
@given(
    st.sampled_from(sorted(DECAYS)),
    st.integers(0, 60),
    st.integers(1, 60),
    st.floats(1e-5, 10, allow_subnormal=False),
)
def test_decay_starts_after_warmup(name, warmup, span, lr):
    spec, fields, _ = DECAYS[name]
    warmed = spec(**fields, warmup_steps=warmup, warmup_epochs=0.0).table(lr, warmup + span, 40)
    cold = spec(**fields, **NO_WARMUP).table(lr, span, 40)
    np.testing.assert_array_equal(warmed[warmup:], cold)
    assert (np.diff(warmed[:warmup]) > 0).all()
    if warmup:
        assert warmed[warmup - 1] == np.float32(lr)


@pytest.mark.parametrize(("epochs", "steps"), [(2.0, 20), (0.29, 3), (0.04, 0)])
def test_warmup_in_epochs_is_rounded_to_steps(epochs, steps):
    in_epochs = ConstantSchedule(warmup_steps=0, warmup_epochs=epochs).table(LR, 50, 10)
    in_steps = ConstantSchedule(warmup_steps=steps, warmup_epochs=0.0).table(LR, 50, 10)
    np.testing.assert_array_equal(in_epochs, in_steps)


def test_decay_epochs_shorter_than_a_step_take_one_step():
    schedule = Exponential(
        **NO_WARMUP, decay_rate=0.5, decay_steps=0, decay_epochs=0.01, staircase=True
    )
    np.testing.assert_allclose(schedule.table(1.0, 4, 10), [1, 0.5, 0.25, 0.125])


@pytest.mark.parametrize("name", [*DECAYS, "linear_cosine"])
@pytest.mark.parametrize("steps", [1, 49, 50])
def test_training_ended_within_warmup_uses_part_of_the_ramp(name, steps):
    spec, fields = DECAYS[name][:2] if name in DECAYS else (LinearCosine, {})
    table = spec(**fields, warmup_steps=50, warmup_epochs=0.0).table(LR, steps, 10)
    np.testing.assert_allclose(table, [LR * (i + 1) / 50 for i in range(steps)], rtol=3e-7)


def test_warmup_in_both_units_is_refused():
    schedule = ConstantSchedule(warmup_steps=5, warmup_epochs=1.0)
    with pytest.raises(ValueError, match=r"warmup_steps = 5 and warmup_epochs = 1\.0"):
        schedule.table(LR, 50, 10)


@pytest.mark.parametrize(
    ("milestones", "factors", "words"),
    [
        ((), (), "0 milestones for 0 factors; must have at least one milestone"),
        ((10, 20), (0.1,), "2 milestones for 1 factors;"),
        ((20, 10), (0.1, 0.01), r"milestones = \[20, 10\]: must increase"),
        ((10, 10), (0.1, 0.01), "must increase"),
        ((0,), (0.1,), "greater than 0"),
        ((10,), (0.0,), "greater than 0"),
    ],
)
def test_invalid_milestones_are_refused(milestones, factors, words):
    with pytest.raises(ValidationError, match=words):
        Piecewise(**NO_WARMUP, milestones=milestones, factors=factors)


@pytest.mark.parametrize(("steps", "epochs"), [(0, 0.0), (10, 1.0)])
def test_exponential_requires_exactly_one_decay_length(steps, epochs):
    with pytest.raises(ValidationError, match="exactly one must be above 0"):
        Exponential(**NO_WARMUP, **EXPONENTIAL | {"decay_steps": steps, "decay_epochs": epochs})


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (Exponential, EXPONENTIAL | {"decay_rate": 0.0}),
        (Polynomial, {"end_factor": 1.5, "power": 1.0}),
        (Polynomial, {"end_factor": 0.0, "power": 0.0}),
        (Cosine, {"end_factor": -0.1}),
    ],
)
def test_values_out_of_range_are_refused(spec, fields):
    with pytest.raises(ValidationError, match=r"greater than|less than"):
        spec(**NO_WARMUP, **fields)


def test_schedule_describes_its_decay():
    with pytest.raises(TypeError, match=r"abstract method '?decay"):
        WarmupDecay(name="bare", **NO_WARMUP)


@pytest.mark.parametrize(
    ("shape", "share", "value"),
    [
        ("linear", 0.0, 1.0),
        ("linear", 0.25, 0.75),
        ("sqrt", 0.25, 0.5),
        ("sqrt", 0.81, 0.1),
        ("linear", 0.999, 0.001),
    ],
)
@pytest.mark.parametrize("warmup", [0, 300])
def test_cooldown_has_its_share_of_the_whole_run(shape, share, value, warmup):
    """10,000 updates, of which the last 1,000 cool down; warmup doesn't change them."""
    schedule = WarmupStableDecay(
        warmup_steps=warmup, cooldown_share=0.1, shape=shape, end_factor=0.5
    )
    table = schedule.table(LR, 10_000, STEPS_PER_EPOCH)
    assert np.all(table[warmup:9000] == np.float32(LR))
    expected = LR * (0.5 + 0.5 * value)
    np.testing.assert_allclose(table[9000 + round(1000 * share)], expected, rtol=FLOAT32)


def test_cooldown_longer_than_the_rest_begins_after_warmup():
    schedule = WarmupStableDecay(warmup_steps=8, cooldown_share=0.9, shape="linear")
    table = schedule.table(LR, 10, STEPS_PER_EPOCH)
    np.testing.assert_allclose(table[8:], [LR, LR / 2], rtol=FLOAT32)


def make_one_cycle(shape, steps, rise_share=0.3):
    """PyTorch's OneCycleLR, phase by phase."""

    def between(start, end, share):
        if shape == "linear":
            return start + (end - start) * share
        return end + (start - end) / 2 * (1 + math.cos(math.pi * share))

    peak, last = rise_share * steps - 1, steps - 1
    for step in range(steps):
        if step <= peak:
            yield LR * between(0.04, 1.0, step / peak)
        else:
            yield LR * between(1.0, 4e-6, (step - peak) / (last - peak))


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("steps", [10, 101, 2000])
def test_one_cycle_rises_and_falls_as_in_pytorch(shape, steps):
    table = OneCycle(shape=shape).table(LR, steps, STEPS_PER_EPOCH)
    np.testing.assert_allclose(table, [*make_one_cycle(shape, steps)], rtol=FLOAT32, atol=1e-12)


@pytest.mark.parametrize(("steps", "share"), [(10, 0.95), (1, 0.3), (1, 0.0)])
def test_one_cycle_ends_at_its_end_factor_after_a_short_fall(steps, share):
    table = OneCycle(rise_share=share).table(LR, steps, STEPS_PER_EPOCH)
    expected = [*make_one_cycle("cosine", steps, share)]
    assert expected[-1] == pytest.approx(4e-6 * LR)
    np.testing.assert_allclose(table, expected, rtol=FLOAT32, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_one_cycle_of_few_updates_is_finite(steps, share):
    table = OneCycle(rise_share=share).table(LR, steps, STEPS_PER_EPOCH)
    assert np.isfinite(table).all()
    assert table.max() <= np.float32(LR)


@pytest.mark.parametrize(("steps", "epochs"), [(0, 0.0), (100, 2.5)])
def test_restarts_require_exactly_one_period(steps, epochs):
    with pytest.raises(ValidationError, match="exactly one must be above 0"):
        CosineRestarts(**NO_WARMUP, period_steps=steps, period_epochs=epochs)


def test_cosine_log_golden_waves_are_those_of_realmlp() -> None:
    golden = np.load(Path(__file__).parents[1] / "golden" / "table_network.npz")["coslog4"]
    np.testing.assert_allclose(CosineLog(waves=4).table(2.0, 100, 10), 2 * golden, atol=1e-6)


@pytest.mark.parametrize("length", [{"warmup_steps": 2**31 - 1}, {"warmup_epochs": 1e30}])
def test_table_of_a_warmup_beyond_the_run_has_the_size_of_the_run(length):
    table = ConstantSchedule(**{**NO_WARMUP, **length}).table(LR, 2, STEPS_PER_EPOCH)
    warmup = length.get("warmup_steps") or 1e30 * STEPS_PER_EPOCH
    np.testing.assert_allclose(table, [LR / warmup, 2 * LR / warmup], rtol=FLOAT32)


def test_decay_of_any_number_of_epochs_is_computed():
    spec = Exponential(decay_steps=0, decay_epochs=1e30, staircase=True)
    np.testing.assert_array_equal(spec.table(LR, 3, STEPS_PER_EPOCH), np.float32([LR] * 3))


def test_more_waves_than_updates_can_show_are_refused():
    with pytest.raises(ValidationError, match="less than or equal to 64"):
        CosineLog(waves=2000)
