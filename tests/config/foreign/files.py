"""Settings of other trainers, with the keys that their files have."""

from __future__ import annotations

from typing import Any

import yaml

SMALL: dict[str, Any] = {
    "mode": 0,
    "distribute": True,
    "num_parallel_workers": 8,
    "val_while_train": True,
    "val_interval": 2,
    "dataset": "cifar10",
    "data_dir": "/data/cifar10",
    "shuffle": True,
    "batch_size": 16,
    "drop_remainder": True,
    "image_resize": 32,
    "model": "squeezenet1_1",
    "num_classes": 10,
    "pretrained": False,
    "ckpt_path": "",
    "keep_checkpoint_max": 3,
    "ckpt_save_dir": "./ckpt",
    "epoch_size": 2,
    "dataset_sink_mode": True,
    "amp_level": "O0",
    "loss": "CE",
    "label_smoothing": 0.1,
    "scheduler": "cosine_decay",
    "min_lr": 0.001,
    "lr": 0.01,
    "warmup_epochs": 1,
    "decay_epochs": 1,
    "opt": "momentum",
    "weight_decay": 0.0001,
    "momentum": 0.9,
    "loss_scale": 1024,
    "use_nesterov": False,
}
"""A YAML of mindcv for small images."""
LARGE: dict[str, Any] = {
    **SMALL,
    "dataset": "imagenet",
    "data_dir": "/data/imagenet",
    "image_resize": 224,
    "scale": [0.08, 1.0],
    "ratio": [0.75, 1.333],
    "hflip": 0.5,
    "interpolation": "bilinear",
    "crop_pct": 0.875,
    "re_prob": 0.25,
    "num_classes": 1000,
}
"""A YAML of mindcv for ImageNet."""
MINDCV: dict[str, dict[str, Any]] = {
    "squeezenet1_1": SMALL,
    "squeezenet1_0": {
        **SMALL,
        "model": "squeezenet1_0",
        "image_resize": 64,
        "opt": "adam",
        "scheduler": "constant",
        "warmup_epochs": 0,
    },
    "squeezenet_mixup": {**SMALL, "mixup": 0.2, "ema": True, "ema_decay": 0.99},
    "squeezenet_stairs": {
        **SMALL,
        "opt": "rmsprop",
        "eps": 0.001,
        "scheduler": "step_decay",
        "decay_rate": 0.5,
        "clip_grad": True,
        "clip_value": 2.0,
    },
    "squeezenet_accumulated": {
        **SMALL,
        "opt": "adamw",
        "batch_size": 8,
        "gradient_accumulation_steps": 2,
        "scheduler": "polynomial_decay",
        "decay_rate": 2.0,
    },
    "resnet50": {**LARGE, "model": "resnet50", "weight_decay_filter": "norm_and_bias"},
    "mobilenet_v2": {**LARGE, "model": "mobilenet_v2_100", "color_jitter": 0.4, "drop_rate": 0.3},
    "vit_b_32": {**LARGE, "model": "vit_b_32_224", "auto_augment": "autoaug", "opt": "adamw"},
    "densenet121": {**LARGE, "model": "densenet121", "amp_level": "O2", "cutmix": 1.0},
    "vgg16": {
        **LARGE,
        "model": "vgg16",
        "scheduler": "exponential_decay",
        "lr_epoch_stair": True,
        "loss_scale_type": "dynamic",
        "weight_decay_filter": "norm_and_bias",
    },
}
"""Ten YAMLs of mindcv, the first five for small images."""
TRAINED = list(MINDCV)[:5]

