"""The private gradients of a step: clipped by sample, summed, and with noise.

Each sample's gradient is scaled down if its norm is above the clip. A backward pass captures the
inputs a and the output cotangents d of each layer. The gradient of one sample in a dense layer,
a' d, isn't computed, since its squared norm is |a|^2 |d|^2 (Goodfellow 2015, arXiv 1510.01799). For
tokens the squared norm is the sum of (a a') * (d d') over pairs of tokens (Li et al. 2022, arXiv
2110.05679). The gradients of small kernels and of other layers are computed sample by sample. The
clipped sum is a product with weighted cotangents, so it needs no second backward pass (Bu et al.
2023, arXiv 2210.00038). The clip may follow a quantile of the norms.

The noise of a step is a pure function of (secret key, step). So a resumed run that computes a step
again adds the same noise, and different steps have different noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.core.errors import RecipeError
from pipeline.data.random import Words, encrypt_threefry
from pipeline.models.layers.tokens import Embedding
from pipeline.models.lowerings.problem import DEFAULTS, ConvWindow
from pipeline.models.modules.apply_layers import to_nhwc
from pipeline.models.modules.layer_capture import LayerCapture, Observations, grad_observing_layers
from pipeline.models.modules.name_stack import UPDATE
from pipeline.training.forward_pass import ForwardPass, PassResults
from pipeline.training.privacy.privacy_spec import AdaptiveClip
from pipeline.training.state import Gradients, TrainState
from pipeline.training.step_feature import StepFeature

PRIVACY = "privacy"
Params = Mapping[str, Array]
"""Parameters of one layer by name."""
COUNTED_SHARE = 0.05
"""Standard deviation of the noise on the number of samples within the clip, divided by the expected
batch size (Andrew et al. 2021, section 3.2)."""


@dataclass(frozen=True)
class PrivateGradients(StepFeature):
    """Clips the gradient of each sample, and adds noise to the sum. Losses that aren't finite are
    left out."""

    name: ClassVar[str] = PRIVACY
    rule: PrivacyRule

    def init(self, trained: Any) -> PrivacyState:
        return self.rule.init()

    def differentiate(self, forward: ForwardPass, trained: Any) -> tuple[Any, PassResults]:
        """Return the clipped sum of the samples' gradients, without noise, and the microbatch's
        share of the mean loss."""
        batch = forward.batch

        def sum_losses(trained: Any) -> tuple[Array, Array]:
            losses = jnp.where(batch.mask, forward.compute_outputs(trained).losses, 0.0)
            return losses.sum(), losses

        _, losses, captures = grad_observing_layers(
            sum_losses, trained, forward.config.apply_lowerings, all_modules=True
        )
        clip = get_privacy(forward.state).clip
        values, within = sum_clipped(captures, trained, batch.mask, clip)
        total = jnp.where(jnp.isfinite(losses), losses, 0.0).sum()
        loss = total / jnp.maximum(forward.divisor, 1)
        return values, PassResults(loss, forward.collections, {self.name: within}, {})

    def change_gradients(self, state: TrainState, gradients: Gradients) -> Any:
        return add_noise(self.rule, get_privacy(state), state.step, gradients.values)

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        within = gradients.sums[self.name]
        part = adapt_clip(self.rule, get_privacy(before), before.step, within, count)
        return after.replace_part(PRIVACY, part)


def get_privacy(state: TrainState) -> PrivacyState:
    """Return the secret and the clip of a private run's state."""
    part: PrivacyState = state.features[PRIVACY]
    return part


@dataclass(frozen=True)
class _LayerGradients:
    """The gradients of one layer's parameters, sample by sample."""

    squared_norms: Array
    """float32 (B,)."""
    sum_weighted: Callable[[Array], dict[str, Array]]
    """(weights (B,)) -> weighted sums by parameter. Samples with weight 0 may have any value."""


