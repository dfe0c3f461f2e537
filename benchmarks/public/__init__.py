"""Boards that others published figures for, each by one command: `python -m benchmarks.public`."""
