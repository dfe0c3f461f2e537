"""Noise on clipped sums, and a clip that follows a quantile of the norms.

The noise of a step is a pure function of (secret key, step). So a resumed run repeats the noise of
a step that it repeats, and no noise is used for two steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.data.random import Words, encrypt_threefry
from pipeline.models.modules.name_stack import UPDATE
from pipeline.training.privacy.privacy_spec import AdaptiveClip

COUNTED_SHARE = 0.05
"""Deviation of the noise on the count of samples within the clip, as a share of the expected batch
(Andrew et al. 2021, section 3.2)."""


@register_dataclass
@dataclass(frozen=True)
class PrivacyState:
    """The secret of a private run and the clip of its next step."""

    key: Array
    """uint32 (4,): two words for the noise, two for the order of samples."""
    noise: Array
    """Standard deviation of the noise divided by the clip, float32 (). NaN until it is set, so that
    a run without it fails."""
    clip: Array
    """float32 ()."""


@dataclass(frozen=True)
class PrivacyRule:
    """Settings by which a private step makes its gradients from the clipped sum."""

    expected_batch_size: int
    """Divisor of the sum. The number of drawn samples isn't public, so it can't be the divisor."""
    clip: float
    """The clip of the first step."""
    adaptive: AdaptiveClip | None = None

    def init(self) -> PrivacyState:
        """Return the state before its secret is set."""
        return PrivacyState(jnp.zeros(4, jnp.uint32), jnp.float32(np.nan), jnp.float32(self.clip))


def round_up_to_float32(noise: float) -> float:
    """Return the smallest float32 that isn't below a number."""
    rounded = np.float32(noise)
    return float(rounded if float(rounded) >= noise else np.nextafter(rounded, np.float32(np.inf)))


def split_noise(noise: float, count_noise: float) -> float:
    """Return the noise of the gradients if the count of samples within the clip has `count_noise`.

    Both together have the privacy of `noise` alone: 1 / noise^2 is the sum of 1 / gradients^2 and
    1 / (2 count_noise)^2, since a sample changes the centred count by 1/2 (Andrew et al. 2021,
    theorem 1). Raises ValueError if the count alone has less noise than that.
    """
    if 2 * count_noise <= noise:
        raise ValueError(
            f"noise = {noise:.4g}: must be below {2 * count_noise:.4g} with an adaptive clip, a "
            f"tenth of the expected batch size"
        )
    return float((noise**-2 - (2 * count_noise) ** -2) ** -0.5)


@jax.named_scope(UPDATE)
def add_noise(rule: PrivacyRule, privacy: PrivacyState, step: Array, sums: Any) -> Any:
    """Return private gradients: clipped sums, plus noise, divided by the expected batch size."""
    noise = privacy.noise
    if rule.adaptive is not None:
        count_noise = COUNTED_SHARE * rule.expected_batch_size
        noise = (noise**-2 - (2 * count_noise) ** -2) ** -0.5  # As `split_noise`.
    deviation = noise * privacy.clip
    leaves, structure = jax.tree.flatten(sums)
    noisy = [
        (leaf + deviation * draw_normals(privacy.key, step, number, leaf.size).reshape(leaf.shape))
        / rule.expected_batch_size
        for number, leaf in enumerate(leaves, 1)
    ]
    return jax.tree.unflatten(structure, noisy)


@jax.named_scope(UPDATE)
def adapt_clip(
    rule: PrivacyRule, privacy: PrivacyState, step: Array, within: Array, count: Array | int
) -> PrivacyState:
    """Return the state of the next step: the clip approaches the quantile of the norms.

    `within` of `count` samples had gradients within the clip; noise is added to their share.
    """
    if rule.adaptive is None:
        return privacy
    deviation = COUNTED_SHARE * rule.expected_batch_size
    noise = deviation * draw_normals(privacy.key, step, 0, 1)[0]
    share = (within - count / 2 + noise) / rule.expected_batch_size + 0.5
    change = jnp.exp(-rule.adaptive.rate * (share - rule.adaptive.quantile))
    return replace(privacy, clip=privacy.clip * change)


def draw_normals(key: Array, step: Array, number: int, size: int) -> Array:
    """Return standard normal float32 (size,), a pure function of (key, step, number, position).

    They are made from 23 random bits, as by `jax.random.normal`. XLA:CPU fuses this Threefry with
    its readers, in a third of the time. `number` is 0 for the clip, else an array's number.
    """
    counter = (jnp.uint32(step)[None], jnp.full(1, number, jnp.uint32))
    step_key: Words = encrypt_threefry((key[:1], key[1:2]), counter)
    positions = jnp.arange(size, dtype=jnp.uint32)
    word, _ = encrypt_threefry(step_key, (positions, jnp.zeros_like(positions)))
    # Odd multiples of 2**-23 between -1 and 1 have finite normals.
    uniform = ((word >> 9 << 1) + 1).astype(jnp.float32) * 2.0**-23 - 1
    return jax.lax.erf_inv(uniform) * np.float32(2**0.5)
