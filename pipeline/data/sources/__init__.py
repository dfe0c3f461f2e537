"""Sources of data: one module per family, each source a component of kind "dataset"."""
