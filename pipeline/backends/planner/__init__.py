"""Search for the fastest sharding of a training step on a mesh of devices."""
