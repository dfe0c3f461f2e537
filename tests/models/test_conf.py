"""Every file of conf/model: it builds, it can be trained, and its parameters are as kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.files.paths import CONF
from tests.models.build import QUICK, conf_model, count, draw_variables, parameters, random, shapes
from tests.models.conftest import GOLDEN

EVERY_FILE = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
IMPORTED = ["flax", "function", "keras", "onnx", "torch"]
"""Networks of the user's own, which the files do not name."""
OF_ROWS = {"table"}
"""Networks that are built from the columns of a table: `tests/stages/test_table_runs.py`."""
FILES = [name for name in EVERY_FILE if name not in (*IMPORTED, *OF_ROWS)]
IMAGENET = ((224, 224, 3), 1000)
SIZES = {
    "layers": ((32, 32, 3), 10),
    "lenet5": ((32, 32, 1), 10),
    "mlp": ((28, 28, 1), 10),
    "resnet20": ((32, 32, 3), 10),
    "resnet18": IMAGENET,
    "resnet34": IMAGENET,
    "resnet50": IMAGENET,
    "resnet101": IMAGENET,
    "resnet152": IMAGENET,
    "alexnet": ((227, 227, 3), 10),
    "vgg11": IMAGENET,
    "vgg11_bn": IMAGENET,
    "vgg13": IMAGENET,
    "vgg13_bn": IMAGENET,
    "vgg16": IMAGENET,
    "vgg16_bn": IMAGENET,
    "vgg19": IMAGENET,
    "vgg19_bn": IMAGENET,
    "squeezenet1_0": IMAGENET,
    "squeezenet1_1": IMAGENET,
    "squeezenet_residual": IMAGENET,
    "googlenet": IMAGENET,
    "mobilenet_v1": IMAGENET,
    "mobilenet_v2": IMAGENET,
    "mobilenet_v3_large": IMAGENET,
    "mobilenet_v3_small": IMAGENET,
    "se_resnet18": IMAGENET,
    "se_resnet50": IMAGENET,
    "resnext50_32x4d": IMAGENET,
    "wide_resnet50_2": IMAGENET,
    "wide_resnet101_2": IMAGENET,
    "densenet121": IMAGENET,
    "densenet169": IMAGENET,
    "inception_v3": ((299, 299, 3), 1000),
    "efficientnet_b0": IMAGENET,
    "efficientnet_b1": ((240, 240, 3), 1000),
    "xception": ((299, 299, 3), 1000),
    "shufflenet_v2_x0_5": IMAGENET,
    "shufflenet_v2_x1_0": IMAGENET,
    "resnetv2_50": IMAGENET,
    "wide_resnet40_10": ((32, 32, 3), 10),
    "regnet_x_800mf": IMAGENET,
    "repvgg_a0": IMAGENET,
    "repvgg_a1": IMAGENET,
    "dpn92": IMAGENET,
    "vit_b_16": IMAGENET,
    "vit_b_32": IMAGENET,
    "vit_tiny": IMAGENET,
    "bert_base": ((512,), 2),
    "gpt2": ((1024,), 50_257),
    "decoder": ((128,), 256),
    "unet": ((32, 32, 3), 2),
    "wide_deep": ((39, 2), 2),
}
PUBLISHED = {
    "resnet18": 11_689_512,  # torchvision
    "resnet34": 21_797_672,  # torchvision
    "resnet50": 25_557_032,  # torchvision
    "resnet101": 44_549_160,  # torchvision
    "resnet152": 60_192_808,  # torchvision
    "alexnet": 56_057_418,  # by hand, from the layers of MindSpore's zoo
    "vgg11": 132_863_336,  # torchvision
    "vgg11_bn": 132_868_840,  # torchvision
    "vgg13": 133_047_848,  # torchvision
    "vgg13_bn": 133_053_736,  # torchvision
    "vgg16": 138_357_544,  # torchvision
    "vgg16_bn": 138_365_992,  # torchvision
    "vgg19": 143_667_240,  # torchvision
    "vgg19_bn": 143_678_248,  # torchvision
    "squeezenet1_0": 1_248_424,  # torchvision
    "squeezenet1_1": 1_235_496,  # torchvision
    "squeezenet_residual": 1_248_424,  # as 1.0: a bypass has no weights
    "googlenet": 6_624_904,  # torchvision, without auxiliary classifiers
    "mobilenet_v1": 4_231_976,  # Keras, trainable
    "mobilenet_v2": 3_504_872,  # torchvision
    "mobilenet_v3_large": 5_483_032,  # torchvision
    "mobilenet_v3_small": 2_542_856,  # torchvision
    "se_resnet18": 11_778_592,  # timm, legacy_seresnet18
    "se_resnet50": 28_088_024,  # timm, legacy_seresnet50
    "resnext50_32x4d": 25_028_904,  # torchvision
    "wide_resnet50_2": 68_883_240,  # torchvision
    "wide_resnet101_2": 126_886_696,  # torchvision
    "densenet121": 7_978_856,  # torchvision
    "densenet169": 14_149_480,  # torchvision
    "inception_v3": 23_834_568,  # torchvision, without the auxiliary classifier
    "efficientnet_b0": 5_288_548,  # torchvision
    "efficientnet_b1": 7_794_184,  # torchvision
    "xception": 22_855_952,  # Keras, trainable
    "shufflenet_v2_x0_5": 1_366_792,  # torchvision
    "shufflenet_v2_x1_0": 2_278_604,  # torchvision
    "resnetv2_50": 25_568_360 - 19_008,  # Keras, trainable, whose convolutions have 19,008 biases
    "regnet_x_800mf": 7_259_656,  # torchvision
    "dpn92": 37_668_392,  # timm
    "vit_b_16": 86_567_656,  # torchvision
    "vit_b_32": 88_224_232,  # torchvision
    "vit_tiny": 5_717_416,  # timm, vit_tiny_patch16_224
    "bert_base": 109_482_240 - 2 * 768 + 2 * 769,  # transformers; one segment, and a classifier
    "gpt2": 124_439_808,  # transformers
    "decoder": 256 * 128 + 5 * (4 * 128**2 + 3 * 128 * 344 + 2 * 128 + 2 * 32) + 128,
    "unet": 31_037_698,  # by hand, from the widths of the paper's fig. 1
    "wide_deep": 184_696 * 81 + 1 + 3_121 * 1024 + 1025 * 512 + 513 * 256 + 257 * 128 + 129,
}
"""How many parameters others count in the same network."""

