"""Timings, one command each; results lie in benchmarks/results with machine and versions."""
