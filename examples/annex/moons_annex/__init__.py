"""A dataset, a feature of the step and a command for the pipeline."""
