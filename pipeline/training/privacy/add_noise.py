"""Noise on clipped sums, and a clip that follows a quantile of the norms.

The noise of a step is a pure function of (secret key, step). So a resumed run that computes a step
again adds the same noise, and different steps have different noise.
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
"""Standard deviation of the noise on the number of samples within the clip, divided by the expected
batch size (Andrew et al. 2021, section 3.2)."""


@register_dataclass
@dataclass(frozen=True)
class PrivacyState:
    """The secret of a private run and the clip of its next step."""

    key: Array
    """uint32 (4,): two words for the noise, two for the order of samples."""
    noise: Array
    """Standard deviation of the noise divided by the clip, float32 (). It is NaN until it is set,
    so a run can't go on without it."""
    clip: Array
    """Largest norm of a sample's gradient, float32 ()."""


@dataclass(frozen=True)
class PrivacyRule:
    """Settings for the computation of private gradients from the clipped sum."""

    expected_batch_size: int
    """Divisor of the sum. The number of drawn samples isn't public, so it can't be the divisor."""
    clip: float
    """The clip of the first step."""
    adaptive: AdaptiveClip | None = None

    def init(self) -> PrivacyState:
        """Return the state before its secret is set."""
        return PrivacyState(jnp.zeros(4, jnp.uint32), jnp.float32(np.nan), jnp.float32(self.clip))


def round_up_to_float32(noise: float) -> float:
    """Return the smallest float32 that is at least `noise`."""
    rounded = np.float32(noise)
    if float(rounded) < noise:
        rounded = np.nextafter(rounded, np.float32(np.inf))
    return float(rounded)


def split_noise(noise: float, count_noise: float) -> float:
    """Return the noise s of the gradients if the number of samples within the clip has
    `count_noise`.

    Both together have the privacy of `noise` alone: 1 / noise^2 = 1 / s^2 + 1 / (2 count_noise)^2,
    since a sample changes the centred number by 1/2 (Andrew et al. 2021, theorem 1). Raises
    ValueError without such an s.
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
    """Return the state with the clip of the next step, which is nearer to the quantile of the
    norms. `within` of `count` samples had gradients with a norm of at most the clip. Noise is added
    to their share."""
    if rule.adaptive is None:
        return privacy
    deviation = COUNTED_SHARE * rule.expected_batch_size
    noise = deviation * draw_normals(privacy.key, step, 0, 1)[0]
    share = (within - count / 2 + noise) / rule.expected_batch_size + 0.5
    change = jnp.exp(-rule.adaptive.rate * (share - rule.adaptive.quantile))
    return replace(privacy, clip=privacy.clip * change)


def draw_normals(key: Array, step: Array, number: int, size: int) -> Array:
    """Return standard normal float32 (size,), a pure function of (key, step, number, position).

    `number` is 0 for the clip, else the number of an array of gradients. As in `jax.random.normal`,
    a normal is made from 23 random bits. It takes a third of the time, since XLA fuses this
    Threefry with the operations that read it on the CPU.
    """
    counter = (jnp.uint32(step)[None], jnp.full(1, number, jnp.uint32))
    step_key: Words = encrypt_threefry((key[:1], key[1:2]), counter)
    positions = jnp.arange(size, dtype=jnp.uint32)
    word, _ = encrypt_threefry(step_key, (positions, jnp.zeros_like(positions)))
    # Odd multiples of 2**-23 between -1 and 1 have finite normals.
    uniform = ((word >> 9 << 1) + 1).astype(jnp.float32) * 2.0**-23 - 1
    return jax.lax.erf_inv(uniform) * np.float32(2**0.5)