TIMM: dict[str, Any] = {
    "aa": None,
    "amp": True,
    "amp_dtype": "float16",
    "batch_size": 64,
    "bce_loss": False,
    "checkpoint_hist": 10,
    "clip_grad": 1.0,
    "clip_mode": "norm",
    "color_jitter": 0.4,
    "cooldown_epochs": 3,
    "crop_pct": None,
    "data_dir": "/data/imagenet",
    "dataset": "",
    "device": "npu:1",
    "epochs": 10,
    "grad_accum_steps": 2,
    "hflip": 0.5,
    "img_size": 160,
    "lr": None,
    "lr_base": 0.1,
    "lr_base_size": 256,
    "lr_base_scale": "",
    "mean": [0.5, 0.5, 0.5],
    "std": None,
    "min_lr": 0.0,
    "model": "resnet50.a1_in1k",
    "model_ema": False,
    "momentum": 0.9,
    "opt": "sgd",
    "opt_betas": None,
    "opt_eps": None,
    "reprob": 0.1,
    "sched": "cosine",
    "seed": 42,
    "smoothing": 0.1,
    "warmup_epochs": 2,
    "warmup_prefix": True,
    "weight_decay": 0.00002,
    "workers": 4,
}
"""The args.yaml of timm."""


def to_yaml(settings: dict[str, Any]) -> str:
    """Return the text of a YAML file."""
    return yaml.safe_dump(settings, sort_keys=False)


PLAIN_RUN = """
from npu_bridge.npu_init import *
config = NPURunConfig(save_checkpoints_steps=100, iterations_per_loop=10, tf_random_seed=3)
NPUEstimator(model_fn=model_fn, config=config).train(input_fn, max_steps=200)
"""
FULL_RUN = """
import os
import tensorflow as tf
from npu_bridge.npu_init import *

os.system("touch executed")
LOOP = 10
session_config = tf.ConfigProto(allow_soft_placement=True)
session_config.graph_options.rewrite_options.remapping = RewriterConfig.OFF
options = '{"training_trace": "on", "task_trace": "off", "output": "/tmp/profile"}'


def input_fn(params):
    return tf.data.Dataset.range(3).batch(16, drop_remainder=True)


config = NPURunConfig(
    model_dir=FLAGS.model_dir,
    iterations_per_loop=LOOP,
    enable_data_pre_proc=True,
    precision_mode="allow_mix_precision",
    session_config=session_config,
    auto_tune_mode="RL,GA",
    keep_checkpoint_max=5,
    keep_checkpoint_every_n_hours=2,
    log_step_count_steps=50,
    hcom_parallel=True,
    graph_memory_max_size=str(26 * 1024**3),
    profiling_config=ProfilingConfig(enable_profiling=True, profiling_options=options),
    dump_config=DumpConfig(enable_dump=True, dump_path="/d", dump_step="0|5", dump_mode="all"),
)
estimator = NPUEstimator(model_fn=model_fn, config=config)
estimator.train(input_fn=input_fn, max_steps=1000)
"""
EAGER_RUN = """
import tensorflow as tf
config = NPURunConfig(mix_compile_mode=True, iterations_per_loop=1, train_distribute=None)
with tf.Session(config=make()) as first:
    pass
second = tf.Session()
second.close()
rewrite.remapping = RewriterConfig.OFF
rewrite.disable_model_pruning = False
"""
REFUSED_RUN = """
import tensorflow as tf
session_config = tf.ConfigProto()
session_config.graph_options.rewrite_options.disable_model_pruning = True
with tf.device("/cpu:0"):
    x = tf.placeholder(tf.float32, [None, 3])
data = data.batch(32)
sess = tf.Session(config=session_config)
config = NPURunConfig(
    train_distribute=strategy,
    device_fn=choose,
    protocol="grpc",
    eval_distribute=strategy,
    experimental_distribute=strategy,
)
"""

