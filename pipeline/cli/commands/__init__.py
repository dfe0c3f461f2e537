"""The commands: options, help and completion of all, declared without importing what they call."""

COMPLETION_VARIABLE = "_PIPELINE_COMPLETE"
"""Variable of the environment by which the completion of a shell calls the program."""