@jax.named_scope(UPDATE)
def sum_clipped(
    captures: Observations, trained: Any, mask: Array, clip: Array
) -> tuple[Any, Array]:
    """Return the sum of the gradients of the samples that `mask`, bool (B,), marks, float32 by
    trained parameter, and the number of samples whose norm is at most `clip`, float32 (). Gradients
    with a larger norm are scaled down to it. Gradients that aren't finite are left out. Raises
    RecipeError if the gradients of a parameter can't be separated by sample."""
    params = flatten_dict(dict(trained), sep="/")
    layers = {
        path: _separate_samples(captures[path], layer_params)
        for path, layer_params in _group_by_layer(captures, params).items()
    }
    norms = jnp.sqrt(_add(layer.squared_norms for layer in layers.values()))
    is_valid = mask & jnp.isfinite(norms)
    weights = jnp.where(is_valid, jnp.minimum(1.0, clip / jnp.maximum(norms, 1e-30)), 0.0)
    sums = {
        f"{path}/{name}": value
        for path, layer in layers.items()
        for name, value in layer.sum_weighted(weights).items()
    }
    values = unflatten_dict({tuple(path.split("/")): sums[path] for path in params})
    return values, jnp.sum(is_valid & (norms <= clip), dtype=jnp.float32)


def _group_by_layer(captures: Observations, params: Params) -> dict[str, dict[str, Array]]:
    """Return the trained parameters by layer path, and then by name. Raises RecipeError for
    parameters outside of captured layers, and for parameters of a layer that contains other
    layers."""
    outer = {path for path in captures for other in captures if other.startswith(f"{path}/")}
    layers: dict[str, dict[str, Array]] = {}
    missing = []
    for path, value in params.items():
        layer, _, name = path.rpartition("/")
        layers.setdefault(layer, {})[name] = value
        if layer not in captures or layer in outer:
            missing.append(path)
    if missing:
        raise RecipeError(
            f"privacy: the gradients of {', '.join(missing[:3])} can't be separated by sample; "
            "must be null for this network, or freeze these parameters"
        )
    return layers


def _separate_samples(capture: LayerCapture, params: Params) -> _LayerGradients:
    """Return the gradients of a layer's trained parameters by sample."""
    inputs = to_nhwc(capture.inputs, capture.layout)
    cotangents = to_nhwc(capture.cotangents, capture.layout).astype(jnp.float32)
    is_plain = params.keys() <= {"kernel", "bias"}
    if isinstance(getattr(capture.module, "layer", None), Embedding):
        return _separate_rows(inputs, cotangents, params["table"])
    if is_plain and capture.window is not None:
        patches = _make_sample_patches(capture.window, inputs.astype(jnp.float32))
        return _separate_positions(patches, _to_positions(cotangents), params)
    if is_plain and isinstance(capture.module, nn.Dense) and inputs.ndim == 3:
        inputs = _to_positions(inputs.astype(jnp.float32))
        return _separate_positions(inputs, _to_positions(cotangents), params)
    if is_plain and isinstance(capture.module, nn.Dense) and inputs.ndim == 2:
        return _separate_vectors(inputs.astype(jnp.float32), cotangents, params)
    assert capture.module is not None, "all modules are captured"
    return _separate_any(capture.module, inputs, cotangents, params)


def _to_positions(values: Array) -> Array:
    """Reshape and transpose (B, ..., features) to (B, features, positions)."""
    return values.reshape(values.shape[0], -1, values.shape[-1]).swapaxes(1, 2)


def _sum_squares(values: Array) -> Array:
    """Return the sum of squares of each sample, (B,)."""
    return jnp.square(values).sum(axis=tuple(range(1, values.ndim)))


def _add(squares: Iterable[Array]) -> Array:
    return reduce(jnp.add, squares)


def _weigh(weights: Array, values: Array) -> Array:
    """Multiply samples by weights. Values of samples with weight 0 may be non-finite."""
    factors = weights.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(factors > 0, factors * values, 0)


def _separate_vectors(inputs: Array, cotangents: Array, params: Params) -> _LayerGradients:
    """Separate a dense layer of inputs (B, n) with cotangents (B, m)."""
    bias = _sum_squares(cotangents)
    squared = {"kernel": _sum_squares(inputs) * bias, "bias": bias}

    def sum_weighted(weights: Array) -> dict[str, Array]:
        weighted = _weigh(weights, cotangents)
        valid = _weigh((weights > 0).astype(jnp.float32), inputs)
        sums = {"kernel": valid.T @ weighted, "bias": weighted.sum(0)}
        return {name: sums[name] for name in params}

    return _LayerGradients(_add(squared[name] for name in params), sum_weighted)


