"""Populations: runs that differ in numbers alone, trained by one compiled program."""
