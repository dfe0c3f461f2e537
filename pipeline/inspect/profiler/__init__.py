"""Profile of a run: where the time of its steps goes, and the change that would help."""