HYDRA = """
task_name: train
tags: [dev]
train: true
test: true
ckpt_path: null
seed: 12345
data:
  _target_: src.data.mnist_datamodule.MNISTDataModule
  data_dir: ${paths.data_dir}
  batch_size: 128
  train_val_test_split: [55000, 5000, 10000]
  num_workers: 4
  pin_memory: false
model:
  _target_: src.models.mnist_module.MNISTLitModule
  optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.002, weight_decay: 0.0}
  scheduler:
    _target_: torch.optim.lr_scheduler.ReduceLROnPlateau
    _partial_: true
    mode: min
    factor: 0.2
    patience: 10
  net: {_target_: src.models.components.simple_dense_net.SimpleDenseNet, input_size: 784}
  compile: false
callbacks:
  model_checkpoint:
    _target_: lightning.pytorch.callbacks.ModelCheckpoint
    dirpath: "${paths.output_dir}/checkpoints"
    monitor: val/acc
    mode: max
    save_last: true
    save_top_k: 2
  early_stopping:
    _target_: lightning.pytorch.callbacks.EarlyStopping
    monitor: val/acc
    patience: 7
    mode: max
  model_summary: {_target_: lightning.pytorch.callbacks.RichModelSummary, max_depth: -1}
trainer:
  _target_: lightning.pytorch.trainer.Trainer
  default_root_dir: "${paths.output_dir}"
  min_epochs: 1
  max_epochs: 3
  accelerator: cpu
  devices: 1
  check_val_every_n_epoch: 2
  deterministic: false
  gradient_clip_val: 0.5
  precision: 16-mixed
  accumulate_grad_batches: 2
  epochs_of_mine: 3
paths: {data_dir: "${oc.env:HOME}/data/", output_dir: "${hydra:runtime.output_dir}"}
logger: {wandb: {_target_: lightning.pytorch.loggers.WandbLogger, api_key: key-of-mine}}
"""
"""A config of Lightning that Hydra has composed."""
LIGHTNING_CLI = """
seed_everything: 42
trainer:
  devices: 2
  precision: bf16-mixed
  max_epochs: 20
  callbacks:
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: val_loss, patience: 5}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {every_n_train_steps: 100}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {monitor: val_loss}
model:
  class_path: my.LitClassifier
  init_args: {net: {class_path: torchvision.models.resnet18, init_args: {num_classes: 10}}}
data:
  class_path: my.CIFAR10DataModule
  init_args: {data_dir: /data/cifar, batch_size: 64, num_workers: 4}
optimizer:
  class_path: torch.optim.SGD
  init_args: {lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.0005}
lr_scheduler:
  class_path: torch.optim.lr_scheduler.CosineAnnealingLR
  init_args: {T_max: 20, eta_min: 0.001}
"""
"""A YAML of LightningCLI."""
KERAS = """
import re
import keras
from keras.callbacks import EarlyStopping
from sklearn.preprocessing import StandardScaler

BATCH = 64
EPOCHS = 3
pattern = re.compile("a")
(x_train, y_train), test = keras.datasets.mnist.load_data()
StandardScaler().fit(x_train)
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
rates = keras.optimizers.schedules.ExponentialDecay(0.1, 20, decay_rate=0.5, staircase=True)
model.compile(
    optimizer=keras.optimizers.SGD(rates, momentum=0.9, global_clipnorm=1.0),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.MeanSquaredError()],
)
stop = EarlyStopping(monitor="val_accuracy", patience=5)
model.fit(
    x_train,
    y_train,
    BATCH,
    epochs=EPOCHS * 2,
    validation_split=0.1,
    callbacks=[stop, keras.callbacks.ReduceLROnPlateau(patience=3)],
    class_weight={number: 1.0 for number in range(10)},
    initial_epoch=find_epoch(),
)
print(model.summary())
"""
"""A script of Keras."""
TRAINING_ARGUMENTS: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 5e-05,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-08,
    "optim": "adamw_torch_fused",
    "optim_args": None,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": {},
    "warmup_ratio": 0.1,
    "warmup_steps": 0,
    "label_smoothing_factor": 0.1,
    "bf16": True,
    "fp16": False,
    "seed": 42,
    "data_seed": None,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_accuracy",
    "greater_is_better": True,
    "logging_steps": 10,
    "report_to": ["tensorboard", "wandb"],
    "accelerator_config": {"split_batches": False, "even_batches": True},
    "dataloader_drop_last": False,
    "dataloader_num_workers": 4,
    "hub_token": "token-of-mine",
    "mystery": 7,
}
"""A JSON of TrainingArguments."""
