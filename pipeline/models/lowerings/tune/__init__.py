"""Choosing lowerings by measurement, and remembering what was chosen (A-01..A-03)."""
