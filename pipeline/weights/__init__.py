"""Weights from elsewhere and for elsewhere: files, names, layouts, export, inference."""
