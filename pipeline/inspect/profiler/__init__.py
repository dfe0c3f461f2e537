"""Profile of a run: how its steps spend their time, and a change that makes them faster."""
