"""Steps of custom loops: what a state holds, what a step returns, and that it leaves the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.engine.step_checks import check_saved_state, check_state, trace_step

STATE = {"w": jnp.ones((2,)), "n": jnp.zeros((), jnp.int32)}
BATCH = {"x": jnp.ones((3, 2))}


def step(state: Any, batch: Any) -> Any:
    loss = jnp.mean(batch["x"] @ state["w"])
    return {"w": state["w"] - 0.1 * loss, "n": state["n"] + 1}, {"loss": loss, "ok": loss > 0}


def test_traced_step_has_its_metric_names() -> None:
    assert trace_step(step, STATE, BATCH).metrics == ("loss", "ok")


def test_digest_depends_only_on_the_computation() -> None:
    same = trace_step(lambda s, b: step(s, b), STATE, BATCH).digest
    assert same == trace_step(step, STATE, BATCH).digest

    def with_constant(scale: float) -> Any:
        array = np.full((2,), scale, np.float32)
        return lambda s, b: step({**s, "w": s["w"] * array}, b)

    digests = {trace_step(with_constant(scale), STATE, BATCH).digest for scale in (1.0, 2.0)}
    assert len(digests) == 2
    assert same not in digests


def returning(state: Any = None, metrics: Any = None) -> Any:
    def changed(before: Any, batch: Any) -> Any:
        after, values = step(before, batch)
        return (
            after if state is None else state(after),
            values if metrics is None else metrics(values),
        )

    return changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda s, b: s, "returns a dict; must return"),
        (lambda s, b: (s, {}, 1), "returns a tuple of 3; must return"),
        (returning(lambda s: {"w": s["w"]}), r"state\['n'\] is missing"),
        (returning(lambda s: {**s, "m": s["w"]}), r"state\['m'\] is new"),
        (
            returning(lambda s: {**s, "w": s["w"].astype("float16")}),
            r"state\['w'\] is float16\[2\], was float32\[2\]",
        ),
        (returning(lambda s: {**s, "n": s["n"][None]}), r"is int32\[1\], was int32\[\]"),
        (returning(metrics=lambda m: m["loss"]), "as metrics; must be a dictionary of scalars"),
        (returning(metrics=lambda m: {}), "returns no metrics"),
        (returning(metrics=lambda m: {"step": m["loss"]}), "must be text other than step, epoch"),
        (returning(metrics=lambda m: {"sink": m["loss"]}), "must be text other than step, epoch"),
        (returning(metrics=lambda m: {1: m["loss"]}), "a metric is named 1"),
        (returning(metrics=lambda m: {"a": jnp.ones(2)}), r"'a' is float32\[2\]; must be a real"),
        (returning(metrics=lambda m: {"a": m["loss"] * 1j}), "must be a real scalar"),
    ],
)
def test_invalid_step_results_are_refused(changed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace_step(changed, STATE, BATCH)


def test_host_call_is_refused_with_its_line() -> None:
    def prints(state: Any, batch: Any) -> Any:
        jax.debug.print("{}", state["n"])
        return step(state, batch)

    with pytest.raises(ValueError, match=r"calls the host \(.*test_step_checks\.py.*\); a sink"):
        trace_step(prints, STATE, BATCH)


@pytest.mark.parametrize(
    ("state", "message"),
    [({}, "state: has no arrays"), ({"w": "text"}, r"state\['w'\]: is a str; must be an array")],
)
def test_state_without_arrays_is_refused(state: Any, message: str) -> None:
    check_state({"w": np.ones(2), "n": 1, "x": jnp.ones(2)})
    with pytest.raises(ValueError, match=message):
        check_state(state)


def test_donated_array_is_named() -> None:
    array = jnp.ones(2)
    array.delete()
    with pytest.raises(ValueError, match=r"state\['w'\]: its memory was donated"):
        check_state({"w": array})


@pytest.mark.parametrize("name", ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"])
def test_type_of_less_than_a_byte_is_refused(name: str) -> None:
    state = {"w": jnp.zeros(2, getattr(jnp, name))}
    with pytest.raises(ValueError, match=rf"state\['w'\]: has the type {name}, which the compiled"):
        check_state(state)


@pytest.mark.parametrize("dtype", ["U1", "S1", "M8[s]", "O", [("a", "f4")]])
def test_array_of_other_things_than_numbers_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"state\['w'\]: has the type .*; must be of numbers"):
        check_state({"w": np.zeros(2, dtype)})


def test_types_that_a_loop_can_carry_are_accepted() -> None:
    """A refused type raises ValueError."""
    names = ("bool", "int8", "uint16", "bfloat16", "float8_e4m3fn", "complex64")
    check_state({name: jnp.zeros(2, name) for name in names} | {"key": jax.random.key(0)})


def test_saved_array_of_size_0_is_refused() -> None:
    state = {"w": np.ones(2), "n": 1, "empty": np.zeros((0, 3))}
    check_state(state)
    with pytest.raises(ValueError, match=r"state\['empty'\]: has the shape \(0, 3\), and a checkp"):
        check_saved_state(state)
