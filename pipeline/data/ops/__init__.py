"""The map ops that a recipe can list under `dataset.train.ops` and `dataset.eval.ops`."""
