"""The loop over sinks for any step function, without a recipe."""
