"""Differential privacy of training: clipped gradients, noise, accounting and audits."""
