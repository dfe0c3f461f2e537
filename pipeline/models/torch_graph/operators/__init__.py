"""The operators of graphs, each a function of JAX; several modules by kind."""
