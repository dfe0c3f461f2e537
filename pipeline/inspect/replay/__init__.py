"""Replay: a run opened at any of its steps, with the bits that it had there."""
