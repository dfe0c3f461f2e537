"""Import and export of weights: files, names, layouts and inference."""
