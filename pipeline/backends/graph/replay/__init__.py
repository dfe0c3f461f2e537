"""Replay of a jaxpr, equation by equation, to find the origin of a non-finite value."""