SMALL = ["layers", "lenet5", "mlp", "resnet20"]


def test_model_files_are_all_tested() -> None:
    assert set(SIZES) == set(FILES)
    assert len(FILES) == 53


@pytest.mark.parametrize("name", EVERY_FILE)
def test_file_describes_the_network_in_one_line(name: str) -> None:
    first, second, *_ = (CONF / "model" / f"{name}.yaml").read_text().splitlines()
    assert first.startswith("# yaml-language-server: $schema=../../recipe.schema.json")
    assert second.startswith("# ")
    assert 20 < len(second) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_parameters_match_golden_files(name: str, golden: Callable[[Path, str], str]) -> None:
    sample, classes = SIZES[name]
    variables = shapes(conf_model(name).build(classes, "float32"), sample)
    kind = {1: "tokens", 2: "fields", 3: "images"}[len(sample)]
    lines = [f"{name}: {kind} {'x'.join(map(str, sample))}, {classes} classes"]
    for path, leaf in parameters(variables).items():
        assert leaf.dtype == jnp.float32
        lines.append(f"{path} {'x'.join(map(str, leaf.shape))} {leaf.size:,}")
    assert count(variables) == PUBLISHED.get(name, count(variables))
    text = "\n".join([*lines, f"total {count(variables):,}\n"])
    assert text == golden(GOLDEN / f"parameters_{name}.txt", text)


def loss_and_gradients(name: str) -> tuple[jax.Array, dict[str, np.ndarray]]:
    (height, width, channels), classes = SIZES[name]
    module = conf_model(name).build(classes, "float32")
    images, labels = random(2, height, width, channels), np.array([1, 7])
    variables = draw_variables(shapes(module, images.shape[1:]))

    def loss(params: object) -> jax.Array:
        logits, _ = module.apply(
            {**variables, "params": params},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(1)},
        )
        return -jax.nn.log_softmax(logits)[np.arange(2), labels].mean()

    value, gradients = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(
        variables["params"]
    )
    return value, {
        path: np.asarray(leaf) for path, leaf in parameters({"params": gradients}).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_loss_has_a_finite_gradient_in_every_parameter(name: str) -> None:
    value, gradients = loss_and_gradients(name)
    assert 0 < value < 10 * math.log(10)
    for path, gradient in gradients.items():
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_gradients_of_big_networks_have_parameter_shapes(name: str) -> None:
    (height, width, channels), classes = SIZES[name]
    module = conf_model(name).build(classes, "bfloat16")
    variables = shapes(module, (height, width, channels))

    def loss(params: object, statistics: object, images: jax.Array) -> jax.Array:
        collections = {"params": params, "batch_stats": statistics}
        logits, _ = module.apply(collections, images, train=True, mutable=["batch_stats"])
        return logits.sum()

    images = jax.ShapeDtypeStruct((2, height, width, channels), jnp.float32)
    gradients = jax.eval_shape(
        jax.grad(loss), variables["params"], variables["batch_stats"], images
    )
    assert gradients == variables["params"]
