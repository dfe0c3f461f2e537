"""Processes that the program starts by itself."""
