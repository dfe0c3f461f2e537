"""Devices that a recipe can name: one component file each; none imports jax at the top."""
