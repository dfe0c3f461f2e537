"""The commands: options, help and completion of all, declared without importing what they call."""
