"""Profile of a run: how its steps spend their time, and the change that would help."""
