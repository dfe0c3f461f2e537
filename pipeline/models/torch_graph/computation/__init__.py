"""Graphs computed and trained by JAX, and kept in files; nothing here needs torch."""
