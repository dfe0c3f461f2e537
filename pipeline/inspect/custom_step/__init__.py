"""Profile and forecast of a custom step, as `pipeline.sink` runs it."""
