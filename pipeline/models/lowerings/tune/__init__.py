"""Choosing lowerings by measurement, and remembering what was chosen."""
