"""Networks in custom code: flax modules, JAX functions and Keras models."""
