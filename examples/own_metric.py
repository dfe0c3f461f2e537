"""A metric of one's own, whose best checkpoint is kept: the accuracy among the sure predictions.

python examples/own_metric.py
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pipeline import Trainer
from pipeline.api import MetricSpec, component


@component("metric")
class SureAccuracy(MetricSpec):
    name: Literal["sure_accuracy"] = "sure_accuracy"
    least: float = 0.9

    def zero(self, classes):
        return jnp.zeros(2, jnp.int32)

    def sums(self, logits, labels, mask):
        sure = mask & (jax.nn.softmax(logits).max(axis=-1) > self.least)
        right = sure & (logits.argmax(axis=-1) == labels)
        return jnp.array([right.sum(), sure.sum()])

    def value(self, sums):
        return float(sums[0] / max(sums[1], 1))


own = "eval.metrics=[{name: sure_accuracy, least: 0.95}]"
keys = ["train.epochs=8", "eval.every_epochs=2"]
trainer = Trainer("lenet5_digits", [own, *keys, "checkpoint.best=sure_accuracy"])
trainer.fit()
print(trainer.evaluations["sure_accuracy"])
