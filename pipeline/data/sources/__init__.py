"""Sources of data: one module per family, each source a part of kind "dataset"."""
