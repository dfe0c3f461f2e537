"""The profile and the forecast of a custom step, as `pipeline.sink` runs it."""
