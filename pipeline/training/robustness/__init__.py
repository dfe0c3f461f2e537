"""Robustness: training on attacked images, and attacks and corruptions that measure it."""
