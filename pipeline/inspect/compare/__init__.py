"""Accuracy comparison: two computations of one step, tensor by tensor, and the layer to blame."""
