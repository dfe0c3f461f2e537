"""Custom code is called with what it has parameters for, and its errors name its line."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from pipeline.models.imported.calls import (
    UserCodeError,
    blame,
    call_with,
    list_parameters,
    make_with,
    require_callable_with,
)


class Network:
    def __init__(self, width: int, num_classes: int = 2, dtype: Any = None) -> None:
        self.values = (width, num_classes, dtype)


@pytest.mark.medium
def test_class_is_constructed_with_its_parameters() -> None:
    network = make_with("nets:Network", Network, {"width": 3}, 10, "float16", seed=1)
    assert network.values == (3, 10, jnp.float16)
    assert list_parameters(Network) == ["width", "num_classes", "dtype"]


@pytest.mark.medium
def test_recipe_arguments_take_precedence() -> None:
    arguments = {"width": 3, "num_classes": 5}
    assert make_with("n", Network, arguments, 10, "float32").values[1] == 5


@pytest.mark.parametrize("arguments", [{}, {"width": 3, "depth": 1}])
def test_wrong_argument_error_lists_the_parameters(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"nets:Network: .*; its parameters are width, num_cl"):
        make_with("nets:Network", Network, arguments, 10, "float32")


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda a, b: (a, b), (1, 2)),
        (lambda a, b, train: (a, b, train), (1, 2, True)),
        (lambda a, train, b: (a, train, b), (1, True, 2)),
        (lambda a, b, *, deterministic: (a, b, deterministic), (1, 2, False)),
        (lambda *values: values, (1, 2)),
        (lambda a, b, training, key=None: (a, b, training, key), (1, 2, True, "k")),
        (lambda a, b, **others: (a, b, others), (1, 2, {})),
    ],
)
def test_values_are_passed_by_position_and_flags_by_name(function: Any, result: Any) -> None:
    key: Any = "k"
    assert call_with(function, (1, 2), train=True, key=key) == result


def test_function_with_too_few_or_many_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter for labels"):
        require_callable_with("nets:f", lambda images: 0, ("images", "labels"))
    with pytest.raises(ValueError, match=r"nets:f: must accept images.*'other'"):
        require_callable_with("nets:f", lambda images, other: 0, ("images",))
    require_callable_with("nets:f", lambda images, train: 0, ("images",))


def test_custom_code_error_has_its_file_and_line() -> None:
    message = r"nets:f: test_calls\.py, line \d+: KeyError: 'a'"
    with pytest.raises(UserCodeError, match=message), blame("nets:f"):
        {}["a"]


def test_builtin_without_signature_has_no_parameters() -> None:
    assert list_parameters(dict.fromkeys) == [] or "iterable" in list_parameters(dict.fromkeys)
    assert "train" not in list_parameters(lambda x: x)
