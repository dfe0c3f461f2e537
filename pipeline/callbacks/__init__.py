"""Callbacks: code that is told of a run's events, and may ask things of the run."""
