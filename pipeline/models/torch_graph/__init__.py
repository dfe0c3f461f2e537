"""Networks of PyTorch: exported once into a graph that is data, and computed and trained by JAX."""
