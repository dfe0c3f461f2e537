from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from pipeline.training.robustness.attack_specs import (
    AdversarialSpec,
    AnyAttack,
    AttackSpec,
    complete_attacks,
)

TRAINED = AdversarialSpec(attack="pgd", radius=0.3)


def parse(**fields: Any) -> AnyAttack:
    adapter: TypeAdapter[AnyAttack] = TypeAdapter(AttackSpec)
    return adapter.validate_python(fields)


@pytest.mark.parametrize(
    ("fields", "steps", "size"),
    [
        ({"attack": "pgd"}, 7, 2.5 * 0.2 / 7),
        ({"attack": "pgd", "steps": 5, "step": 0.1}, 5, 0.1),
        ({"attack": "trades"}, 10, 0.05),
        ({"attack": "fgsm"}, 1, 0.25),
        ({"attack": "fgsm", "start": "image"}, 1, 0.2),
    ],
)
def test_default_steps_and_step_size(fields: dict[str, Any], steps: int, size: float) -> None:
    spec = AdversarialSpec(radius=0.2, **fields)
    assert spec.num_steps == steps
    assert spec.step_size == pytest.approx(size)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"attack": "fgsm", "steps": 2}, "steps = 2: must be 1 with attack = fgsm"),
        ({"attack": "trades", "start": "image"}, "start = image: must be random with attack"),
        ({"attack": "trades", "share": 0.5}, "share = 0.5: must be 1.0 with attack = trades"),
        ({"attack": "pgd", "beta": 2.0}, "beta = 2.0: needs attack = trades"),
    ],
)
def test_conflicting_keys_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        AdversarialSpec(radius=0.1, **fields)


@pytest.mark.parametrize(
    "fields",
    [{"attack": "apgd", "losses": ["ce", "ce"]}, {"attack": "corruptions", "severities": [1, 1]}],
)
def test_equal_losses_and_severities_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be different"):
        complete_attacks([parse(**fields)], TRAINED)


def test_norm_and_radius_default_to_training_values() -> None:
    attacks = [parse(attack="pgd"), parse(attack="fgsm", norm="l2", radius=2.0)]
    attacks.append(parse(attack="corruptions"))
    completed = complete_attacks(attacks, TRAINED)
    assert [getattr(attack, "radius", None) for attack in completed] == [0.3, 2.0, None]
    assert [getattr(attack, "norm", None) for attack in completed] == ["linf", "l2", None]


@pytest.mark.parametrize(
    ("fields", "trained", "problem"),
    [
        ({"attack": "pgd"}, None, r"0\.radius = null: must be a number above 0 without train"),
        ({"attack": "apgd", "radius": 1.5}, TRAINED, r"0\.radius = 1.5: must be at most 1, the"),
        ({"attack": "square", "norm": "l2"}, TRAINED, r"0\.norm = l2: must be linf with attack"),
        ({"attack": "pgd", "norm": "l2"}, TRAINED, r"0\.radius = null: must be .* with norm = l2"),
    ],
)
def test_invalid_attacks_are_refused(
    fields: dict[str, Any], trained: AdversarialSpec | None, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        complete_attacks([parse(**fields)], trained)
