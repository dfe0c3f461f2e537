"""Families of recipes whose curves score estimates of final values.

A family is a dataset with a network. Its runs have three pairs of optimizer and schedule, each with
eight learning rates. The hash of a family's name decides whether the shipped table and the
constants of the estimate may use it (`fit`), or whether it is only scored (`held_out`).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

Side = Literal["fit", "held_out"]
EVALUATIONS = 40
"""Evaluations of a run, evenly spread."""
COMMON = (
    "train.epochs=null",
    "eval.every_epochs=null",
    "train.sink_size=50",
    "monitor.tensorboard=false",
    "autotune=off",
    "++expect={}",
    "seed=1",
    "hydra.sweeper.vectorize=2",
)
LENET = "+recipe=lenet5_digits"
DIGITS = (LENET, "dataset.train.ops=[{name: rescale, factor: 0.0625, shift: 0.0}]")
PLAIN_EVAL = "dataset.eval.ops=[{name: rescale, factor: 0.0625, shift: 0.0}]"
CONV = "[{name: conv, features: 16, kernel: 3}, relu, {name: max_pool, kernel: 2}, flatten, "
CONV1D = "[{name: conv1d, features: 16, kernel: 5, stride: 2}, relu, flatten, "
DENSE = "{name: dense, features: $classes}]"
TABULAR = "+recipe=breast_cancer_mlp"
TEXT = ("+recipe=gpt_text", "dataset.length=32", "train.schedule={}", "train.clip.norm=null")
WORDS = ("+recipe=bert_docstrings", "model=layers", "train.schedule={}")
PAIRS = ("+recipe=pair_docstrings", "train.schedule={}")
FAMILIES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "digits_mlp": (400, (*DIGITS, PLAIN_EVAL, "model=mlp", "model.hidden=[64]")),
    "digits_linear": (300, (*DIGITS, PLAIN_EVAL, "model=mlp", "model.hidden=[]")),
    "digits_conv": (400, (*DIGITS, PLAIN_EVAL, "model=layers", f"model.layers={CONV}{DENSE}")),
    "digits_lenet": (480, (LENET,)),
    "digits_few_mlp": (
        400,
        (
            *DIGITS,
            PLAIN_EVAL,
            "model=mlp",
            "model.hidden=[32]",
            "dataset.train.num_shards=14",
            "dataset.train.shard_id=0",
            "train.batch_size=16",
        ),
    ),
    "digit_halves": (400, ("+recipe=digit_halves",)),
    "breast_cancer_mlp": (300, (TABULAR,)),
    "breast_cancer_linear": (200, (TABULAR, "model.hidden=[]")),
    "wine_mlp": (
        200,
        (
            TABULAR,
            "dataset.shipped=wine",
            "dataset.target=cultivar",
            "model.hidden=[16]",
            "train.batch_size=16",
        ),
    ),
    "diabetes_mlp": (400, ("+recipe=diabetes_mlp",)),
    "diabetes_linear": (300, ("+recipe=diabetes_mlp", "model.hidden=[]")),
    "diabetes_wide": (300, ("+recipe=diabetes_mlp", "model.hidden=[128]", "train.batch_size=16")),
    "mnist1d_mlp": (800, ("+recipe=mnist1d_cnn", "model=mlp", "model.hidden=[64, 64]")),
    "mnist1d_conv": (600, ("+recipe=mnist1d_cnn", f"model.layers={CONV1D}{DENSE}")),
    "mnist1d_cnn": (800, ("+recipe=mnist1d_cnn",)),
    "mnist1d_dropout": (
        600,
        (
            "+recipe=mnist1d_cnn",
            "model=layers",
            "model.layers=[flatten, {name: dense, features: 64}, relu, "
            f"{{name: dropout, rate: 0.3}}, {DENSE}",
        ),
    ),
    "text_bigrams": (
        400,
        (
            *TEXT,
            "model=layers",
            f"model.layers=[{{name: embedding, vocabulary: 256, features: 32}}, {DENSE}",
        ),
    ),
    "text_gpt": (
        240,
        (
            *TEXT,
            "model.features=32",
            "model.hidden=64",
            "model.heads=2",
            "model.blocks=1",
            "train.batch_size=16",
        ),
    ),
    "words_mean": (
        400,
        (
            *WORDS,
            "model.layers=[{name: embedding, vocabulary: 4003, features: 32}, mean_token, "
            f"{DENSE}",
        ),
    ),
    "words_conv": (
        240,
        (
            *WORDS,
            "model.layers=[{name: embedding, vocabulary: 4003, features: 32}, "
            f"{{name: conv1d, features: 32, kernel: 3}}, relu, mean_token, "
            f"{DENSE}",
        ),
    ),
    "pairs_mean": (
        400,
        (
            *PAIRS,
            "model.layers=[{name: branches, inputs: [text_a, text_b], branches: ["
            "[{name: embedding, vocabulary: 4003, features: 32}, mean_token], "
            "[{name: embedding, vocabulary: 4003, features: 32}, mean_token]]}, "
            f"{DENSE}",
        ),
    ),
    "wine_wide": (
        240,
        (TABULAR, "dataset.shipped=wine", "dataset.target=cultivar", "model.hidden=[128, 64]"),
    ),
}
"""Number of steps and overrides of each family."""
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "adamw_cosine": (
        "optimizer=adamw",
        "schedule=cosine",
        "train.optimizer.lr=0.0001,0.0003,0.001,0.002,0.005,0.01,0.03,0.1",
    ),
    "momentum_constant": (
        "optimizer=momentum",
        "schedule=constant",
        "train.optimizer.lr=0.0005,0.001,0.003,0.005,0.01,0.02,0.05,0.1",
    ),
    "sgd_decay": (
        "optimizer=sgd",
        "schedule=warmup_stable_decay",
        "train.optimizer.lr=0.003,0.01,0.02,0.05,0.1,0.2,0.3,0.5",
    ),
}


def choose_side(family: str) -> Side:
    """Return the side of a family, by the first byte of its name's SHA-256."""
    return "fit" if hashlib.sha256(family.encode()).digest()[0] % 2 else "held_out"


def train(root: Path, names: Sequence[str]) -> None:
    """Train the sweeps of families; one that is done already isn't trained again."""
    for family in names or FAMILIES:
        steps, keys = FAMILIES[family]
        for variant, varied in VARIANTS.items():
            folder = root / family / variant
            command = [sys.executable, "-m", "pipeline", "-m", *keys, *COMMON, *varied]
            command += [f"train.steps={steps}", f"eval.every_steps={steps // EVALUATIONS}"]
            command += [f"hydra.sweep.dir={folder}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(family, variant, done.returncode, flush=True)
            if done.returncode:
                print(done.stdout[-1500:], done.stderr[-1500:], flush=True)
