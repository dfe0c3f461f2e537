"""Callbacks as objects: one logs the norm of the weights, one ends training at a small loss.

python examples/own_callbacks.py
"""

import numpy as np

from pipeline import load_recipe, run
from pipeline.api import Callback


class WeightNorm(Callback):
    # To scalars.jsonl and TensorBoard.
    def on_sink(self, run, report):
        squares = (np.square(array).sum() for array in run.parameters().values())
        run.log("weight_norm", np.sqrt(sum(squares)))


class StopWhenSmall(Callback):
    in_a_row = 0

    def on_sink(self, run, report):
        self.in_a_row = self.in_a_row + 1 if report.loss < 0.05 else 0
        if self.in_a_row == 3:
            run.stop(f"the loss is {report.loss:.4f}")

    def state(self):
        return self.in_a_row

    def restore(self, state):
        self.in_a_row = state


recipe = load_recipe("lenet5_digits", ["train.sink_size=20"])
print(run(recipe, callbacks=[WeightNorm(), StopWhenSmall()]).reason)
