"""A part of the injections of `python -m tests.injections`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.injections import Injection, build_subject, inject, list_layers

NETWORK = "ResNet"
CASES = [
    Injection(NETWORK, "activation", "NaN", "batch_norm_0"),
    Injection(NETWORK, "activation", "Inf", "max_pool_0"),
    Injection(NETWORK, "activation", "overflow", "residual_0"),
    Injection(NETWORK, "gradient", "NaN", "global_avg_pool_0"),
    Injection(NETWORK, "gradient", "Inf", "residual_0/batch_norm_1"),
    Injection(NETWORK, "gradient", "overflow", "conv_0"),
    Injection(NETWORK, "parameter", "NaN", "residual_0/conv_1/kernel"),
    Injection(NETWORK, "parameter", "Inf", "dense_0/bias"),
    Injection(NETWORK, "parameter", "overflow", "batch_norm_0/scale"),
    Injection(NETWORK, "sample", "NaN"),
    Injection(NETWORK, "sample", "Inf"),
    Injection(NETWORK, "sample", "overflow"),
]


@pytest.mark.slow
@pytest.mark.parametrize("injection", CASES, ids=str)
def test_injected_fault_is_named(injection: Injection, cache: Path) -> None:
    verdict = inject(build_subject(injection.network, cache), injection)
    assert verdict.hit is True, verdict.text


@pytest.mark.slow
def test_injection_paths_are_layers(cache: Path) -> None:
    paths = list_layers(build_subject(NETWORK, cache))
    assert len(paths) == len(set(paths)) == 13
    assert {case.path for case in CASES if case.target in ("activation", "gradient")} < set(paths)
