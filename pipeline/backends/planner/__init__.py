"""Search for the fastest cut of a training step over a mesh of devices (X-04)."""
