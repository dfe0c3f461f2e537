"""Which layer is named: faults in single layers, and clean sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.inspect.compare.layer_errors import LayerError, measure_pattern
from pipeline.inspect.dumps.dump_files import TensorName
from tests.injected_layers import (
    CleanPair,
    Fault,
    Injection,
    capture_reference,
    compare_clean,
    inject,
    measure_effect,
)

SAMPLE: list[tuple[str, str, Fault, str]] = [
    ("LeNet-5", "bfloat16", "wrong stride", "max_pool_1"),
    ("LeNet-5", "float32", "bf16 sum", "dense_1"),
    ("LeNet-5", "float32", "wrong axis", "flatten_0"),
]
LONGER: list[tuple[str, str, Fault, str]] = [
    ("ResNet", "bfloat16", "epsilon", "residual_0/batch_norm_0"),
    ("ResNet", "float32", "stale statistic", "batch_norm_0"),
    ("ResNet", "float32", "other gelu", "residual_0/gelu_0"),
    ("ViT", "bfloat16", "stale statistic", "block0/residual_1/layer_norm_0"),
    ("ViT", "float32", "bf16 sum", "block0/residual_0/self_attention_0"),
]


def assert_named(network: str, dtype: str, fault: Fault, path: str, cache: Path) -> None:
    verdict = inject(Injection(network, dtype, fault, path, ""), cache)
    assert verdict.effect > 2
    assert verdict.named == path


@pytest.mark.slow
@pytest.mark.parametrize(("network", "dtype", "fault", "path"), SAMPLE)
def test_injected_fault_is_named(
    network: str, dtype: str, fault: Fault, path: str, cache: Path
) -> None:
    assert_named(network, dtype, fault, path, cache)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "dtype", "fault", "path"), LONGER)
def test_injected_fault_in_a_deeper_network_is_named(
    network: str, dtype: str, fault: Fault, path: str, cache: Path
) -> None:
    assert_named(network, dtype, fault, path, cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    [
        CleanPair("LeNet-5", "float32", "chwn", False, 1),
        CleanPair("LeNet-5", "float32", "nhwc", True, 1),
        CleanPair("LeNet-5", "bfloat16", "nhwc", False, 1),
    ],
    ids=str,
)
def test_clean_comparison_has_no_findings(pair: CleanPair, cache: Path) -> None:
    comparison = compare_clean(pair, cache)
    assert comparison.findings == ()
    assert measure_effect(comparison, "dense_0") < 3


@pytest.mark.slow
def test_float64_reference_is_close_but_not_equal_to_float32(cache: Path) -> None:
    reference = capture_reference("LeNet-5", cache)
    wide = reference.compute_float64()
    narrow = reference.step.merge_passes()
    for path, array in wide.outputs.items():
        assert array.dtype == np.float64
        scale = float(np.abs(array).max())
        np.testing.assert_allclose(narrow.outputs[path], array, rtol=0, atol=2e-6 * scale)
    assert any(np.any(wide.outputs[p] != narrow.outputs[p]) for p in ("conv_0", "dense_0"))


def test_pattern_distinguishes_wrong_statistics_from_rounding() -> None:
    noise = np.random.default_rng(0).normal(size=(32, 64))
    assert 0.5 < measure_pattern(noise) < 2
    by_sample = noise + 3 * np.random.default_rng(1).normal(size=(32, 1))
    assert measure_pattern(by_sample) > 100
    assert measure_pattern(noise[:2, :4]) == 1.0


def test_winograd_error_is_not_a_finding() -> None:
    about = TensorName("conv_1", "input_gradient"), "conv", "float32", 8192
    assert LayerError(*about, 4.46e-7, 1e-7, 1.0, 1.0).score > 1
    assert LayerError(*about, 4.46e-7, 1e-7, 1.0, 1.0, has_winograd=True).score < 1
    assert LayerError(*about, 1e-4, 1e-7, 1.0, 1.0, has_winograd=True).score > 1
