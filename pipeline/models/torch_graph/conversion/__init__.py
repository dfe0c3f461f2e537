"""Graphs from modules of PyTorch, and layers of this project from graphs."""
