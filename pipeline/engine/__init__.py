"""The loop over sinks, its schedule, callbacks and monitors, and `pipeline.sink`."""
