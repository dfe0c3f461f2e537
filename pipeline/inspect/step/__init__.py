"""Step: what happened at a step of a run, by layer and by sample."""
