"""Epsilon against dp-accounting itself."""

from __future__ import annotations

import logging
import sys

import pytest

from pipeline.training.privacy.budget import Accounting

dp_accounting = pytest.importorskip("dp_accounting")
STEPS = 200


def make_accounting(
    sampling: str = "poisson", accountant: str = "rdp", **changed: float
) -> Accounting:
    rate = 256 / 60000 if sampling == "poisson" else None
    settings = {"delta": 1e-5, "rate": rate, "steps_per_epoch": 100, **changed}
    return Accounting(accountant, **settings)  # type: ignore[arg-type]


@pytest.mark.medium
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_epsilon_matches_dp_accounting(accountant: str) -> None:
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(256 / 60000, dp_accounting.GaussianDpEvent(1.1)), STEPS
    )
    package = getattr(dp_accounting, accountant)
    make = package.PLDAccountant if accountant == "pld" else package.RdpAccountant
    expected = make().compose(event).get_epsilon(1e-5)
    accounting = make_accounting(accountant=accountant)
    assert accounting.compute_epsilon(1.1, STEPS) == expected
    assert accounting.compute_epsilon(1.1, 0) == 0


def test_fixed_order_spends_more_than_poisson_sampling() -> None:
    """Planted mistake: a fixed order that is accounted for as Poisson sampling."""
    fixed = make_accounting("fixed")
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.1 / 2), 2)
    expected = dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
    assert fixed.compute_epsilon(1.1, STEPS) == expected
    assert fixed.compute_epsilon(1.1, 1) == fixed.compute_epsilon(1.1, 100)
    assert expected > 10 * make_accounting().compute_epsilon(1.1, STEPS)


@pytest.mark.medium
@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_noise_for_an_epsilon_is_minimal(accountant: str) -> None:
    accounting = make_accounting(accountant=accountant)
    noise = accounting.find_noise(0.5, STEPS)
    assert accounting.compute_epsilon(noise, STEPS) <= 0.5
    assert accounting.compute_epsilon(noise * 0.999, STEPS) > 0.5


def test_unreachable_epsilon_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no noise up to 10,000 reaches it in 200 steps"):
        make_accounting("fixed").find_noise(1e-9, STEPS)


def test_meaningless_epsilon_is_refused() -> None:
    with pytest.raises(ValueError, match="after 200 steps, which protects nothing"):
        make_accounting().require_meaningful(0.05, STEPS)


def test_missing_dp_accounting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(
        ValueError, match=r"needs dp-accounting: pip install 'recipe-pipeline\[privacy\]'"
    ):
        make_accounting()


@pytest.mark.medium
def test_orders_that_are_left_out_are_not_listed() -> None:
    """dp-accounting warns of each in this case, and other messages of absl stay."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment,method-assign]
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        make_accounting(rate=1 / 30).compute_epsilon(0.53, 30)
        assert records == []
        logger.warning("another message")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert [record.getMessage() for record in records] == ["another message"]
