"""Intervals of final values and the pruner `estimate`, on runs of held-out families of recipes.

    python -m benchmarks.estimates train RUNS      # about 12 minutes of processor time
    python -m benchmarks.estimates table RUNS      # writes the shipped table, from fit families
    python -m benchmarks.estimates score RUNS --side fit
    python -m benchmarks.estimates score RUNS --side held_out --save
    python -m benchmarks.estimates score RUNS text_gpt --side held_out --methods estimate --sweeps 0

benchmarks/curve_families.py has the families.
"""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.curve_families import FAMILIES, Side, choose_side, train
from benchmarks.measure import add_save, heading, publish, table
from pipeline.engine.monitors.log_lines import EVALS, finite_number, read_last_line
from pipeline.study.final_value.learning_curves import (
    EPSILON,
    MIN_POINTS,
    POINTS,
    TABLE,
    LearningCurve,
    extrapolate,
    find_highest_chance,
    read_curve,
    read_shipped_curves,
)
from pipeline.study.final_value.run_estimate import ENOUGH_CURVES
from pipeline.study.runs.ranking import TRAIN_LOSS, main_metric

Kind = Literal["evaluation", "training"]
SHARES = (0.1, 0.25, 0.5)
QUANTILES = np.array([0.1, 0.5, 0.9])
NUM_SWEEPS = 100
SWEEP_JOBS = 16
CHANCE = 0.05
"""Default of the pruner."""
KINDS: Sequence[Kind] = ("evaluation", "training")


@dataclass(frozen=True)
class FamilyCurve:
    """A curve of a run, with its family and job."""

    family: str
    job: str
    metric: str
    curve: LearningCurve


def read_family_curves(
    root: Path, side: Side, kind: Kind, names: Sequence[str] = ()
) -> list[FamilyCurve]:
    """Read the curves of all runs of a side that are done; of families `names`, or of all.

    Of an evaluation it is the metric that the estimate watches by default.
    """
    curves = []
    for family in FAMILIES:
        if choose_side(family) != side or (names and family not in names):
            continue
        for run_dir in sorted((root / family).glob("*/*/summary.json")):
            metric = TRAIN_LOSS if kind == "training" else find_metric(run_dir.parent)
            curve = read_curve(run_dir.parent, metric, family)
            if curve is not None:
                job = "/".join(run_dir.parts[-3:-1])
                curves.append(FamilyCurve(family, job, metric, curve))
    return curves


def find_metric(run_dir: Path) -> str:
    """Return the metric that the estimate watches by default."""
    line = read_last_line(run_dir / EVALS)
    numbers = {} if line is None else {n: finite_number(v) for n, v in line.fields.items()}
    return main_metric([{n: v for n, v in numbers.items() if v is not None}]) or TRAIN_LOSS


def write_table(root: Path) -> None:
    """Write the shipped table: a row for each run of a fit family, at 40 even shares."""
    columns: dict[str, Any] = {}
    shares = np.arange(1, POINTS + 1) / POINTS
    for kind in KINDS:
        curves = read_family_curves(root, "fit", kind)
        rows = [np.interp(shares, each.curve.shares, each.curve.errors) for each in curves]
        columns[kind] = np.array(rows).astype(np.float16)
        columns[f"{kind}_families"] = np.array([each.family for each in curves])
    np.savez_compressed(TABLE, **columns)
    print(f"{TABLE}: {TABLE.stat().st_size:,} bytes, {len(columns['evaluation'])} runs")


def read_table(without: str | None) -> list[LearningCurve]:
    """Return the shipped curves of evaluations, but for one family."""
    return [curve for curve in read_shipped_curves("evaluation") if curve.group != without]


