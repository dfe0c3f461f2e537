"""Accuracy comparison of two computations of one step, tensor by tensor and layer by layer."""
