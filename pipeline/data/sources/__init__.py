"""Where data comes from: one module per family of sources, each a part of kind "dataset"."""