def score_intervals(
    curves: Sequence[FamilyCurve], kind: Kind, methods: Sequence[str]
) -> list[list[str]]:
    """Return a row for each method and share: coverage, its range over families, width, loss."""
    rows = []
    shipped = read_shipped_curves(kind)
    for name in methods:
        method = METHODS[name]
        for share in SHARES:
            hits: dict[str, list[bool]] = {}
            widths, losses = [], []
            for each in curves:
                is_known = each.curve.shares <= share + 1e-9
                if is_known.sum() < MIN_POINTS or not method.serves(each.metric):
                    continue
                table = [curve for curve in shipped if curve.group != each.family]
                quantiles = method.predict(
                    each.curve.shares[is_known], each.curve.errors[is_known], table
                )
                final = each.curve.errors[-1]
                hits.setdefault(each.family, []).append(bool(quantiles[0] <= final <= quantiles[2]))
                widths.append(quantiles[2] - quantiles[0])
                excess = final - quantiles
                losses.append(
                    float(np.maximum(QUANTILES * excess, (QUANTILES - 1) * excess).mean())
                )
            if not hits:
                continue
            by_family = [float(np.mean(each)) for each in hits.values()]
            rows.append(
                [
                    name,
                    f"{share:.0%}",
                    str(len(losses)),
                    f"{np.mean([hit for each in hits.values() for hit in each]):.1%}",
                    f"{min(by_family):.0%} to {max(by_family):.0%}",
                    f"{np.exp(np.median(widths)):.2f}x",
                    f"{np.mean(losses):.3f}",
                ]
            )
            print(rows[-1], flush=True)
    return rows


def predict_by_estimate(
    shares: np.ndarray, errors: np.ndarray, table: Sequence[LearningCurve]
) -> np.ndarray:
    """Return the quantiles of the estimate."""
    final = extrapolate(shares, errors, table)
    return np.array([final.quantile(float(share)) for share in QUANTILES])


def predict_by_last(
    shares: np.ndarray, errors: np.ndarray, table: Sequence[LearningCurve]
) -> np.ndarray:
    """Return the last error plus quantiles of how the table's curves go on from the same share."""
    falls = [c.errors[-1] - np.interp(shares[-1], c.shares, c.errors) for c in table]
    return errors[-1] + np.quantile(falls, QUANTILES)


def predict_by_power_law(
    shares: np.ndarray, errors: np.ndarray, table: Sequence[LearningCurve]
) -> np.ndarray:
    """Return POW3, c + a x^-alpha, by least squares, plus quantiles of its errors on the table."""

    def fit(values: np.ndarray) -> float:
        best = (np.inf, float(np.log(values[-1])))
        for alpha in np.arange(0.05, 3.01, 0.05):
            design = np.stack([np.ones_like(shares), shares**-alpha], axis=1)
            (c, a), *_ = np.linalg.lstsq(design, values, rcond=None)
            residual = float(np.sum((design @ (c, a) - values) ** 2))
            if residual < best[0] and c + a > 0:
                best = (residual, float(np.log(c + a)))
        return best[1]

    misses = [c.errors[-1] - fit(np.exp(np.interp(shares, c.shares, c.errors))) for c in table[::4]]
    return fit(np.exp(errors)) + np.quantile(misses, QUANTILES)


def predict_by_prior(
    shares: np.ndarray, errors: np.ndarray, table: Sequence[LearningCurve]
) -> np.ndarray:
    """Return quantiles of the posterior under LC-PFN's prior, by importance sampling.

    The prior (Adriaensen et al. 2023, arXiv 2310.20447, and its code): a sum of pow3, ilog2 and
    Janoschek curves with uniform weights, rising and within [0, 1], with normal noise. LC-PFN
    approximates this posterior by a network whose weights aren't in its package.
    """
    curves, deviations = sample_prior()
    x = np.clip(np.round(shares * POINTS).astype(int) - 1, 0, POINTS - 1)
    values = 1 + EPSILON - np.exp(errors)
    misses = (curves[:, x] - values) / deviations[:, None]
    logarithms = -0.5 * np.sum(misses**2, axis=1) - len(x) * np.log(deviations)
    weights = np.exp(logarithms - logarithms.max())
    rng = np.random.default_rng(0)
    drawn = rng.choice(len(curves), 4000, p=weights / weights.sum())
    noise = deviations[drawn] * rng.standard_normal(len(drawn))
    last = np.clip(curves[drawn, -1] + noise, 0, 1)
    return np.quantile(np.log(1 + EPSILON - last), QUANTILES)


