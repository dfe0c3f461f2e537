"""The replay of a jaxpr, equation by equation: the origin of a value that is not finite."""
