from __future__ import annotations

import pytest

from pipeline.core.errors import RecipeError
from pipeline.data.order import SampleOrder
from pipeline.training.privacy.budget import Budget
from pipeline.training.privacy.privacy_spec import PrivacySpec
from tests.data.test_poisson_order import make_order

dp_accounting = pytest.importorskip("dp_accounting")


def make_budget(steps: int = 20, **settings: object) -> Budget:
    tree = {"noise": 2.0, "delta": 1e-3, "accountant": "rdp", **settings}
    return Budget(PrivacySpec.model_validate(tree), make_order(), steps)


@pytest.mark.medium
def test_budget_is_described() -> None:
    budget = make_budget()
    assert budget.rule.expected_batch_size == 40
    line = str(budget)
    assert "at delta 0.001 after 20 steps (rdp, add_remove); noise 2.0000 times the clip" in line
    assert "40 samples a step expected, at most 100" in line
    figures = budget.summarize(10)
    assert 0 < figures["epsilon"] < budget.compute_epsilon(20)
    assert figures["private"] is True
    assert make_budget(seed=3).summarize(0) == {**figures, "private": False, "epsilon": 0.0}


@pytest.mark.medium
def test_noise_for_an_epsilon_suffices() -> None:
    budget = make_budget(noise=None, epsilon=2.0)
    assert budget.compute_epsilon(20) <= 2.0
    assert budget.rule.adaptive is None


def test_fixed_batches_have_no_bonus_for_sampling() -> None:
    """Planted mistake: a fixed order that is accounted for as Poisson sampling."""
    order = SampleOrder(
        seed=1,
        samples=400,
        batch_size=100,
        shuffle=True,
        buffer_size=None,
        drop_remainder=True,
        repeat=1,
    )
    settings = {"sampling": "fixed", "neighbours": "replace_one", "accountant": "rdp"}
    spec = PrivacySpec.model_validate({"noise": 2.0, "delta": 1e-3, **settings})
    budget = Budget(spec, order, steps=20)
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.0), 5)
    expected = dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(1e-3)
    assert budget.compute_epsilon(20) == expected
    assert budget.rule.expected_batch_size == 100


def test_problems_begin_with_their_key() -> None:
    with pytest.raises(RecipeError, match=r"privacy.delta = 0.01: must be below 0.0025"):
        _ = make_budget(delta=0.01).noise
    with pytest.raises(RecipeError, match=r"privacy.epsilon = 1e-09: no noise"):
        _ = make_budget(noise=None, epsilon=1e-9, delta=1e-9).noise
    with pytest.raises(RecipeError, match=r"privacy.epsilon = 1000: protects nothing; .* most 100"):
        _ = make_budget(steps=1_000, noise=None, epsilon=1000.0, accountant="pld").noise
    with pytest.raises(RecipeError, match=r"privacy.noise = 0.05: epsilon would be"):
        _ = make_budget(noise=0.05).noise


@pytest.mark.slow
def test_epsilon_is_judged_by_its_accountant() -> None:
    """The bound of rdp is above the largest epsilon that is allowed."""
    budget = make_budget(steps=5, noise=None, epsilon=99.0, accountant="pld")
    assert budget.compute_epsilon(5) <= 99.0
    with pytest.raises(RecipeError, match=r"epsilon would be 1[0-9]{2} "):
        _ = make_budget(steps=5, noise=budget.noise).noise