@cache
def sample_prior(count: int = 400_000) -> tuple[np.ndarray, np.ndarray]:
    """Return curves of the prior, float (m, 40), and deviations of their noise, float (m,)."""
    rng = np.random.default_rng(0)
    x = np.arange(1, POINTS + 1)[None]

    def normal(mean: float, deviation: float) -> np.ndarray:
        return rng.normal(mean, deviation, (count, 1))

    def uniform(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, (count, 1))

    pow3 = uniform(0, 1.25) - uniform(-0.6, 0.6) * x ** -np.exp(normal(0, 2))
    ilog2 = uniform(0, 1) - uniform(-0.5, 0.5) / np.log(x + 1)
    a, b = uniform(0, 1), uniform(0, 2)
    growth = np.exp(-np.exp(normal(-2, 1)) * x ** np.exp(normal(0, 0.5)))
    janoschek = a - (a - b) * growth
    weights = rng.uniform(0, 1, (3, count, 1))
    curves = weights[0] * pow3 + weights[1] * ilog2 + weights[2] * janoschek
    is_valid = (curves[:, -1] > curves[:, 0]) & (curves.min(1) >= 0) & (curves.max(1) <= 1)
    deviations = np.exp(rng.normal(-4, 1, count))
    return curves[is_valid].astype(np.float32), deviations[is_valid]


@dataclass(frozen=True)
class Method:
    """A way to extrapolate."""

    predict: Callable[[np.ndarray, np.ndarray, Sequence[LearningCurve]], np.ndarray]
    metrics: tuple[str, ...] = ()
    """Metrics that it is for; empty for all."""

    def serves(self, metric: str) -> bool:
        return not self.metrics or metric in self.metrics


METHODS: Mapping[str, Method] = {
    "estimate": Method(predict_by_estimate),
    "last value": Method(predict_by_last),
    "power law": Method(predict_by_power_law),
    "LC-PFN's prior": Method(predict_by_prior, ("accuracy",)),
    "estimate, same runs": Method(predict_by_estimate, ("accuracy",)),
}


