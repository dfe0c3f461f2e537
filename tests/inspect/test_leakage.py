"""Audits of small runs: shadow networks, the command and its refusals.

Figures of membership against counting by hand and formulas with known answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, norm

from pipeline.cli.runs import leakage
from pipeline.config.compose import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, UsageError
from pipeline.inspect.dumps.opened_recipe import make_silent_reporter, open_recipe
from pipeline.inspect.leakage import (
    PrivacyBound,
    draw_subsets,
    plan_audit,
    rate_scores,
    score_by_shadows,
)
from pipeline.inspect.report.write_report import write_report
from tests.conftest import MLP, compose_tiny
from tests.whole_run import run

Compose = Callable[..., Recipe]
LENGTH = ("train.steps=300", "checkpoint.every_steps=300", "monitor.tensorboard=false")
SCORES = st.lists(st.integers(-5, 5), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def overfitted_run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("leaking") / "run"
    few = "+dataset.train.select=[{name: take, samples: 120}]"
    digits = [*MLP, *LENGTH, few, "model.hidden=[64]", f"cache.root={cache}"]
    run(load_recipe("lenet5_digits", digits), run_dir)
    return run_dir


def test_half_of_the_networks_keep_each_member() -> None:
    subsets = draw_subsets(7, 9, 50)
    assert (subsets.sum(axis=0) == 4).all()
    assert (draw_subsets(7, 9, 50) == subsets).all()
    assert (draw_subsets(8, 9, 50) != subsets).any()
    assert 0.3 < subsets.mean(axis=1).min() <= subsets.mean(axis=1).max() < 0.6


def test_shadow_network_trains_on_one_sample_of_each_pair(tiny: Compose) -> None:
    opened = open_recipe(tiny(*MLP))
    audit = plan_audit(opened, 1, 10)
    visited = opened.dataset.train_order.batches(0, 1).rows
    assert len(audit.members) == len(set(audit.members.tolist())) == 10
    assert np.isin(audit.members, visited).all()
    keep = np.arange(10) % 2 == 0
    train = opened.dataset.train
    split = audit.swap_samples(keep)
    for name, column in split.columns.items():
        expected = np.array(train.columns[name][:])
        held_out = opened.dataset.eval.columns[name][audit.held_out[~keep]]
        expected[audit.members[~keep]] = held_out
        assert np.array_equal(column[:], expected)
    assert len(split) == len(train)


@pytest.mark.medium
def test_shadow_networks_repeat_and_differ(tiny: Compose) -> None:
    audit = plan_audit(open_recipe(tiny(*MLP)), 6, 20)
    margins, was_trained_on = audit.train_shadows(4, make_silent_reporter())
    again, _ = audit.train_shadows(4, make_silent_reporter())
    assert np.array_equal(margins, again)
    assert len({row.tobytes() for row in margins}) == 4
    assert (was_trained_on[:, :20] != was_trained_on[:, 20:]).all()
    # The margin orders samples as the loss does: log(p / (1 - p)) against the definition.
    state = audit.opened.fresh_state()
    assert np.isfinite(audit.compute_margins(state)).all()


@pytest.mark.slow
def test_private_network_is_audited_below_its_bound(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = ("+privacy={noise: 1.0, delta: 1.0e-3}", "checkpoint.every_steps=3")
    sizes = ("dataset.train_size=200", "train.batch_size=128", "train.steps=3")
    run(compose_tiny(cache, *MLP, *private, *sizes), tmp_path / "run")
    capsys.readouterr()
    facts = leakage.main(tmp_path / "run", shadows=4, samples=40).facts
    assert facts["privacy"]["epsilon"] > 0
    assert "bounds every attack" in capsys.readouterr().out
    assert all(rate["bound"] is not None for rate in facts["attacks"])
    again = leakage.main(tmp_path / "run", shadows=4, samples=40).facts
    assert again == facts


@pytest.mark.slow
def test_overfitted_run_leaks(overfitted_run: Path, tmp_path: Path) -> None:
    facts = leakage.main(overfitted_run, shadows=8, samples=1000).facts
    assert json.loads((overfitted_run / "leakage.json").read_text()) == facts
    # Without the last, smaller batch of the first epoch.
    assert facts["pairs"] == 96
    assert min(row["auc"] for row in facts["attacks"]) > 0.65
    page = write_report([overfitted_run], tmp_path / "report").page
    assert "How well attacks recognise training samples" in page.read_text()
    only_loss = leakage.main(overfitted_run, shadows=0, samples=10).facts
    assert [row["attack"] for row in only_loss["attacks"]] == ["loss", "loss"]


@pytest.mark.slow
def test_refusals(overfitted_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be 0, or at least 4"):
        leakage.main(overfitted_run, shadows=2, samples=10)
    with pytest.raises(DataError, match="isn't a run directory"):
        leakage.main(tmp_path, shadows=0, samples=10)
    (tmp_path / "recipe.yaml").write_text((overfitted_run / "recipe.yaml").read_text())
    with pytest.raises(DataError, match="has no checkpoints"):
        leakage.main(tmp_path, shadows=0, samples=10)


@pytest.mark.medium
def test_samples_without_one_class_are_refused(cache: Path) -> None:
    opened = open_recipe(load_recipe("diabetes_mlp", [f"cache.root={cache}"]))
    with pytest.raises(RecipeError, match="must have one class for each sample"):
        plan_audit(opened, 1, 10)


@pytest.mark.medium
@given(members=SCORES, held_out=SCORES)
def test_auc_is_the_statistic_of_mann_and_whitney(members: list[int], held_out: list[int]) -> None:
    rows = rate_scores("loss", np.array(members, float), np.array(held_out, float), None)
    pairs = len(members) * len(held_out)
    assert rows
    for rate in rows:
        assert rate.auc == pytest.approx(mannwhitneyu(members, held_out).statistic / pairs)
        assert rate.false_positives == math.floor(rate.false_positive_rate * len(held_out))
        assert rate.true_positives is None


@pytest.mark.medium
@given(st.integers(100, 2500), st.integers(0, 2**20))
def test_no_threshold_within_the_false_positives_catches_more(held: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    members = generator.integers(0, 40, 200).astype(float) + 3
    held_out = generator.integers(0, 40, held).astype(float)
    rates = rate_scores("loss", members, held_out, None)
    assert any(rate.true_positives is not None for rate in rates)
    for rate in rates:
        best = max(
            int((members > threshold).sum())
            for threshold in [*np.unique(held_out), -1.0]
            if (held_out > threshold).sum() <= rate.false_positive_rate * held
        )
        if rate.true_positives is None:
            assert held * rate.false_positive_rate < 1
        else:
            assert rate.true_positives == best


def test_row_has_the_number_of_samples_of_its_rates() -> None:
    bound = PrivacyBound(math.log(3), 1e-5)
    few, enough = map(str, rate_scores("loss", np.arange(100.0) + 50, np.arange(100.0), bound))
    assert few.endswith("; 0.1% false positives are less than one, 1,000 held-out samples would do")
    assert enough.startswith("loss: AUC 0.8750 +- 0.02")
    assert enough.endswith(
        "; at 1.0% false positives (1 samples) true positives 0.5100 (51 members), "
        "at most 0.0300 by its privacy"
    )


@pytest.mark.medium
@given(st.floats(0, 5000), st.floats(0, 1e-3), st.sampled_from([0.001, 0.01]))
def test_bound_of_privacy_grows_from_guessing_to_certainty(
    epsilon: float, delta: float, rate: float
) -> None:
    limit = PrivacyBound(epsilon, delta).limit_rate(rate)
    assert rate <= limit <= 1
    assert PrivacyBound(0.0, 0.0).limit_rate(rate) == pytest.approx(rate)
    # The Gaussian mechanism of sensitivity 1 and noise 1 is (4.377, 1e-5)-private.
    exact = norm.cdf(norm.ppf(rate) + 1)
    assert exact <= PrivacyBound(4.377, 1e-5).limit_rate(rate)


@pytest.mark.parametrize("shadows", [16, 80])
def test_lira_recovers_the_ratio_of_normal_densities(shadows: int) -> None:
    generator = np.random.default_rng(3)
    samples = 400
    in_means = generator.normal(3, 2, samples)
    out_means = in_means - 1.5
    in_subset = generator.permuted(
        np.tile(np.arange(shadows)[:, None] % 2 == 0, (1, samples)), axis=0
    )
    means = np.where(in_subset, in_means, out_means)
    shadow_margins = means + generator.normal(0, 0.5, means.shape)
    is_member = np.arange(samples) % 2 == 0
    margins = np.where(is_member, in_means, out_means) + generator.normal(0, 0.5, samples)
    scores = score_by_shadows(margins, shadow_margins, in_subset)
    exact = norm.logpdf(margins, in_means, 0.5) - norm.logpdf(margins, out_means, 0.5)
    assert np.corrcoef(scores, exact)[0, 1] > 0.95
    lira = rate_scores("LiRA", scores[is_member], scores[~is_member], None)[0]
    loss = rate_scores("loss", margins[is_member], margins[~is_member], None)[0]
    assert lira.auc > 0.95 > 0.85 > loss.auc
