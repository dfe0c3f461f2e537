"""The rule for shapes that no bank knows."""

from __future__ import annotations

import pytest

from pipeline.backends.autotune.rule import LARGE_FLOPS, usual_lowering
from pipeline.models.lowerings.candidates import candidates
from pipeline.models.lowerings.lowering import DEFAULT, ROLES, Role
from tests.backends.autotune.made_up import BOTH, XLA, convolution


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("stride", [1, 2])
def test_candidates_alone_are_taken(role: Role, stride: int) -> None:
    for channels, size in ((3, 32), (16, 32), (64, 32), (64, 4)):
        problem = convolution(role, channels, size, stride=stride, batch=64)
        for engines in (XLA, BOTH):
            way = usual_lowering(problem, engines)
            assert way == DEFAULT or way in candidates(problem, engines)


@pytest.mark.parametrize("role", ROLES)
def test_onednn_is_for_what_is_large_and_has_channels(role: Role) -> None:
    large = convolution(role, channels=32, size=32, batch=16)
    small = convolution(role, channels=32, size=4, batch=1)
    narrow = convolution(role, channels=8, size=64, batch=64)
    assert small.flops < LARGE_FLOPS < min(large.flops, narrow.flops)
    assert usual_lowering(large, BOTH).engine == "onednn"
    assert usual_lowering(large, XLA) == DEFAULT
    assert usual_lowering(small, BOTH) == usual_lowering(narrow, BOTH) == DEFAULT


def test_strided_gradients_are_taken_apart_into_phases() -> None:
    for stride, family in ((1, "convolution"), (2, "phases")):
        problem = convolution("images_gradient", 64, 32, stride=stride, batch=32)
        assert usual_lowering(problem, BOTH).family == family


def test_the_kernels_gradient_looks_at_what_fits_into_the_cache() -> None:
    """32x32 of 64 features are 256 KiB: four images make up half of a core's cache."""
    problem = convolution("kernel_gradient", 64, 32, batch=64)
    assert str(usual_lowering(problem, BOTH)) == "convolution/onednn/4"
