"""A loop of one's own between sinks: S-10's line, the learning rate halved where the loss rises.

python examples/own_loop.py
"""

from pipeline import Trainer

trainer = Trainer("lenet5_digits", ["train.steps=400", "train.sink_size=50"])
before = float("inf")
for sink in trainer.sinks():
    print(f"epoch: {sink.step // 50}/8, losses: {sink.loss:.4f}")
    if sink.loss > before:
        trainer.control.scale_learning_rate(0.5)
    if trainer.evaluate()["accuracy"] > 0.98:
        break  # saved, and resumed by train.resume=auto
    before = sink.loss
print(trainer.summary.status, trainer.summary.reason)