def _separate_positions(inputs: Array, cotangents: Array, params: Params) -> _LayerGradients:
    """Separate a product at T positions: inputs (B, n, T) and cotangents (B, m, T)."""
    features, positions = inputs.shape[1:]
    num_outputs = cotangents.shape[1]
    bias = cotangents.sum(-1)
    kernels: Array | None = None
    if "kernel" not in params:
        squared = jnp.zeros(inputs.shape[0], jnp.float32)
    elif positions * (features + num_outputs) < features * num_outputs:
        # Products of pairs of positions take fewer operations than the gradient of each sample.
        squared = jnp.einsum(
            "bts,bts->b",
            jnp.einsum("bnt,bns->bts", inputs, inputs),
            jnp.einsum("bmt,bms->bts", cotangents, cotangents),
        )
    else:
        kernels = jnp.einsum("bmt,bnt->bmn", cotangents, inputs)
        squared = _sum_squares(kernels)
    if "bias" in params:
        squared = squared + _sum_squares(bias)

    def sum_weighted(weights: Array) -> dict[str, Array]:
        sums = {}
        if "bias" in params:
            sums["bias"] = _weigh(weights, bias).sum(0)
        if kernels is not None:
            sums["kernel"] = _weigh(weights, kernels).sum(0).T
        elif "kernel" in params:
            valid = _weigh((weights > 0).astype(jnp.float32), inputs)
            sums["kernel"] = jnp.einsum("bnt,bmt->nm", valid, _weigh(weights, cotangents))
        return {name: value.reshape(params[name].shape) for name, value in sums.items()}

    return _LayerGradients(squared, sum_weighted)


def _separate_rows(ids: Array, cotangents: Array, table: Array) -> _LayerGradients:
    """Separate the rows of a table that token ids (B, ...) look up: cotangents (B, T, features)."""
    rows = ids.reshape(ids.shape[0], -1).astype(jnp.int32)
    products = jnp.einsum("btf,bsf->bts", cotangents, cotangents)
    squared = jnp.where(rows[:, :, None] == rows[:, None], products, 0).sum((1, 2))

    def sum_weighted(weights: Array) -> dict[str, Array]:
        zeros = jnp.zeros(table.shape, jnp.float32)
        return {"table": zeros.at[rows].add(_weigh(weights, cotangents))}

    return _LayerGradients(squared, sum_weighted)


def _separate_any(
    module: nn.Module, inputs: Array, cotangents: Array, params: Params
) -> _LayerGradients:
    """Separate any layer: compute its gradients sample by sample. Fit for few parameters."""
    context: Any = getattr(module, "context", None)
    if hasattr(context, "policy"):
        # The chosen lowerings are for the batch size, but here each call has one sample.
        module = module.clone(context=replace(context, policy=DEFAULTS))

    def differentiate(sample: Array, cotangent: Array) -> Params:
        def apply(params: Params) -> Array:
            outputs: Any = module.apply({"params": params}, sample[None])
            return outputs

        outputs, backward = jax.vjp(apply, dict(params))
        gradients: tuple[Params] = backward(cotangent[None].astype(outputs.dtype))
        return gradients[0]

    gradients = jax.vmap(differentiate)(inputs, cotangents)

    def sum_weighted(weights: Array) -> dict[str, Array]:
        return {name: _weigh(weights, value).sum(0) for name, value in gradients.items()}

    return _LayerGradients(_add(map(_sum_squares, gradients.values())), sum_weighted)


def _make_sample_patches(window: ConvWindow, images: Array) -> Array:
    """Return the patches of images (B, H, W, C) as (B, kernel height * kernel width * C, H' * W').
    Images are shifted along the width, then along the height, so that whole rows are copied."""
    batch, _, _, channels = images.shape
    padded = jnp.pad(images.transpose(0, 3, 1, 2), ((0, 0), (0, 0), *window.pads))
    columns = [padded[..., window.columns.slice_tap(j)] for j in range(window.columns.kernel)]
    shifted = jnp.stack(columns, 1)
    rows = [shifted[..., window.rows.slice_tap(i), :] for i in range(window.rows.kernel)]
    patches = jnp.stack(rows, 1)
    size = window.rows.kernel * window.columns.kernel * channels
    return patches.reshape(batch, size, prod(window.output_size))


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
