"""The replay of a jaxpr, equation by equation: where a value that is not finite comes from."""
