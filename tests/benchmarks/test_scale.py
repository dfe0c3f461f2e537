"""What `benchmarks.scale` and `benchmarks.recommend` print, from made-up costs."""

from __future__ import annotations

import sys

import pytest

from benchmarks import recommend, scale
from benchmarks.scale import Row, exponent


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_exponent_matches_a_power_law(power: float) -> None:
    sizes = (10, 100, 1000)
    assert exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)


def test_scale_row_has_costs_and_growth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("squares", (10, 1000), lambda size: size**2 / 1e6, "none")
    monkeypatch.setattr(scale, "ROWS", {"squares": row})
    monkeypatch.setattr(sys, "argv", ["scale"])
    scale.main()
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == "| squares | 10: 0.000 s, 1,000: 1.000 s | 2.00 | none |"


@pytest.mark.medium
def test_scale_rows_run_at_small_sizes() -> None:
    assert scale.write_tables(3) > 0
    assert scale.find_resumed_run(2) > 0
    assert scale.open_resumed_log(10_000) > 0


def test_trials_are_counted_until_the_loss_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 0.5, 1.0])
    monkeypatch.setattr(recommend, "compute_loss", lambda params: next(losses))
    assert recommend.count_trials("random", 0, goal=0.5) == 3


def test_medians_are_compared_with_random_search() -> None:
    text = recommend.report({"tpe": [2, 3, 10], "random": [6, 9, 30]}, 0.25, "command")
    assert "| tpe | 3 | 2 to 10 | 0.33 |" in text
    assert "Trials until an evaluation loss of 0.2500." in text
