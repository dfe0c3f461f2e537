from __future__ import annotations

import pytest

optuna = pytest.importorskip("optuna", reason="pip install -e '.[dev]' brings Optuna")

from optuna.distributions import (  # noqa: E402
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from pipeline.core.errors import RecipeError  # noqa: E402
from pipeline.study.sweep.space import read_space, to_overrides, vary_one_at_a_time  # noqa: E402


@pytest.mark.parametrize(
    ("override", "distribution"),
    [
        ("lr=interval(0.001,0.1)", FloatDistribution(0.001, 0.1)),
        ("lr=tag(log,interval(0.001,0.1))", FloatDistribution(0.001, 0.1, log=True)),
        ("n=int(interval(1,100))", IntDistribution(1, 100)),
        ("n=tag(log,int(interval(1,100)))", IntDistribution(1, 100, log=True)),
        ("n=int(interval(1.5,4.5))", IntDistribution(1, 4)),
        ("n=range(1,10,3)", IntDistribution(1, 7, step=3)),
        ("n=range(10,1,-3)", IntDistribution(4, 10, step=3)),
        ("x=range(0.5,2,0.5)", FloatDistribution(0.5, 1.5, step=0.5)),
        ("n=shuffle(range(0,3))", CategoricalDistribution(["0", "1", "2"])),
        ("model=lenet5,mlp", CategoricalDistribution(["lenet5", "mlp"])),
        ("x='a b',null,[1,2]", CategoricalDistribution(["'a b'", "null", "[1,2]"])),
    ],
)
def test_sweeps_are_converted_to_optuna_distributions(
    override: str, distribution: BaseDistribution
) -> None:
    """A range ends before its stop, as everywhere in Hydra."""
    space, fixed = read_space(["seed=1", override, "+new=2"])
    if isinstance(distribution, CategoricalDistribution) and "shuffle" in override:
        (found,) = space.values()
        assert isinstance(found, CategoricalDistribution)
        assert sorted(found.choices) == list(distribution.choices)
    else:
        assert list(space.values()) == [distribution]
    assert fixed == ["seed=1", "+new=2"]


def test_values_become_overrides_in_hydra_syntax() -> None:
    space, _ = read_space(["a=interval(1e-9,1.0)", "b=range(0,4)", "c=choice('x,y',z)"])
    assert to_overrides(vary_one_at_a_time(space)[0]) == ["a=1e-09", "b=0", r"c=x\,y"]


def test_choices_are_checked_one_at_a_time_before_a_study() -> None:
    space, _ = read_space(["a=interval(0.5,1.0)", "b=1,2,3", "c=x,y"])
    assert [to_overrides(values) for values in vary_one_at_a_time(space)] == [
        ["a=0.5", "b=1", "c=x"],
        ["a=0.5", "b=2", "c=x"],
        ["a=0.5", "b=3", "c=x"],
        ["a=0.5", "b=1", "c=y"],
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1"], "hydra/sweeper = optuna: must have a key to search, such as"),
        (["n=range(3,3)"], "n=range(3,3): the range has no values"),
        (["x=interval(2.0,1.0)"], "x=interval(2.0,1.0): "),
        (["x=tag(log,interval(0,1.0))"], "x=tag(log,interval(0,1.0)): "),
    ],
)
def test_invalid_space_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_space(overrides)
    assert message in str(caught.value)
