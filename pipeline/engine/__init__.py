"""The loop over sinks: schedule, callbacks and monitors; and `pipeline.sink`, without a recipe."""
