"""Graphs that JAX computes and trains, and their files, all without torch."""
