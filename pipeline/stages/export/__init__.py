"""Import and export of weights: files, names, layouts, restoring, inference."""
