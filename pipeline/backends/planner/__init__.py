"""Search for the fastest sharding of a training step over a mesh of devices."""
