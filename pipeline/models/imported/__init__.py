"""Networks that are code of the user's own: flax modules, JAX functions and Keras models."""
