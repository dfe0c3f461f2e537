from __future__ import annotations

import pytest

from pipeline.stages.measure_robustness import (
    UNBOUNDED,
    AttackRow,
    CorruptionRow,
    RobustnessReport,
)


def make_report(**accuracies: float) -> RobustnessReport:
    names = {"unbounded": UNBOUNDED}
    rows = tuple(
        AttackRow(names.get(name, name), "linf", 0.3, 40, 1, accuracy, None, None, None)
        for name, accuracy in accuracies.items()
    )
    return RobustnessReport(100, 1000, 10, 0.98, rows, (CorruptionRow("blur", {1: 0.9, 3: 0.8}),))


@pytest.mark.parametrize(
    ("accuracies", "signs"),
    [
        ({"fgsm": 0.95, "pgd": 0.92, "apgd": 0.9, "square": 0.91, "unbounded": 0.0}, []),
        ({"pgd": 0.9, "square": 0.895}, []),
        ({"pgd": 0.9, "apgd": 0.8, "square": 0.7}, ["the black box beats the white box: 0.7000"]),
        ({"fgsm": 0.5, "pgd": 0.9}, ["a single step beats many steps: 0.5000 under fgsm, 0.9000"]),
        ({"noise": 0.5, "pgd": 0.9}, ["random noise beats steps along gradients"]),
        ({"noise": 0.97, "pgd": 0.97}, ["random noise equals steps along gradients: 0.9700"]),
        ({"pgd": 0.9, "unbounded": 0.4}, ["a radius that reaches every image leaves 0.4000"]),
        ({"square": 0.1}, []),
    ],
)
def test_masked_gradient_signs_are_reported(accuracies: dict[str, float], signs: list[str]) -> None:
    found = make_report(**accuracies).masked_gradients
    assert len(found) == len(signs)
    assert all(sign in text for text, sign in zip(found, signs, strict=True))


def test_attacks_of_other_radii_are_not_compared() -> None:
    """A single step of 0.3 beats many steps of 0.01 on any network."""
    rows = tuple(
        AttackRow(name, "linf", radius, 40, 1, accuracy, None, None, None)
        for name, radius, accuracy in (
            ("pgd", 0.01, 0.9),
            ("fgsm", 0.3, 0.2),
            ("square", 0.01, 0.8),
        )
    )
    signs = RobustnessReport(100, 1000, 10, 0.98, rows, ()).masked_gradients
    assert signs == [
        "linf 0.01: the black box beats the white box: 0.8000 under square, 0.9000 under pgd"
    ]


def test_robust_accuracy_is_the_least_within_the_radius() -> None:
    report = make_report(fgsm=0.95, pgd=0.9, unbounded=0.0)
    document = report.to_document()
    assert document["robust_accuracy"] == 0.9
    assert document["corruptions"] == [{"corruption": "blur", "severity_1": 0.9, "severity_3": 0.8}]
    assert str(report.attacks[1]) == "pgd, linf 0.3, 40 steps: accuracy 0.9000"
    assert make_report(unbounded=0.0).robust_accuracy is None
