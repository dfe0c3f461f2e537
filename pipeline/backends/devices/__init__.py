"""Devices that a recipe can name: one part file each; none imports jax at the top."""
