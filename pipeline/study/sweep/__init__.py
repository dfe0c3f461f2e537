"""Sweeps: many jobs of one command, shared by any number of processes, and a table of them all."""
