"""Rules that choose lowerings and layouts for shapes that are in no bank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipeline.core.host.platforms import get_platform
from pipeline.models.lowerings.candidates import can_compute, list_candidates
from pipeline.models.lowerings.lowered_layers import FEW_FEATURES
from pipeline.models.lowerings.problem import (
    DEFAULT,
    ConvolutionProblem,
    DenseProblem,
    Engine,
    Layout,
    Lowering,
    Problem,
    Role,
    get_compute_bytes,
)
from pipeline.models.lowerings.tune.machine import may_have_onednn

LARGE_FLOPS = 50_000_000
"""Smallest convolution that is worth a library call."""

LARGE_GROUPED_FLOPS = 2_000_000
"""Smallest grouped convolution that is worth a library call. XLA computes it value by value, 20 to
50 times as slowly."""

LARGE_DENSE_FLOPS = 100_000_000
"""Smallest product of a dense layer that is worth a library call. The weight gradient sums over the
rows of both operands, which oneDNN transposes in blocks. Microseconds (rows, inputs, features) by
XLA and by oneDNN, 2 cores of an EPYC of family 26: 2048, 256, 256: 1,901 -> 838; 2048, 1024, 256:
5,793 -> 2,665; 4096, 128, 512: 2,989 -> 1,606. In bfloat16 oneDNN computes all three products
without XLA's conversion to float32: a step of a ViT of 192 features takes 239 ms instead of 301."""

MIN_FEATURES = 16
MIN_TERMS = 64
"""Fewest features, and fewest terms of a result's sum, that fill oneDNN's vectors."""

CHUNK_BYTES = 1 << 20
"""Size of a chunk of the cotangent: about half of a core's L2 cache."""

GROUPED_IMAGES = 4
"""Images at a time for a weight gradient in groups."""

MIN_TILED = 7
"""Fewest results per side for which Winograd's tiles of 4 x 4 are full enough to be fast."""

PREFERRED: Mapping[Role, Sequence[str]] = {
    "forward": ("winograd4", "convolution"),
    "input_grad": ("winograd4", "phases", "convolution"),
    "weight_grad": ("winograd4", "convolution"),
}
POINTWISE: Mapping[Role, str] = {
    "forward": "convolution",
    "input_grad": "pointwise",
    "weight_grad": "per_tap_matmul",
}
"""Formulas by role: `PREFERRED`, of which the first that fits is chosen, and `POINTWISE`, for
kernels of one pixel."""

PATCHES_LIMIT_BYTES = 13 << 20
"""Size of the largest patches for which CHWN is chosen. They are written once and read twice in a
step, and must stay in the last-level cache. Times of a step in NHWC divided by times in CHWN, by
the network's largest patches in MB, on 2 cores with a cache of 32 MiB, float32:

    LeNet-5, batch 32    2.5   2.5 times      32, 64: 3x3, batch 64             14.5  1.0
    LeNet-5, batch 128  10.0   2.9            32, 64, 128: 3x3, 32x32, 64       18.9  1.3
    8, 16: 7x7, 32x32   12.8   1.7            64, 128: 3x3, 32x32, batch 32     18.9  0.8
    16, 32: 3x3, 32x32   9.4   1.3            16, 16: 5x5, 64x64, batch 32      52.4  0.7

In bfloat16, with patches in float32, on 2 cores of a Xeon without AMX:

    LeNet-5, batch 32    2.5   2.2 times      16, 32: 3x3, 32x32                 9.4  1.3
    LeNet-5, batch 128  10.0   2.5            32, 64: 3x3, batch 64             14.5  1.4
    8, 16: 7x7, 32x32   12.8   1.2
"""

FEW_CHANNELS = 16
"""In a custom step, CHWN is chosen for convolutions of at most this many channels. Three 3x3
convolutions of 32 channels on 16x16, batch 32, took 12.6 ms per step in NHWC and 33.5 in CHWN on
2 cores of a Xeon; with 8 channels 3.4 and 2.0 ms."""

FEW_TRACED_CHANNELS = 32
"""In a traced network, CHWN is chosen for convolutions of at most this many channels."""

_CHWN_DTYPES = frozenset(("float32", "bfloat16"))


def is_worth_a_call(problem: Problem) -> bool:
    """Return whether a problem is worth a call of oneDNN: a large convolution with enough channels,
    or a large product of a dense layer that is in bfloat16 or the gradient of the kernel."""
    if isinstance(problem, DenseProblem):
        is_suitable = problem.role == "weight_grad" or problem.dtype == "bfloat16"
        return is_suitable and problem.flops >= LARGE_DENSE_FLOPS
    if not isinstance(problem, ConvolutionProblem):
        return False
    height, width = problem.window.kernel
    if problem.window.groups > 1:
        return problem.features >= MIN_FEATURES and problem.flops >= LARGE_GROUPED_FLOPS
    is_wide = problem.features >= MIN_FEATURES and problem.channels * height * width >= MIN_TERMS
    return is_wide and problem.flops >= LARGE_FLOPS


