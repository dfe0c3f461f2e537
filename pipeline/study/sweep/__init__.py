"""Sweeps: the jobs of one command, shared by any number of processes, and their table."""