def draw_sweeps(
    root: Path, side: Side, count: int, names: Sequence[str] = ()
) -> list[list[FamilyCurve]]:
    """Draw sweeps of 16 jobs of a family in random order, as many of each family.

    Of families `names`, or of all.
    """
    curves = read_family_curves(root, side, "evaluation", names)
    families = {each.family: [c for c in curves if c.family == each.family] for each in curves}
    rng = np.random.default_rng(0)
    return [
        [jobs[i] for i in rng.permutation(len(jobs))[:SWEEP_JOBS]]
        for _ in range(-(-count // len(families)))
        for jobs in families.values()
    ][:count]


def run_with_estimate(jobs: Sequence[FamilyCurve], least_chance: float) -> list[float]:
    """Return the share of its steps that each job of a sweep trains, with the pruner `estimate`."""
    table = read_table(without=jobs[0].family)
    trained = []
    done: list[LearningCurve] = []
    for number, job in enumerate(jobs):
        curve = job.curve
        share = 1.0
        for count in range(MIN_POINTS, len(curve.shares)):
            if len(done) < ENOUGH_CURVES:
                break
            known = curve.shares[:count], curve.errors[:count]
            best = min(float(each.errors[-1]) for each in done)
            chance = find_highest_chance(*known, table, done, best, least_chance)
            if chance is not None and chance < least_chance:
                share = float(curve.shares[count - 1])
                break
        if share == 1.0:
            done.append(replace(curve, group=f"job {number}"))
        trained.append(share)
    return trained


def run_with_optuna(jobs: Sequence[FamilyCurve], make: Callable[[], Any]) -> list[float]:
    """Return the share of its steps that each job trains, with a pruner of Optuna."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize", pruner=make())
    trained = []
    for job in jobs:
        trial = study.ask()
        share = 1.0
        for at, error in zip(job.curve.shares, job.curve.errors, strict=True):
            trial.report(float(error), max(1, round(POINTS * float(at))))
            if at < 1 and trial.should_prune():
                share = float(at)
                break
        if share == 1.0:
            study.tell(trial, float(job.curve.errors[-1]))
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        trained.append(share)
    return trained


def score_pruners(
    sweeps: Sequence[Sequence[FamilyCurve]], chances: Sequence[float]
) -> list[list[str]]:
    """Return a row for each pruner: cost of the sweeps, winners lost, and how much was lost."""
    import optuna

    pruners: dict[str, Callable[[Sequence[FamilyCurve]], list[float]]] = {
        f"estimate, chance {chance}": partial(run_with_estimate, least_chance=chance)
        for chance in chances
    }
    pruners["median"] = partial(
        run_with_optuna,
        make=lambda: optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=POINTS // 4),
    )
    pruners["asha"] = partial(
        run_with_optuna, make=lambda: optuna.pruners.SuccessiveHalvingPruner()
    )
    rows = []
    for name, run in pruners.items():
        costs, lost = [], []
        for jobs in sweeps:
            trained = run(jobs)
            finals = np.array([job.curve.errors[-1] for job in jobs])
            is_done = np.array(trained) == 1.0
            costs.append(float(np.mean(trained)))
            lost.append(float(finals[is_done].min() - finals.min()))
        is_lost = np.array(lost) > 0
        worst = f"{np.exp(max(lost)):.2f}x"
        rows.append([name, f"{np.mean(costs):.0%}", f"{is_lost.sum()} of {len(sweeps)}", worst])
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Train runs, write the table, or score."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("train", "table", "score"))
    parser.add_argument("root", type=Path)
    parser.add_argument("names", nargs="*", help="families to train or score; all without one")
    parser.add_argument("--side", choices=("fit", "held_out"), default="fit")
    parser.add_argument("--chances", type=float, nargs="*", default=[CHANCE])
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sweeps", type=int, default=NUM_SWEEPS, help="sweeps of the pruners")
    add_save(parser, "estimates.md")
    args = parser.parse_args()
    if args.action == "train":
        train(args.root, args.names)
    elif args.action == "table":
        write_table(args.root)
    else:
        score(args)


def score(args: argparse.Namespace) -> None:
    """Print, and publish if `args.save` is set, the tables of a side."""
    root, side = args.root, args.side
    words = ["python -m benchmarks.estimates score RUNS", *args.names, f"--side {side}"]
    if args.methods != list(METHODS):
        words.append(f"--methods {shlex.join(args.methods)}")
    if args.sweeps != NUM_SWEEPS:
        words.append(f"--sweeps {args.sweeps}")
    command = " ".join(words)
    parts = [heading("Estimates", command, ["jax", "numpy", "optuna"])]
    titles = ["method", "of the steps", "runs", "in 80 %", "by family", "width", "loss"]
    for kind in KINDS:
        curves = read_family_curves(root, side, kind, args.names)
        counts = Counter(each.family for each in curves)
        runs = ", ".join(f"{name} {count}" for name, count in counts.items())
        rows = score_intervals(curves, kind, args.methods)
        parts += [f"Curves: {kind}. Runs: {runs}.", "", table(titles, rows), ""]
    if args.sweeps:
        titles = ["pruner", "cost", "winners lost", "worst error"]
        sweeps = draw_sweeps(root, side, args.sweeps, args.names)
        parts.append(table(titles, score_pruners(sweeps, args.chances)))
    publish("\n".join(parts), args.save)


if __name__ == "__main__":
    main()
