"""Callbacks: code that is notified of a run's events, and may make requests to the run."""
