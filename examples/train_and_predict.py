"""Train on the digits that ship with the package, then look at the network: 10 s.

python examples/train_and_predict.py
"""

import numpy as np

from pipeline import Trainer

trainer = Trainer("lenet5_digits", ["train.epochs=10"])
trainer.fit()
print("accuracy", trainer.evaluate()["accuracy"])

images = np.asarray(trainer.dataset.eval.columns["image"][:8])
labels = np.asarray(trainer.dataset.eval.columns["label"][:8])
print("predicted", trainer.predict(images).argmax(axis=-1), "true", labels)

for path, array in trainer.parameters.items():
    print(f"{path:<20} {array.shape}")

losses = trainer.steps["loss"]
print(f"{len(losses)} losses, from {losses[0]:.3f} to {losses[-1]:.3f}: ready for a plot")