def choose_by_rule(problem: Problem, engines: frozenset[Engine]) -> Lowering:
    """Choose by a rule that summarises the tuner's results on AVX-512 for residual networks.

    A large problem with enough channels is computed by Winograd's tiles or oneDNN's convolution,
    the gradients of a kernel of one pixel as one matrix product. Grouped convolutions and dense
    layers have separate rules. Other problems have the default.
    """
    uses_onednn = "onednn" in engines and is_worth_a_call(problem)
    if isinstance(problem, DenseProblem):
        return _choose_dense(problem, uses_onednn)
    if not isinstance(problem, ConvolutionProblem):
        return DEFAULT
    if problem.window.groups > 1:
        return _choose_grouped(problem, uses_onednn)
    if not uses_onednn:
        return DEFAULT
    if problem.window.is_pointwise:
        return Lowering(POINTWISE[problem.role], "onednn")
    # The number of images whose cotangent has about CHUNK_BYTES.
    height, width = problem.window.output_size
    image_bytes = height * width * problem.features * get_compute_bytes(problem.dtype)
    chunk = max(1, CHUNK_BYTES // image_bytes)
    calls = [call for call in list_candidates(problem, engines) if call.engine == "onednn"]
    for family in PREFERRED[problem.role]:
        if family == "winograd4" and min(height, width) < MIN_TILED:
            continue
        fitting = [call for call in calls if call.family == family]
        if fitting:
            return min(fitting, key=lambda call: abs((call.images or problem.batch) - chunk))
    return DEFAULT


def _choose_dense(problem: DenseProblem, uses_onednn: bool) -> Lowering:
    """Choose oneDNN's product if it is worth a call. Otherwise the weight gradient of many features
    in bfloat16 is computed as a product. Jax would derive the transpose of that product. XLA rounds
    it before it transposes it back, so it can't compute both at once."""
    if uses_onednn:
        return Lowering("product", "onednn")
    is_rounded = problem.dtype == "bfloat16" and problem.role == "weight_grad"
    return Lowering("product") if is_rounded and problem.features > FEW_FEATURES else DEFAULT


def _choose_grouped(problem: ConvolutionProblem, uses_onednn: bool) -> Lowering:
    """Choose oneDNN's convolution, else for a depthwise convolution a formula of this package. In
    oneDNN's weight gradient the images of a chunk are the channels of each group. So only with one
    image at a time a depthwise convolution stays depthwise."""
    is_gradient = problem.role == "weight_grad"
    if uses_onednn:
        images = 1 if problem.is_depthwise else math.gcd(problem.batch, GROUPED_IMAGES)
        return Lowering("convolution", "onednn", images if is_gradient else None)
    lowering = Lowering("grouped_as_dense", images=1) if is_gradient else Lowering("shifted_sum")
    fits = problem.is_depthwise and can_compute(problem, lowering, frozenset(("xla",)))
    return lowering if fits else DEFAULT


def choose_layout_by_rule(problems: Sequence[Problem], platform: str) -> Layout:
    """Choose the faster layout by a rule, for a network that both layouts can compute. `problems`
    are the problems of a training step in NHWC. The rule is CHWN on the CPU, for float32 and
    bfloat16, if the network has convolutions, all their patches are small, and one of them is too
    small for a call of oneDNN. Of 62 drawn networks with small patches 12 had large convolutions
    only. CHWN took 1.0 to 1.9 times as long for these, 1.6 in the median; for three of them XLA
    computed NHWC, since their sums have few terms."""
    convolutions = [problem for problem in problems if isinstance(problem, ConvolutionProblem)]
    if not has_choice(convolutions, platform):
        return "nhwc"
    are_large = all(p.features >= MIN_FEATURES and p.flops >= LARGE_FLOPS for p in convolutions)
    if are_large and may_have_onednn(platform):
        return "nhwc"
    is_small = all(_count_patches_bytes(problem) <= PATCHES_LIMIT_BYTES for problem in convolutions)
    return "chwn" if is_small and {p.dtype for p in convolutions} <= _CHWN_DTYPES else "nhwc"


def choose_step_layout_by_rule(
    problems: Sequence[Problem], platform: str, most_channels: int = FEW_CHANNELS
) -> Layout:
    """Choose the faster layout for the convolutions of traced code by a stricter rule, since other
    operations stay in NHWC. CHWN needs convolutions without groups, of at most `most_channels`
    channels."""
    convolutions = [problem for problem in problems if isinstance(problem, ConvolutionProblem)]
    has_few = all(p.channels <= most_channels and p.window.groups == 1 for p in convolutions)
    return choose_layout_by_rule(problems, platform) if has_few else "nhwc"


def has_choice(problems: Sequence[Problem], platform: str) -> bool:
    """Return whether a layout has to be chosen: on the CPU, if there are convolutions."""
    has_convolution = any(isinstance(problem, ConvolutionProblem) for problem in problems)
    return has_convolution and get_platform(platform).chooses_lowerings


def _count_patches_bytes(problem: ConvolutionProblem) -> int:
    """Return the bytes of the matrix of patches of a convolution in CHWN, in float32."""
    window = problem.window
    rows = math.prod(window.kernel) * problem.channels
    return 4 * rows * math.prod(window.output_size) * problem.batch
