"""Networks of texts, speech, tables and videos: bodies, (batch, length, 1, channels) or volumes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.backends.ascend.published.networks.parts import (
    attend,
    conv,
    conv_norm,
    dense,
    dropout,
    feed_forward,
    gelu,
    max_pool,
    norm,
    self_attention,
    upsample,
)
from pipeline.models.layers.initializers import Uniform
from pipeline.models.layers.model_spec import InitSpec
from pipeline.models.layers.tokens import Lstm, Recurrent
from pipeline.models.modules.apply_layers import LayerContext, apply_layer

SITE = LayerContext(
    (),
    InitSpec(conv=Uniform(scale=0.1), dense=Uniform(scale=0.1), bias=Uniform(scale=0.1)),
    "float32",
    True,
)


class _Cells(nn.Module):
    layer: Recurrent

    @nn.compact
    def __call__(self, x: Array) -> Array:
        result: Array = apply_layer(self.layer, x, SITE.inside("cells"))
        return result


def lstm(x: Array, features: int, *, both: bool = False) -> Array:
    """Return the results of an LSTM for each token; `both`: of one in each direction."""
    result: Array = _Cells(Lstm(features=features, bidirectional=both))(x)
    return result


def embed(tokens: Array, vocabulary: int, features: int) -> Array:
    """Return a row of a table for each token; tokens are numbers of any type."""
    result: Array = nn.Embed(vocabulary, features)(tokens.astype(jnp.int32))
    return result


def crnn(x: Array, classes: int) -> Array:
    """CRNN (Shi et al. 2017): a VGG of grey lines of text, 32 pixels high, and two LSTMs."""
    x = max_pool(nn.relu(conv(x[..., :1], 64, use_bias=True)))
    x = max_pool(nn.relu(conv(x, 128, use_bias=True)))
    x = nn.relu(conv(conv_norm(x, 256, use_bias=True), 256, use_bias=True))
    x = nn.max_pool(x, (2, 2), (2, 1), "SAME")
    x = nn.relu(conv(conv_norm(x, 512, use_bias=True), 512, use_bias=True))
    x = nn.max_pool(x, (2, 2), (2, 1), "SAME")
    x = nn.relu(norm(conv(x, 512, 2, use_bias=True, padding="VALID")))
    y = dense(lstm(x.mean(1), 256, both=True), 256)
    return dense(lstm(y, 256, both=True), classes)


def cnn_ctc(x: Array, classes: int) -> Array:
    """A ResNet of 29 layers for lines of text, and CTC (Baek et al. 2019, None-ResNet-None-CTC)."""
    x = max_pool(conv_norm(conv_norm(x, 32), 64))
    for stage, (features, blocks) in enumerate(((128, 1), (256, 2), (512, 5), (512, 3))):
        for _ in range(blocks):
            y = norm(conv(conv_norm(x, features), features))
            x = nn.relu(y + (x if x.shape == y.shape else norm(conv(x, features, 1))))
        x = conv_norm(x, features) if stage < 3 else x
        if stage == 0:
            x = max_pool(x)
        elif stage == 1:
            x = nn.max_pool(x, (2, 2), (2, 1), ((0, 0), (1, 1)))
    x = conv_norm(x, 512, 2, (2, 1), padding=((0, 0), (1, 1)))
    x = conv_norm(x, 512, 2, padding="VALID")
    return dense(x.mean(1), classes)


def gru_translator(x: Array, classes: int) -> Array:
    """A GRU in each direction, and a GRU that attends to their results (Bahdanau et al. 2015)."""
    source, target = (
        dropout(embed(x[:, :, 0, side], rows, 256), 0.5) for side, rows in ((0, 8154), (1, classes))
    )
    cells = (nn.GRUCell(512), nn.GRUCell(512, name="reverse"))
    read: list[Any] = [
        nn.RNN(cells[0])(source),
        nn.RNN(cells[1], reverse=True, keep_order=True)(source),
    ]
    source = jnp.concatenate(read, -1)
    state = jnp.tanh(dense(source[:, -1], 512))
    energy, score = nn.Dense(512), nn.Dense(1, use_bias=False)
    decoder, results = nn.GRUCell(512), []
    for place in range(target.shape[1] - 1):
        word = target[:, place]
        repeated = jnp.broadcast_to(state[:, None], (*source.shape[:2], 512))
        scores = score(jnp.tanh(energy(jnp.concatenate([repeated, source], -1))))
        context = (jax.nn.softmax(scores, 1) * source).sum(1)
        state, _ = decoder(state, jnp.concatenate([word, context], -1))
        results.append(jnp.concatenate([state, context, word], -1))
    return dense(jnp.stack(results, 1), classes)


def deep_attention_matching(x: Array, classes: int) -> Array:
    """DAM (Zhou et al. 2018): products of nine turns and a response of 50 words."""
    words = embed(x[..., 0], 434_512, 200)
    turns = words[:, :9].reshape(-1, 50, 200)
    reply = jnp.broadcast_to(words[:, 9:], words[:, :9].shape).reshape(-1, 50, 200)

    def attended(query: Array, memory: Array) -> Array:
        y = nn.LayerNorm()(query + attend(query, memory, memory, 1))
        return nn.LayerNorm()(y + feed_forward(y, 200, nn.relu))

    maps = []
    left, right = turns, reply
    for level in range(6):
        if level:
            left, right = attended(left, left), attended(right, right)
        maps.append(left @ right.swapaxes(1, 2) / 200**0.5)
        crossed = attended(left, right), attended(right, left)
        maps.append(crossed[0] @ crossed[1].swapaxes(1, 2) / 200**0.5)
    y = jnp.stack(maps, -1).reshape(x.shape[0], 9, 50, 50, 12)
    for features in (32, 16):
        y = nn.elu(conv(y, features, use_bias=True))
        y = nn.max_pool(y, (3, 3, 3), (3, 3, 3), "SAME")
    return dense(y.reshape(x.shape[0], -1), classes)


def mel_gan(x: Array, classes: int) -> Array:
    """MelGAN (Kumar et al. 2019): a generator, and three discriminators of real and made sounds.

    `x` has a spectrogram and its sounds, (batch, 64, 1, 80 + 256).
    """
    sounds = x[..., 80:].reshape(x.shape[0], -1, 1, 1)
    made = _generate_sounds(x[..., :80])
    joined = jnp.concatenate([sounds, made, jax.lax.stop_gradient(made)])
    outputs = []
    for _ in range(3):
        outputs.append(_judge_sounds(joined).reshape(-1, 1))
        joined = nn.avg_pool(joined, (4, 1), (2, 1), "SAME")
    return jnp.concatenate(outputs).reshape(x.shape[0], -1)


def _leaky(x: Array) -> Array:
    return nn.leaky_relu(x, 0.2)


def _generate_sounds(x: Array) -> Array:
    options: Any = {"use_bias": True}
    x = conv(x, 512, (7, 1), **options)
    for features, stride in ((256, 8), (128, 8), (64, 2), (32, 2)):
        up = nn.ConvTranspose(features, (2 * stride, 1), (stride, 1))
        x = up(_leaky(x))
        for dilation in (1, 3, 9):
            y = conv(_leaky(x), features, (3, 1), kernel_dilation=(dilation, 1), **options)
            x = conv(x, features, 1, **options) + conv(_leaky(y), features, 1, **options)
    return jnp.tanh(conv(_leaky(x), 1, (7, 1), **options))


def _judge_sounds(x: Array) -> Array:
    x = _leaky(conv(x, 16, (15, 1), use_bias=True))
    for features in (64, 256, 1024, 1024):
        groups = x.shape[-1] // 4
        x = conv(x, features, (41, 1), (4, 1), feature_group_count=groups, use_bias=True)
        x = _leaky(x)
    x = _leaky(conv(x, 1024, (5, 1), use_bias=True))
    return conv(x, 1, (3, 1), use_bias=True)


def post_norm_block(x: Array, heads: int, hidden: int, memory: Array | None = None) -> Array:
    """Return a block of the first Transformer, whose norms come last (Vaswani et al. 2017)."""
    rate, width = 0.1, x.shape[-1]
    x = nn.LayerNorm()(x + dropout(self_attention(x, heads), rate))
    if memory is not None:
        y = attend(dense(x, width), dense(memory, width), dense(memory, width), heads)
        x = nn.LayerNorm()(x + dropout(dense(y, width), rate))
    return nn.LayerNorm()(x + dropout(feed_forward(x, hidden, nn.relu), rate))


def transformer(
    x: Array, classes: int, *, width: int = 1024, heads: int = 16, blocks: int = 6
) -> Array:
    """Transformer of the big size: logits of the tokens of a translation."""
    source = embed(x[:, :, 0, 0], classes, width)
    target = embed(x[:, :, 0, 1], classes, width)
    source, target = dropout(source, 0.1), dropout(target, 0.1)
    for _ in range(blocks):
        source = post_norm_block(source, heads, 4 * width)
    causal = jnp.triu(jnp.full((target.shape[1],) * 2, -1e4), 1)
    for _ in range(blocks):
        target = nn.LayerNorm()(target + dropout(self_attention(target, heads, causal), 0.1))
        target = post_norm_block(target, heads, 4 * width, source)
    return dense(target, classes, bias=False)


def seq2seq(x: Array, classes: int) -> Array:
    """Four layers of LSTM of 1,000 features in encoder and decoder (Sutskever et al. 2014)."""
    source, target = (embed(x[:, :, 0, side], classes, 1000) for side in (0, 1))
    for _ in range(4):
        source = lstm(source, 1000)
    target = target + source[:, -1:]
    for _ in range(4):
        target = lstm(target, 1000)
    return dense(target, classes)


def gnmt(x: Array, classes: int) -> Array:
    """GNMT v2: four layers of LSTM of 1,024 features each, attention after the first."""
    source, target = (embed(x[:, :, 0, side], classes, 1024) for side in (0, 1))
    source = lstm(source, 512, both=True)
    source = lstm(dropout(source, 0.2), 1024)
    for _ in range(2):
        source = source + lstm(dropout(source, 0.2), 1024)
    target = lstm(dropout(target, 0.2), 1024)
    scores = jnp.tanh(dense(target, 1024)[:, :, None] + dense(source, 1024)[:, None])
    context = jax.nn.softmax(dense(scores, 1, bias=False)[..., 0]) @ source
    target = lstm(jnp.concatenate([target, context], -1), 1024)
    for _ in range(2):
        joined = jnp.concatenate([dropout(target, 0.2), context], -1)
        target = target + lstm(joined, 1024)
    return dense(target, classes)


def text_rcnn(x: Array, classes: int) -> Array:
    """TextRCNN (Lai et al. 2015): an LSTM in each direction beside the embeddings."""
    words = embed(x[:, :, 0, 0], 20_305, 300)
    y = jnp.concatenate([lstm(words, 300, both=True), words], -1)
    return dense(jnp.tanh(dense(y, 300)).max(1), classes)


def deepfm(x: Array, classes: int) -> Array:
    """DeepFM (Guo et al. 2017) of the zoo: 184,965 rows of 80, and products of 1,024 to 128."""
    rows, weights = x[:, :, 0, 0], x[:, :, 0, 1:]
    linear = (embed(rows, 184_965, 1) * weights).sum((1, 2))
    factors = embed(rows, 184_965, 80) * weights
    pairs = 0.5 * (factors.sum(1) ** 2 - (factors**2).sum(1)).sum(-1)
    y = factors.reshape(x.shape[0], -1)
    for features in (1024, 512, 256, 128):
        y = nn.relu(dense(dropout(y, 0.1), features))
    deep = dense(y, 1)[:, 0]
    logits = linear + pairs + deep
    return jnp.stack([jnp.zeros_like(logits), logits], -1)


def speech_transformer(x: Array, classes: int) -> Array:
    """Speech Transformer: six blocks of 512 features for frames of 320, six for 4,233 words."""
    frames, words = x[..., :320].reshape(x.shape[0], -1, 320), x[:, :30, 0, 320]
    source = nn.LayerNorm()(dense(frames, 512))
    for _ in range(6):
        source = post_norm_block(source, 8, 2048)
    target = embed(words, classes, 512)
    causal = jnp.triu(jnp.full((target.shape[1],) * 2, -1e4), 1)
    for _ in range(6):
        target = nn.LayerNorm()(target + dropout(self_attention(target, 8, causal), 0.1))
        target = post_norm_block(target, 8, 2048, source)
    return dense(target, classes, bias=False)


def fcn4(x: Array, classes: int) -> Array:
    """FCN-4 of music (Choi et al. 2016), on mel spectrograms of 96 x 1,366."""
    for features, pool in ((128, (2, 4)), (384, (4, 5)), (768, (3, 8)), (2048, (4, 8))):
        x = conv_norm(x[..., :1] if x.shape[-1] == 3 else x, features, use_bias=True)
        x = nn.max_pool(x, pool, pool)
    return dense(x.reshape(x.shape[0], -1), classes)


def c3d(x: Array, classes: int) -> Array:
    """C3D (Tran et al. 2015), on 16 frames of 112 x 112."""
    for stage, features in enumerate(((64,), (128,), (256, 256), (512, 512), (512, 512))):
        for width in features:
            x = nn.relu(conv(x, width, use_bias=True))
        x = max_pool(x) if stage else nn.max_pool(x, (1, 2, 2), (1, 2, 2))
    x = x.reshape(x.shape[0], -1)
    for _ in range(2):
        x = dropout(nn.relu(dense(x, 4096)), 0.5)
    return dense(x, classes)


def tcn(x: Array, classes: int) -> Array:
    """TCN (Bai et al. 2018): eight levels of causal convolutions of 25 features, kernels of 7."""
    y = x.reshape(x.shape[0], -1, 1)
    for level in range(8):
        z = y
        for _ in range(2):
            options: Any = {"kernel_dilation": 2**level, "padding": "CAUSAL", "use_bias": True}
            z = dropout(nn.relu(nn.WeightNorm(nn.Conv(25, (7,), **options))(z)), 0.05)
        y = nn.relu(z + (y if level else conv(y, 25, 1, use_bias=True)))
    return dense(y[:, -1], classes)


def _group_norm(x: Array) -> Array:
    result: Array = nn.GroupNorm(32, epsilon=1e-5)(x)
    return result


def _residual(x: Array, features: int, time: Array) -> Array:
    y = conv(nn.silu(_group_norm(x)), features, use_bias=True)
    y = y + dense(nn.silu(time), features)[:, None, None]
    y = conv(nn.silu(_group_norm(y)), features, use_bias=True)
    return y + (x if x.shape[-1] == features else conv(x, features, 1, use_bias=True))


def _spatial_block(x: Array, text: Array, heads: int) -> Array:
    batch, _height, _width, features = x.shape
    y = conv(_group_norm(x), features, 1, use_bias=True).reshape(batch, -1, features)
    for memory in (None, text):
        z = nn.LayerNorm()(y)
        source = z if memory is None else memory
        query, key, value = (dense(part, features, bias=False) for part in (z, source, source))
        y = y + dense(attend(query, key, value, heads), features)
    z = dense(nn.LayerNorm()(y), 8 * features)
    y = y + dense(z[..., : 4 * features] * gelu(z[..., 4 * features :]), features)
    return x + conv(y.reshape(x.shape), features, 1, use_bias=True)


def diffusion_unet(x: Array, text: Array, *, head_width: int | None) -> Array:
    """The U-Net of Stable Diffusion (Rombach et al. 2022); 8 heads, or heads of `head_width`."""
    time = dense(jnp.broadcast_to(x[:, 0, 0, :1], (x.shape[0], 320)), 1280)
    time = dense(nn.silu(time), 1280)

    def attended(x: Array) -> Array:
        heads = 8 if head_width is None else x.shape[-1] // head_width
        return _spatial_block(x, text, heads)

    x = conv(x, 320, use_bias=True)
    skips = [x]
    for stage, features in enumerate((320, 640, 1280, 1280)):
        for _ in range(2):
            x = _residual(x, features, time)
            x = attended(x) if stage < 3 else x
            skips.append(x)
        if stage < 3:
            x = conv(x, features, 3, 2, use_bias=True)
            skips.append(x)
    x = _residual(attended(_residual(x, 1280, time)), 1280, time)
    for stage, features in enumerate((1280, 1280, 640, 320)):
        for block in range(3):
            x = _residual(jnp.concatenate([x, skips.pop()], -1), features, time)
            x = attended(x) if stage else x
            if block == 2 and stage < 3:
                x = upsample(x)
                x = conv(x, features, use_bias=True)
    return conv(nn.silu(_group_norm(x)), 4, use_bias=True)


def stable_diffusion(x: Array, classes: int, *, head_width: int | None, text_width: int) -> Array:
    """A step of the U-Net after a frozen encoder of images and a frozen encoder of texts."""
    latents = jax.lax.stop_gradient(_encode_images(x))
    layers = 12 if text_width == 768 else 23
    tokens = jnp.broadcast_to(x[:, 0, :77, :1], (x.shape[0], 77, 1))
    text = embed(tokens[..., 0], 49_408, text_width)
    for _ in range(layers):
        y = nn.LayerNorm()(text)
        text = text + self_attention(y, text_width // 64)
        text = text + feed_forward(nn.LayerNorm()(text), 4 * text_width)
    text = jax.lax.stop_gradient(nn.LayerNorm()(text))
    return diffusion_unet(latents, text, head_width=head_width)


def _encode_images(x: Array) -> Array:
    """Return latents at 1/8 of the images: the encoder of the autoencoder."""
    x = conv(x, 128, use_bias=True)
    for stage, features in enumerate((128, 256, 512, 512)):
        for _ in range(2):
            y = conv(nn.silu(_group_norm(x)), features, use_bias=True)
            y = conv(nn.silu(_group_norm(y)), features, use_bias=True)
            x = y + (x if x.shape[-1] == features else conv(x, features, 1, use_bias=True))
        x = conv(x, features, 3, 2, use_bias=True) if stage < 3 else x
    return conv(nn.silu(_group_norm(x)), 8, use_bias=True)[..., :4]
