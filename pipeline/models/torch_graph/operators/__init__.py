"""The functions of JAX that compute the operators of graphs."""
